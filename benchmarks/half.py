"""Products of 16-bit numbers beside those of float32, as weft selects them, plain and packed.

    python benchmarks/half.py
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 WEFT_CACHE=/tmp/avx2 python benchmarks/half.py

The second line keeps torch from instructions that a processor with AVX2 alone lacks. All products
run in turn on one thread; printed are the medians of its processor time, which other programs
disturb little, in milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

import weft
from weft.kernels.products import multiply

SHAPES = ((1, 2048, 2048), (2, 2048, 2048), (8, 2048, 2048), (64, 2048, 2048), (2048, 2048, 1024))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SECONDS = 2.0  # about, for each shape


def products(rows: int, k: int, n: int) -> dict[tuple[str, str], Callable[[], None]]:
    """The products of this shape by dtype and layout of the weight."""
    x, b = torch.randn(rows, k), torch.randn(k, n)
    found: dict[tuple[str, str], Callable[[], None]] = {}
    for dtype in DTYPES:
        rows_of, weight = x.to(dtype), b.to(dtype)
        transposed = weight.t().contiguous().t()
        layouts = {"plain": weight, "transposed": transposed, "packed": weft.pack(transposed)}
        for layout, used in layouts.items():
            out = torch.empty(rows, n, dtype=dtype)
            found[str(dtype).removeprefix("torch."), layout] = partial(multiply, rows_of, used, out)
    return found


def main() -> None:
    torch.set_num_threads(1)
    for shape in SHAPES:
        works = products(*shape)
        milliseconds: dict[tuple[str, str], list[float]] = {case: [] for case in works}
        for work in works.values():
            work()
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end or len(milliseconds["float32", "plain"]) < 5:
            for case, work in works.items():
                start = time.thread_time()
                work()
                milliseconds[case].append(1e3 * (time.thread_time() - start))
        print("x".join(map(str, shape)))
        for (dtype, layout), times in milliseconds.items():
            beside = median(milliseconds["float32", layout])
            found = median(times)
            print(f"  {dtype:9} {layout:11} {found:9.3f} ms, float32 / it: {beside / found:.2f}")


if __name__ == "__main__":
    main()
