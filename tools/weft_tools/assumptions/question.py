"""A question to a GPU, and what its answer means for weft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

Answer = dict[str, Any]
"""What a GPU has answered: values that JSON can hold."""


class Finding(NamedTuple):
    """What an answer means for weft: whether weft can rely on the assumption, and a sentence.

    ``unknown`` are answers from which this does not follow.
    """

    verdict: Literal["fine", "bad", "unknown"]
    means: str


class Question(NamedTuple):
    """An assumption of the device engine.

    Attributes:
        name: the question's group and its own name, divided by a slash.
        relied_on: the assumption, a sentence.
        where: the file of weft that relies on it.
        ask: asks the current GPU; a function of a module, since it runs in another process.
        verdict: what an answer means.
        remedy: what to do if it is bad, a sentence.
        seconds: the time after which the question counts as hanging.
    """

    name: str
    relied_on: str
    where: str
    ask: Callable[[], Answer]
    verdict: Callable[[Answer], Finding]
    remedy: str
    seconds: float = 15.0

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]
