"""Collectives on the same tensors in each call, and on tensors that are new in each call, as models
have them.

``python benchmarks/new_tensors.py [KIB …]``, by default 4, 1024, 4096 and 16384 KiB of each rank:
two ranks of one thread each, float32. All calls alternate; the script prints rank 0's times in
microseconds, the median of the rounds and the best. Making and filling a new tensor is part of a
call; the first line has it alone.
"""

import sys
from collections import deque
from statistics import median

import torch
import torch.distributed as dist
from rounds import Call, alternating, seconds

import weft

ROUNDS = 50
SECONDS = 0.002  # of a round of one call, about
ALIVE = 8  # tensors, so that the next one is at another address
FLOAT = 4  # bytes


def calls_of(world: weft.World, groups: dict[str, dist.ProcessGroup], kib: int) -> dict[str, Call]:
    """The calls that are compared, of `kib` KiB of each rank."""
    count = (kib << 10) // FLOAT
    x = torch.ones(count)
    y = torch.ones(world.ranks * count)
    symmetric = world.empty(world.ranks * count, 1).view(-1)
    alive: deque[torch.Tensor] = deque(maxlen=ALIVE)

    def new(like: torch.Tensor) -> torch.Tensor:
        alive.append(torch.empty_like(like))
        return alive[-1]

    def new_input() -> torch.Tensor:
        return new(x).fill_(1)

    calls: dict[str, Call] = {
        "a new input": new_input,
        "all_reduce, same tensors": lambda: weft.all_reduce(x, out=x),
        "all_reduce, new, in place": lambda: weft.all_reduce(a := new_input(), out=a),
        "all_reduce, new result": lambda: alive.append(weft.all_reduce(x)),
        "all_gather, same tensors": lambda: weft.all_gather(x, out=y),
        "all_gather, symmetric out": lambda: weft.all_gather(x, out=symmetric),
        "all_gather, new, new out": lambda: weft.all_gather(new_input(), out=new(y)),
        "all_gather, new result": lambda: alive.append(weft.all_gather(x)),
    }
    for backend, group in groups.items():
        calls[f"dist.all_reduce on {backend}, new"] = lambda group=group: dist.all_reduce(
            new_input(), group=group
        )
    return calls


def measure(sizes: list[int]) -> list[str]:
    """The lines of the table."""
    dist.init_process_group("gloo")
    groups = {backend: dist.new_group(backend=backend) for backend in ("gloo", "weft")}
    lines = []
    with weft.init() as world:
        for kib in sizes:
            calls = calls_of(world, groups, kib)
            counts = {}
            for name, call in calls.items():
                seconds(call, 10)  # plans are chosen
                first = torch.tensor(seconds(call, 5))
                dist.all_reduce(first, dist.ReduceOp.MAX)
                counts[name] = max(1, min(300, int(SECONDS / first.item())))
            times = alternating(calls, counts, ROUNDS)
            lines += [
                f"{kib:6d} KiB  {name:30s} {1e6 * median(each):9.1f} {1e6 * min(each):9.1f}"
                for name, each in times.items()
            ]
    dist.destroy_process_group()
    return lines


if __name__ == "__main__":
    sizes = [int(word) for word in sys.argv[1:]] or [4, 1024, 4096, 16384]
    print(*weft.launch(measure, 2, sizes, threads=1)[0], sep="\n")
