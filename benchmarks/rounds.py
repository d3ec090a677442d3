"""Times of calls that all ranks make together, in rounds in which they alternate, so that noise
affects all of them equally.
"""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch
import torch.distributed as dist

import weft

Call = Callable[[], object]
SECONDS = 0.02
"""About the seconds of one measurement of `compared`."""


def seconds(call: Call, calls: int, barrier: Call = weft.barrier) -> float:
    """The time of a call, of several from a barrier on."""
    barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def alternating(
    calls: Mapping[str, Call],
    numbers: Mapping[str, int],
    rounds: int,
    barriers: Mapping[str, Call] | None = None,
) -> dict[str, list[float]]:
    """The seconds of each call in every round, in which it is made this number of times, after its
    own of the `barriers`, or weft's. Every other round is in reverse order.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in [*calls][:: -1 if turn % 2 else 1]:
            barrier = barriers[name] if barriers else weft.barrier
            times[name].append(seconds(calls[name], numbers[name], barrier))
    return times


def compared(calls: Mapping[str, Call], barriers: Mapping[str, Call], rounds: int) -> str:
    """Two calls, of which each is first in every other round: the median and the best time of each,
    and the median of the ratios within a round. Each has a barrier of its own; those of all ranks
    in `torch.distributed`'s default group.
    """
    first = torch.tensor([seconds(call, 3, barriers[name]) for name, call in calls.items()]).max()
    dist.all_reduce(first, dist.ReduceOp.MAX)
    number = max(1, min(500, int(SECONDS / first.item())))
    times = alternating(calls, dict.fromkeys(calls, number), rounds, barriers)
    ratio = median(a / b for a, b in zip(*times.values(), strict=True))
    microseconds = "".join(
        f"  {name} {1e6 * median(each):9.1f} us, at best {1e6 * min(each):9.1f}"
        for name, each in times.items()
    )
    return f"{microseconds}  {ratio:6.2f}x"
