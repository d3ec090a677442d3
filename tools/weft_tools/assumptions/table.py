"""All questions, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Collection

from weft_tools.assumptions import blocking, copies, graphs, memory, queues, speeds
from weft_tools.assumptions.machine import LOADING
from weft_tools.assumptions.question import Question

QUESTIONS: tuple[Question, ...] = (
    LOADING,
    *memory.QUESTIONS,  # first: the limits of all kernels are by the clock
    *queues.QUESTIONS,
    *blocking.QUESTIONS,
    *copies.QUESTIONS,
    *speeds.QUESTIONS,
    *graphs.QUESTIONS,  # last: a capture that fails may make the process useless
)


def selected(names: Collection[str]) -> list[Question]:
    """The questions of these names or groups, all if there are none.

    Raises `ValueError` for a name that is neither.
    """
    groups = dict.fromkeys(question.group for question in QUESTIONS)
    known = {*groups, *(question.name for question in QUESTIONS)}
    for name in names:
        if name not in known:
            raise ValueError(
                f"{name} is no question or group of questions: use {', '.join(groups)}, or a name "
                "of a report, such as queues/last"
            )
    return [each for each in QUESTIONS if not names or {each.name, each.group} & {*names}]
