"""Copies and sums by one thread of a rank and by several, compared with torch's own, which show the
memory bandwidth.

``python benchmarks/threads.py [THREADS [MIB …]]``: by default 2 threads and sizes of 1, 4, 16 and
64 MiB. One thread and several alternate; the script prints medians, and the median of the ratios of
consecutive runs.
"""

import sys
import time
from collections.abc import Callable
from statistics import median

import torch

import weft
from weft.engines import engine
from weft.plan import Buffer, Plan, Reduce, Region

ROUNDS = 40
FLOAT = 4  # bytes

BUFFERS = {"a": Buffer("input", (1,)), "b": Buffer("input", (1,)), "out": Buffer("output", (1,))}
A, B, OUT = (Region(0, name, 0, 1) for name in BUFFERS)
SUM = Plan("sum", "of two", BUFFERS, ({"compute": (Reduce((A, B), OUT),)},), {})


def seconds(call: Callable[[], object], threads: int) -> float:
    torch.set_num_threads(threads)
    call()  # starts the threads
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(world: weft.World, threads: int, mib: int) -> None:
    symmetric = world.empty(1, (mib << 20) // FLOAT).normal_()
    a, b, out = (symmetric.clone() for _ in range(3))
    calls: dict[str, Callable[[], object]] = {
        "weft.put": lambda: weft.put(symmetric, a, 0),
        "weft.get": lambda: weft.get(a, symmetric, 0),
        "torch's copy": lambda: out.copy_(a),
        "weft's sum": lambda: engine(world).execute(SUM, {"a": a, "b": b, "out": out}),
        "torch's sum": lambda: torch.add(a, b, out=out),
    }
    for name, call in calls.items():
        pairs = [(seconds(call, 1), seconds(call, threads)) for _ in range(ROUNDS)]
        one, several = (1e6 * median(each) for each in zip(*pairs, strict=True))
        ratio = median(before / after for before, after in pairs)
        print(
            f"{mib:4d} MiB  {name:12s}  1 thread {one:9.1f} us  {threads} threads {several:9.1f} "
            f"us  {ratio:5.2f}x"
        )


if __name__ == "__main__":
    threads, *sizes = map(int, sys.argv[1:] or ["2"])
    with weft.init() as world:
        for size in sizes or [1, 4, 16, 64]:
            measure(world, threads, size)
