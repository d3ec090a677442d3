"""Messages of torch.distributed on weft and on gloo: two ranks of one thread each, with a process
group of either backend.

``python benchmarks/messages.py [ROUNDS]``: by default 15. Every round runs both backends, in
alternating order; the script prints the median and the best of the rounds, and the median of the
ratios within a round. It runs twice: each rank on a core of its own, and without binding, so that
gloo's threads may use other cores.

Before that, messages there and back beside those of MPIs by mpi4py (``make baselines``) and beside
an all-reduce of weft: in microseconds one way, by torch.distributed and by weft's native part
alone.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rounds import compared, seconds

from weft import launch
from weft.process_group.worlds import operations_of

KIB, MIB = 1 << 10, 1 << 20
SIZES = (8, 4 * KIB, 64 * KIB, MIB, 16 * MIB)
WINDOW = 16  # messages under way
BACKENDS = ("gloo", "weft")

Exchange = Callable[[Any, list[torch.Tensor]], object]


def round_trip(group: Any, tensors: list[torch.Tensor]) -> None:
    """A message to the peer, which sends it back."""
    if dist.get_rank():
        dist.recv(tensors[0], 0, group)
        dist.send(tensors[0], 0, group)
    else:
        dist.send(tensors[0], 1, group)
        dist.recv(tensors[1], 1, group)


def one_way(group: Any, tensors: list[torch.Tensor]) -> None:
    """Messages to the peer, one after another, and a short answer to the last."""
    if dist.get_rank():
        for tensor in tensors:
            dist.recv(tensor, 0, group)
    else:
        for tensor in tensors:
            dist.send(tensor, 1, group)
    answer(group, tensors[0])


def outstanding(group: Any, tensors: list[torch.Tensor]) -> None:
    """As `one_way`, by asynchronous calls that are all made before the first is waited for."""
    if dist.get_rank():
        works: list[Any] = [dist.irecv(tensor, 0, group) for tensor in tensors]
    else:
        works = [dist.isend(tensor, 1, group) for tensor in tensors]
    for work in works:
        work.wait()
    answer(group, tensors[0])


def answer(group: Any, tensor: torch.Tensor) -> None:
    """A short message to rank 0."""
    if dist.get_rank():
        dist.send(tensor[:8], 0, group)
    else:
        dist.recv(tensor[:8], 1, group)


def ring(group: Any, tensors: list[torch.Tensor]) -> None:
    """A message to the next rank and one from the previous rank, as a batch."""
    peer = 1 - dist.get_rank()
    send = dist.P2POp(dist.isend, tensors[0], peer, group)
    for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, tensors[1], peer, group)]):
        work.wait()


CASES: dict[str, tuple[Exchange, int]] = {
    "there and back": (round_trip, 2),
    f"{WINDOW} one way": (one_way, WINDOW),
    f"{WINDOW} isend, irecv": (outstanding, WINDOW),
    "ring, batched": (ring, 2),
}


def native_round_trip(messages: Any, rank: int, here: Any, there: Any) -> None:
    """As `round_trip`, without torch."""
    for sends in (rank == 0, rank == 1):
        begin = messages.send if sends else messages.receive
        place = here if sends or rank else there
        messages.wait(begin(*place, 1 - rank, 0), 60.0)


def parent_cores() -> set[int]:
    """The cores of the process that has started the ranks."""
    return os.sched_getaffinity(os.getppid())


def one_way_beside_mpis(rounds: int) -> list[str]:
    """The lines of a table of microseconds one way."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, gloo = dist.get_rank(), dist.new_group(backend="gloo")
    weft_group = dist.new_group(backend="weft")
    operations = operations_of(weft_group)
    assert operations is not None
    # the commits with which `make speed` compares this one have no tools of this name
    from weft_tools.bench.mpi import MPIS, MpiRanks, environment

    mpis: list[MpiRanks] = []
    if rank == 0:
        cores = [frozenset({core}) for core in sorted(parent_cores())[:2]]
        mpis = [MpiRanks(mpi, cores) for mpi in MPIS if (environment(mpi) / "installed").exists()]
    rows = []
    for size in SIZES:
        here, there = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
        numbers = torch.ones(max(2, size // 4))
        places = [(each.data_ptr(), size) for each in (here, there)]
        calls: dict[str, Callable[[], object]] = {
            "weft": partial(round_trip, weft_group, [here, there]),
            "natively": partial(native_round_trip, operations.messages.native, rank, *places),
            "all_reduce": partial(dist.all_reduce, numbers, group=weft_group),
            "gloo": partial(round_trip, gloo, [here, there]),
        }
        count = max(3, min(2000, 30 * MIB // size))
        barrier = partial(dist.barrier, weft_group)
        times: dict[str, list[float]] = {}
        for mpi in mpis:
            mpi.ask("case", "round_trip", size, "uint8", 1, "sum", 0)
        for turn in range(rounds):
            for name, call in [*calls.items()][:: -1 if turn % 2 else 1]:
                call()  # not timed, as of the MPIs
                took = seconds(call, count, barrier)
                times.setdefault(name, []).append(took / (1 if name == "all_reduce" else 2))
            for mpi in mpis:
                took = mpi.ask("time", False, count, 1)[0][0]
                times.setdefault(mpi.version[:14], []).append(took / count / 2)
            barrier()
        shown = "".join(f"  {name} {1e6 * median(each):8.1f}" for name, each in times.items())
        rows.append(f"{size:9d} B{shown}")
    for mpi in mpis:
        mpi.close()
    dist.destroy_process_group()
    return rows


def measure(rounds: int) -> list[str]:
    """The lines of the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    barriers = {backend: partial(dist.barrier, group) for backend, group in groups.items()}
    rows = []
    for name, (exchange, count) in CASES.items():
        for size in SIZES:
            tensors = [torch.ones(size, dtype=torch.uint8) for _ in range(count)]
            by_backend = {
                backend: partial(exchange, group, tensors) for backend, group in groups.items()
            }
            rows.append(f"{name:16s} {size:9d} B{compared(by_backend, barriers, rounds)}")
    dist.destroy_process_group()
    return rows


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    table = launch(one_way_beside_mpis, 2, rounds, threads=1, bind=True)[0]
    print("one way, us, each rank on a core of its own", *table, sep="\n")
    for title, bind in (("each rank on a core of its own", True), ("not bound", False)):
        print(title, *launch(measure, 2, rounds, threads=1, bind=bind)[0], sep="\n")
