"""``weft doctor --gpu``: whether a GPU meets the device engine's assumptions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape

from weft.doctor.tables import table
from weft.measure.progress import progress
from weft_tools.assumptions import asking, machine
from weft_tools.assumptions.asking import Reply
from weft_tools.assumptions.question import Answer, Question

SECONDS = 70.0
"""The time for all questions, so that the command ends within 90 s: it imports torch first, and may
have to wait for a process that it has ended.
"""
_COLOURS = {"fine": "green", "bad": "bold red", "unknown": "yellow", "error": "bold red"}


class Result(NamedTuple):
    """A question, what it led to, and what that means: ``fine``, ``bad``, ``unknown`` or
    ``error``.
    """

    question: Question
    reply: Reply
    verdict: str
    means: str


def diagnose(
    console: Console,
    questions: Sequence[Question],
    file: Path | None = None,
    begin: Callable[[], Answer] = machine.begin,
) -> bool:
    """Ask the first GPU these questions, write the JSON `file` after each, and print a report;
    returns whether no answer is bad and no question failed.
    """
    facts: Answer = {}
    results: list[Result] = []
    by_name = {question.name: question for question in questions}
    with progress("asking the GPU", len(questions)) as advance:
        for found in asking.ask(questions, begin, SECONDS):
            if isinstance(found, Reply):
                results.append(_result(by_name[found.name], found))
                advance()
            else:
                facts = found
            if file:
                _write(file, _as_json(facts, results))
    _print(console, facts, results)
    return _nothing_wrong(results)


def _nothing_wrong(results: Sequence[Result]) -> bool:
    return all(found.verdict in ("fine", "unknown") for found in results)


def _result(question: Question, reply: Reply) -> Result:
    """What a reply means."""
    if reply.not_asked:
        return Result(question, reply, "unknown", f"not asked: {reply.not_asked}")
    if reply.error:
        return Result(question, reply, "error", reply.error)
    assert reply.answer is not None
    return Result(question, reply, *question.verdict(reply.answer))


def _as_json(facts: Answer, results: Sequence[Result]) -> dict[str, Any]:
    """The facts about the machine, and what each question led to."""
    return {
        "machine": facts,
        "questions": {
            found.question.name: {
                "answer": found.reply.answer,
                "verdict": found.verdict,
                "seconds": found.reply.seconds,
                "means": found.means,
            }
            for found in results
        },
    }


def _write(file: Path, content: dict[str, Any]) -> None:
    """Replace the file as a whole, so that it can be read at any time."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(new, file)


def _print(console: Console, facts: Answer, results: Sequence[Result]) -> None:
    """Print the machine, all questions, and what is wrong with a remedy."""
    if facts:
        console.print(_machine(facts), highlight=False, markup=False)
    shown = table("question", "assumption", "", "answer")
    group = ""
    for question, _, verdict, means in results:
        if question.group != group:
            shown.add_section()
            group = question.group
        coloured = f"[{_COLOURS[verdict]}]{verdict}[/]"
        shown.add_row(question.name, escape(question.relied_on), coloured, escape(means))
    console.print(shown)
    for question, _, verdict, means in results:
        if verdict in ("bad", "error"):
            wrong = "wrong" if verdict == "bad" else "no answer"
            todo = f" {question.remedy}." if verdict == "bad" and question.remedy else ""
            text = escape(f"{question.name} ({question.where}): {means}.{todo}")
            console.print(f"[bold red]{wrong}:[/] {text}", highlight=False)
    verdicts = [found.verdict for found in results]
    counts = [f"{number} {verdict}" for verdict in _COLOURS if (number := verdicts.count(verdict))]
    fine = _nothing_wrong(results)
    console.print(
        f"{'Nothing' if fine else 'Something'} wrong was found: of {len(results)} questions "
        f"{', '.join(counts)}.",
        style="green" if fine else "",
        highlight=False,
    )


def _machine(facts: Answer) -> str:
    """The facts about the machine in a few words."""
    variables = ", ".join(f"{name}={value}" for name, value in facts["variables"].items())
    late = [name for name, value in facts["variables_at_start"].items() if value is None]
    when = f" ({', '.join(late)} set after torch.cuda.is_available)" if late else ""
    return (
        f"{facts['gpu']} with {facts['sms']} SMs and {facts['memory_gib']} GiB, "
        f"torch {facts['torch']}, CUDA {facts['cuda']}, driver for {facts['driver_cuda']}, "
        f"Triton {facts['triton']}. {variables}{when}; kernels are loaded: {facts['loading']}."
    )
