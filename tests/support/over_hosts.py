"""Plans over several hosts for tests: every schedule, and the hosts of ranks."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from weft.plan import Plan
from weft.schedules import all_reduce, all_to_all, broadcast, reduce_scatter
from weft.schedules.all_gather import all_gather
from weft.schedules.all_gather_matmul import all_gather_matmul
from weft.schedules.matmul_all_reduce import matmul_all_reduce
from weft.schedules.matmul_reduce_scatter import matmul_reduce_scatter
from weft.schedules.workload import Request

Planner = Callable[[tuple[int, ...], int], Plan]
"""From the hosts of ranks, and pieces, to a plan."""

FUSED: dict[str, Planner] = {
    f"{schedule.__name__} {algorithm}": lambda hosts, pieces, schedule=schedule, algorithm=algorithm: (
        schedule(Request(len(hosts), pieces, algorithm, hosts=hosts, remote_reads=False))
    )
    for schedule, algorithms in {
        all_gather_matmul: ("push", "ring", "sequential"),
        matmul_reduce_scatter: ("push", "ring", "sequential"),
        matmul_all_reduce: ("two_shot", "ring", "sequential"),
    }.items()
    for algorithm in algorithms
}
PLAIN: dict[str, Planner] = {
    "all_gather push": lambda hosts, pieces: all_gather(len(hosts), pieces, "push", hosts=hosts),
    "all_gather ring": lambda hosts, pieces: all_gather(len(hosts), pieces, "ring", hosts=hosts),
    **{
        f"{schedule.__name__.split('.')[-1]} {algorithm}": lambda hosts, pieces, schedule=schedule, algorithm=algorithm: (
            schedule.put(pieces, hosts, algorithm)
        )
        for schedule, algorithms in {
            reduce_scatter: ("push", "ring"),
            all_reduce: ("two_shot", "ring"),
        }.items()
        for algorithm in algorithms
    },
    "all_reduce of adjacent ranks": lambda hosts, pieces: all_reduce.all_reduce(
        len(hosts), pieces, "ring"
    ),
    "all_reduce of few": lambda hosts, pieces: all_reduce.eager_over_hosts(hosts),
    "broadcast push": lambda hosts, pieces: broadcast.push(pieces % len(hosts), hosts),
    "broadcast ring": lambda hosts, pieces: broadcast.ring(pieces, pieces % len(hosts), hosts),
    "broadcast staged push": lambda hosts, pieces: broadcast.push(
        pieces % len(hosts), hosts, staged=True
    ),
    "broadcast staged ring": lambda hosts, pieces: broadcast.ring(
        pieces, pieces % len(hosts), hosts, staged=True
    ),
    "all_to_all": lambda hosts, pieces: all_to_all.all_to_all(len(hosts), pieces, hosts=hosts),
    "all_to_all of few": lambda hosts, pieces: all_to_all.all_to_all(
        len(hosts), pieces, hosts=hosts, few=True
    ),
}


@st.composite
def groupings(draw, ranks=5, hosts=3):
    """The hosts of ranks, at least two, in any order; at most so many `ranks` and `hosts`."""
    on = draw(
        st.lists(st.integers(0, hosts - 1), min_size=2, max_size=ranks).filter(
            lambda on: len(set(on)) > 1
        )
    )
    order = [*dict.fromkeys(on)]
    return tuple(order.index(host) for host in on)
