"""Parts shared by the benchmarks of ranks that share one GPU: its description, times by its own
events, and verification.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from weft_tools.bench import harness
from weft_tools.bench.verification import Check
from weft_tools.bench.views import Views
from weft_tools.events import milliseconds

Shape = tuple[int, int, int]
"""M, K and N of a product."""
Timer = Callable[[Callable[[], object], int, int], list[float]]
"""The times of calls in milliseconds, as of `milliseconds`."""


class Measured(NamedTuple):
    """The milliseconds of the calls of a view on this rank, and the worst check around them."""

    milliseconds: list[float]
    check: Check


def hardware() -> dict[str, Any]:
    """The GPU's name and properties."""
    return harness.gpu(torch.device("cuda", torch.cuda.current_device()), 1)


def measured(
    subject: Views,
    warmup: int,
    iterations: int,
    begin: Callable[[], None] = lambda: None,
    times: Timer = milliseconds,
) -> dict[str, Measured]:
    """Each view of one rank, one after the other, after `begin`; checked before and after all are
    timed, on new inputs and poisoned outputs.
    """
    names = [*subject.views]

    def verify(name: str, run: int) -> Check:
        view = subject.views[name]
        subject.renew(run)
        harness.poison(*view.outputs)
        begin()
        view.call()
        check = view.check(run)
        begin()  # no rank renews its inputs while peers may read them
        return check

    def race() -> list[list[float]]:
        found = []
        for name in names:
            begin()
            found.append(times(subject.views[name].call, warmup, iterations))
        return found

    found, checks = harness.verified(names, verify, race)
    return dict(zip(names, map(Measured, found, checks), strict=True))


def slowest(
    of_ranks: list[dict[str, Measured]],
) -> tuple[dict[str, list[float]], dict[str, Check]]:
    """For each view the milliseconds of the slowest rank, and the worst check of any rank."""
    names = [*of_ranks[0]]
    times = {
        name: [*map(max, zip(*(one[name].milliseconds for one in of_ranks), strict=True))]
        for name in names
    }
    checks = {name: of_ranks[0][name].check for name in names}
    for one in of_ranks[1:]:
        checks = {name: check.worse(one[name].check) for name, check in checks.items()}
    return times, checks
