"""Times of calls that all ranks make together, in rounds in which they alternate, so that noise
affects all of them equally.
"""

import time
from collections.abc import Callable, Mapping

import weft

Call = Callable[[], object]


def seconds(call: Call, calls: int, barrier: Call = weft.barrier) -> float:
    """The time of a call, of several from a barrier on."""
    barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def alternating(
    calls: Mapping[str, Call], numbers: Mapping[str, int], rounds: int
) -> dict[str, list[float]]:
    """The seconds of each call in every round, in which it is made this number of times."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, numbers[name]))
    return times
