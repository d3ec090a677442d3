"""Compile, without a GPU, the kernels that `ladder.py` and `rates.py` launch on an sm_90, into
Triton's cache: in several processes at once, beside work that needs the GPU and few cores.

    TRITON_CACHE_DIR=... python benchmarks/gpu/warm.py PROCESSES [--only NAME ...]

The calls are made as on a GPU, by ranks in threads, but each launch only compiles its kernel; so
their results are undefined, and are not looked at. What is not compiled here is compiled by the
launch itself.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from weft_tools.bench.gpu.compile_only import compile_only

SMS = 132  # of an H100


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Meanwhile launches only compile their kernels, with the fences that a GPU needs."""
    from weft.gpu.kernels.all_gather_matmul import ProductKernel

    make = ProductKernel.__init__

    def fenced(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.options["FENCE"] = True

    with compile_only(), patch.object(ProductKernel, "__init__", fenced):
        yield


def climb(rung: Any) -> None:
    """The launches of a rung."""
    import weft

    options = {"products": "triton", "device_options": rung.options, "timeout": 300.0}
    with weft.local_world(rung.ranks, "cpu", **options) as local:
        local.run(lambda: rung.work(world=weft.init()))


def multiply(shape: tuple[int, int, int], tile: Any) -> None:
    """The launch of a product."""
    from rates import DTYPE, tiled

    from weft_tools.bench.gpu.rates import launch

    m, k, n = shape
    x, weight, out = (torch.empty(*each, dtype=DTYPE) for each in ((m, k), (k, n), (m, n)))
    with tiled(tile):
        launch(x, weight, out, SMS)()


def copies() -> None:
    """The kernels of copies by SMs, for every width of a word."""
    from weft.gpu.kernels import copy_rows

    copy_rows.load(torch.device("cpu"))


def works() -> dict[str, Callable[[], None]]:
    """All that is compiled, by name: that with the most kernels first."""
    import rungs
    from rates import cases

    # results are undefined
    rungs.equal = rungs.close = lambda *_: None
    needs = ("triton", "kernel", "gluon", "signals")
    never = ("time-out", "graph", "gradients")
    found: dict[str, Callable[[], None]] = {
        f"{shape}, {tile}": partial(multiply, shape, tile) for shape, tile in cases("full")
    }
    found["copies"] = copies
    for rung in rungs.rungs(on_gpu=True):
        if any(each in rung.name for each in needs) and not rung.name.startswith(never):
            found[rung.name] = partial(climb, rung)
    return found


def compile_share(names: Sequence[str], first: int, every: int) -> None:
    """Compile what every `every`-th of the names launches, from the `first` on."""
    everything, begun = works(), time.perf_counter()
    with as_on_a_gpu():
        for name in names[first::every]:
            try:
                everything[name]()
                print(f"[{time.perf_counter() - begun:6.1f} s] {name}", flush=True)
            except Exception:
                print(f"[{time.perf_counter() - begun:6.1f} s] {name} FAILED", flush=True)
                traceback.print_exc()


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("processes", type=int)
    words.add_argument("--only", nargs="+", metavar="NAME")
    given = words.parse_args()
    names = given.only or [*works()]
    start = multiprocessing.get_context("spawn").Process
    shares = [
        start(target=compile_share, args=(names, first, given.processes))
        for first in range(given.processes)
    ]
    for each in shares:
        each.start()
    for each in shares:
        each.join()
    return any(each.exitcode for each in shares)


if __name__ == "__main__":
    raise SystemExit(main())
