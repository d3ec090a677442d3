"""The views of a benchmark, calls on the same inputs: their verification and their race."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import monotonic, perf_counter
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from weft.kernels.methods import on_device
from weft.kernels.products import multiply
from weft.measure.progress import Advance, progress, unseen
from weft.measure.timing import Statistics, Stopwatch, largest, summarize
from weft.world import World
from weft_tools.bench.budget import Budget
from weft_tools.bench.graphs import captured
from weft_tools.bench.harness import poison, verified, worst
from weft_tools.bench.verification import Check

Found = TypeVar("Found")


class Rounds(Protocol):
    """Settings that have the numbers of rounds of a benchmark."""

    @property
    def warmup(self) -> int: ...
    @property
    def iterations(self) -> int: ...


class View(NamedTuple):
    """A measured call that all ranks make, the tensors that it writes, a check of the tensors for a
    run, the context in which it is called, and the function that fills its inputs with the data of
    a run, if they are not those of the other views.
    """

    call: Callable[[], object]
    outputs: tuple[Tensor, ...]
    check: Callable[[int], Check]
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    renew: Callable[[int], None] | None = None


class Views(ABC):
    """The views that one rank measures, by name, all on the same inputs."""

    views: dict[str, View]

    @abstractmethod
    def renew(self, run: int) -> None:
        """Fill the inputs with the data of this run."""


def timed(
    subject: Views,
    stopwatch: Stopwatch,
    rounds: Rounds,
    also: Callable[[], None] = lambda: None,
    graph: bool = False,
    budget: Budget | None = None,
) -> tuple[dict[str, Statistics], dict[str, Check]]:
    """The times of all views, measured alternately, and their checks as of `verify`, with a
    progress bar on rank 0. `also` is called between the measurement and the last checks. With
    `graph` replays of captured calls are timed, and checked then. There are fewer iterations if all
    would not end within the budget, and none if nothing is left of it: then the times are those of
    the first checks.
    """
    steps = 3 * len(subject.views) + rounds.iterations + max(rounds.warmup, 1) - 1
    with progress("verifying", steps, shown=stopwatch.world.rank == 0) as advance:

        def left() -> float | None:
            """The seconds for the iterations; the checks after them take as long as before."""
            return None if budget is None else max(0.0, budget.left() - checks)

        began, checks, first = monotonic(), 0.0, dict[str, float]()

        def race() -> dict[str, Statistics]:
            nonlocal checks
            checks = largest(stopwatch.world, [monotonic() - began])[0]
            seconds = left()
            if seconds == 0:
                found = largest(stopwatch.world, [first[name] for name in subject.views])
                return {
                    name: summarize([each]) for name, each in zip(subject.views, found, strict=True)
                }
            if graph:
                subject.views = {
                    name: view._replace(call=captured(stopwatch.world, view.call))
                    for name, view in subject.views.items()
                }
            return _interleave(subject, stopwatch, rounds, advance, seconds, lambda: left() == 0)

        def race_and_more() -> dict[str, Statistics]:
            times = race()
            also()
            return times

        return verify(subject, stopwatch.world, race_and_more, advance, first)


def verify(
    subject: Views,
    world: World,
    race: Callable[[], Found],
    advance: Advance = unseen,
    seconds: dict[str, float] | None = None,
) -> tuple[Found, dict[str, Check]]:
    """The result of `race`, and the worst check of every view on any rank, before and after it.

    Each check is a run on new inputs, into poisoned outputs; ``pipelined`` is the last, so its
    output remains. `advance` is called before each; `seconds` gets the time of each call.
    """

    def check(name: str, run: int) -> Check:
        advance(f"verifying {name}")
        view = subject.views[name]
        (view.renew or subject.renew)(run)
        poison(*view.outputs)
        with view.around():
            start = perf_counter()
            view.call()
            if seconds is not None:
                seconds[name] = perf_counter() - start
        return worst(world, view.check(run))

    names = sorted(subject.views, key="pipelined".__eq__)
    found, checks = verified(names, check, race)
    return found, dict(zip(names, checks, strict=True))


def _interleave(
    subject: Views,
    stopwatch: Stopwatch,
    rounds: Rounds,
    advance: Advance,
    budget: float | None,
    over: Callable[[], bool],
) -> dict[str, Statistics]:
    """The times of all views, measured alternately."""
    calls = {name: view.call for name, view in subject.views.items()}
    return stopwatch.interleave(
        calls,
        rounds.warmup,
        rounds.iterations,
        lambda: advance("measuring"),
        lambda name: subject.views[name].around(),
        lambda name: advance(f"measuring: first call of {name}"),
        budget,
        over,
    )


def product_on(device: torch.device) -> Callable[..., None]:
    """The function ``product(x, weight, out, bias=None)`` that is measured by itself: torch's on a
    GPU, that of the fastest method on a CPU.
    """
    return partial(on_device, bias=None) if device.type == "cuda" else multiply


def one_by_one(first: Callable[[], object], second: Callable[[], object]) -> None:
    """Call both."""
    first()
    second()
