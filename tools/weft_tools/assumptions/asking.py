"""Questions asked in another process, so that one that hangs or crashes does not stop the
rest: the process is ended, and another one is asked what is left.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from weft_tools.assumptions.question import Answer, Question

STARTING = 45.0
"""Seconds for a process to import torch and to begin to use the GPU."""
_ENDING = 5.0  # seconds for a process that was killed


class Reply(NamedTuple):
    """What a question led to: an answer, or an error; neither if it was `not_asked`, for this
    reason.
    """

    name: str
    seconds: float
    answer: Answer | None = None
    error: str = ""
    not_asked: str = ""


class _Failed(NamedTuple):
    """The error of a process that could not begin."""

    error: str


def ask(
    questions: Sequence[Question], begin: Callable[[], Answer], seconds: float
) -> Iterator[Answer | Reply]:
    """Ask one question after another, and yield replies as they come, each after what `begin` has
    returned in the process in which it was asked.

    After an error `begin` is called again, and if it fails, the next question is asked in a new
    process. After `seconds` no further question is asked. `begin` and what asks are functions of
    modules, or partial ones.
    """
    end = time.monotonic() + seconds
    left = list(questions)
    while left and time.monotonic() < end:
        with _Process(begin, left) as process:
            facts = process.received(min(STARTING, end - time.monotonic()))
            if not isinstance(facts, dict):
                why = facts.error if isinstance(facts, _Failed) else f"the process {facts}"
                first, *others = left
                yield Reply(first.name, 0.0, error=f"the GPU cannot be used: {why}")
                for question in others:
                    yield Reply(question.name, 0.0, not_asked="the GPU cannot be used")
                return
            yield facts
            usable = True
            while usable and left and time.monotonic() < end:
                question = left.pop(0)
                begun = time.monotonic()
                reply = process.received(min(question.seconds, end - begun))
                if isinstance(reply, str):
                    error = f"the process that asked {reply}"
                    reply = Reply(question.name, round(time.monotonic() - begun, 2), error=error)
                    usable = False
                elif reply.error:
                    usable = process.received(_ENDING) is True
                yield reply
    for question in left:
        yield Reply(question.name, 0.0, not_asked=f"no time was left: {seconds:g} s have passed")


class _Process:
    """A process that asks questions, ended with the context."""

    def __init__(self, begin: Callable[[], Answer], questions: Sequence[Question]) -> None:
        context = multiprocessing.get_context("spawn")  # a fork could not use the GPU
        self._own, theirs = context.Pipe(duplex=False)
        asks = [(question.name, question.ask) for question in questions]
        self._process = context.Process(target=_answer, args=(theirs, begin, asks), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join(_ENDING)
        self._own.close()

    def received(self, seconds: float) -> Any:
        """What the process has sent within this time; what happened instead, as text."""
        try:
            if self._own.poll(seconds):
                return self._own.recv()
        except EOFError:
            self._process.join(_ENDING)
            return f"ended, with status {self._process.exitcode}"
        return f"gave no answer within {seconds:.0f} s"


def _answer(
    to: Connection, begin: Callable[[], Answer], asks: Sequence[tuple[str, Callable[[], Answer]]]
) -> None:
    """Send what `begin` returns, then a `Reply` of each question; after one with an error, whether
    `begin` still works, and end if it does not.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the other process, which ends this
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        to.send(begin())
    except Exception as error:
        to.send(_Failed(_described(error)))
        return
    for name, question in asks:
        begun = time.perf_counter()
        reply = Reply(name, 0.0)
        try:
            reply = reply._replace(answer=question())
        except Exception as error:
            reply = reply._replace(error=_described(error))
        to.send(reply._replace(seconds=round(time.perf_counter() - begun, 2)))
        if reply.error:
            try:
                begin()
            except Exception:
                to.send(False)
                return
            to.send(True)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:600]
