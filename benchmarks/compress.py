"""Both fused operators with `compress="int8"` beside the same calls without it, on two hosts.

    benchmarks/two_hosts.sh 1 benchmarks/compress.py

Calls take turns; a time is the longest of the ranks', its median over the rounds. The error is the
largest of an element, relative to the largest of the exact result.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

import weft

SHAPES = {"all_gather_matmul": "1024x2048x128", "matmul_reduce_scatter": "1024x256x2048"}
"""Rows of all ranks x K x N: products that take less time than their rows over 1 Gbit/s."""

WARM = 100  # calls, of which the first measure algorithms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", help="rows of all ranks x K x N, in place of each one's own")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    table = Table("operator", "ms", "ms, int8", "speedup", "error", "error, int8")
    with weft.init() as world:
        own = torch.Generator().manual_seed(world.rank)
        for name, shape in SHAPES.items():
            rows, k, n = map(int, (given.shape or shape).split("x"))
            share = rows // world.ranks
            if name == "all_gather_matmul":
                a, b = torch.randn(share, k, generator=own), torch.randn(k, n, generator=own)
            else:
                a = torch.randn(rows, k // world.ranks, generator=own)
                b = torch.randn(k // world.ranks, n, generator=own)
            a, b = a.to(dtype), b.to(dtype)
            exact = getattr(weft, name)(a.double(), b.double())
            call = partial(getattr(weft, name), a, weft.pack(b))
            ways = {None: [], "int8": []}
            errors = {}
            for number in range(WARM + given.rounds):
                for compress, times in ways.items():
                    weft.barrier()
                    begin = time.perf_counter()
                    result = call(compress=compress)
                    took = torch.tensor([time.perf_counter() - begin])
                    weft.all_reduce(took, op="max", out=took)
                    if number >= WARM:
                        times.append(took.item())
                    error = (result.double() - exact).abs().max() / exact.abs().max()
                    errors[compress] = error.item()
            plain, packed = (1e3 * statistics.median(times) for times in ways.values())
            table.add_row(
                name,
                *(f"{ms:.1f}" for ms in (plain, packed)),
                f"{plain / packed:.2f}x",
                *(f"{error:.1%}" for error in errors.values()),
            )
        if world.rank == 0:
            Console().print(table)


if __name__ == "__main__":
    main()
