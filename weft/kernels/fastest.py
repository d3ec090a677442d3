"""The fastest method of `weft.kernels.methods` on this machine, timed once and stored."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

import weft.cache as cache
from weft.kernels import half
from weft.kernels.methods import METHODS

TINY = 128 * 1024
"""Elements up to which a weight counts as tiny: the overhead of a method decides. Halfway between
the widths 256 and 512 of `CASES`.

Measured on a 2-core Zen 4: 8 rows by 256 x 256 take 16 us by `torch.mm` and 32 by oneDNN, by
512 x 512 77 and 66.
"""
SMALL = 512 * 1024
"""Elements up to which a weight counts as small: products find it in a cache, so the overhead of a
method weighs more than its reads. It is halfway, in ratio, between the widths 512 and 1024 of
`CASES`.
"""
CASES = {
    "tiny": {1: 256, 8: 256, 64: 256},
    "small": {1: 512, 8: 512, 64: 512},
    "large": {1: 2048, 2: 2048, 8: 2048, 64: 2048, 512: 1024},
}
"""By the size of the weight: numbers of rows at which the methods are timed, and its width, for few
rows one that most caches do not hold. Other numbers of rows are treated as the nearest one below.
"""
LAYOUTS = ("packed plain", "packed transposed", "plain", "transposed", "columns")
"""The layouts of factors that are timed; ``columns`` is a transposed x with any weight."""
_ROUNDS = 5
"""Rounds of timing for each method, one of which warms up: the least of four.

Measured on a 2-core Zen 4: so two timings of one method differ by at most 1.7 % in 95 of 100 pairs.
"""
_FAR = 8
"""Ratio to the fastest from which on a method is not tried again.

Measured on a 2-core Zen 4: float16 is timed in 2.6 s, without the limit in 31.
"""
_WORTH = 1.05
"""How many times as fast a method must be to replace `torch.mm`: less may be noise.

Measured on a 2-core Zen 4: two timings of one method differ by up to 1.7 % in 95 of 100 pairs.
"""

Table = dict[str, dict[str, dict[str, str]]]
"""The fastest method by layout, size of the weight, and number of rows."""


def method(
    dtype: torch.dtype, out_dtype: torch.dtype, layout: str, rows: int, elements: int
) -> str:
    """The name of the fastest method for `rows` rows and a weight of so many `elements`: ``mm``,
    ``onednn`` or ``native``, with ``/float32`` if it computes in float32.
    """
    size = "tiny" if elements <= TINY else "small" if elements <= SMALL else "large"
    nearest = max(case for case in CASES[size] if case <= rows)
    return _method(dtype, out_dtype, layout, size, nearest, torch.get_num_threads())


@functools.cache
def _method(
    dtype: torch.dtype, out_dtype: torch.dtype, layout: str, size: str, rows: int, threads: int
) -> str:
    return _table(dtype, out_dtype, threads)[layout][size][str(rows)]


@functools.cache
def _table(dtype: torch.dtype, out_dtype: torch.dtype, threads: int) -> Table:
    kind = f"{dtype}-{out_dtype}".replace("torch.", "")
    methods = candidates(dtype, out_dtype)
    software = f"torch {torch.__version__} {threads} threads {' '.join(methods)}"
    machine = {"machine": f"{cache.processor()} {software}"}

    def fits(found: Table) -> bool:
        return all(
            found[layout][size][str(rows)] in methods
            for layout in LAYOUTS
            for size, cases in CASES.items()
            for rows in cases
        )

    table: Table = cache.once(
        cache.of_this_machine(f"fastest-{kind}", software),
        lambda: _measure(dtype, out_dtype) | machine,
        fits,
    )
    return table


def candidates(dtype: torch.dtype, out_dtype: torch.dtype) -> list[str]:
    """The methods that can be fastest for these dtypes."""
    if dtype == torch.float64:
        return ["mm"]
    onednn = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    names = ["mm/float32", "onednn/float32"] if dtype != torch.float32 else []
    if names and half.COLUMNS:
        names.append("native/float32")
    if dtype == out_dtype:
        names += ["mm", "onednn"]
    return [name for name in names if onednn or not name.startswith("onednn")]


@torch.inference_mode(False)
def _measure(dtype: torch.dtype, out_dtype: torch.dtype) -> Table:
    """Time every method in every case; one that is far behind at one number of rows counts as such
    at all larger ones.
    """
    widths = {width for cases in CASES.values() for width in cases.values()}
    weights = {width: torch.randn(width, width, device="cpu").to(dtype) for width in widths}
    forms: dict[tuple[str, int, str], Tensor] = {}

    def work(layout: str, rows: int, width: int, name: str) -> Callable[[], None]:
        x = torch.randn(rows, width, device="cpu").to(dtype)
        out, b = torch.empty(rows, width, dtype=out_dtype, device="cpu"), weights[width]
        if layout == "columns":
            x = x.t().contiguous().t()
        if layout.endswith("transposed"):
            b = b.t()
        form, packed, run = METHODS[name]
        if not layout.startswith("packed"):
            return lambda: run(x, form(b), out, None, False)

        def with_packed() -> None:
            if (key := (layout, width, name)) not in forms:
                forms[key] = packed(b)
            run(x, forms[key], out, None, True)

        return with_packed

    table: Table = {}
    for layout in LAYOUTS:
        seconds: dict[tuple[str, int], dict[str, float]] = {}
        for size, cases in CASES.items():
            names = candidates(dtype, out_dtype)
            for rows, width in cases.items():
                times = least_times({name: work(layout, rows, width, name) for name in names})
                far = _FAR * min(times.values())
                names = [name for name in names if times[name] < far]
                others = dict.fromkeys(candidates(dtype, out_dtype), far)
                seconds[size, rows] = others | times
        found = _fastest(seconds, layout.startswith("packed"))
        table[layout] = {
            size: {str(rows): found[size, rows] for rows in cases} for size, cases in CASES.items()
        }
        forms.clear()
    return table


def _fastest(
    seconds: Mapping[tuple[str, int], Mapping[str, float]], packed: bool
) -> dict[tuple[str, int], str]:
    """The fastest method of each case. Those of `packed` weights share one form of the weight:
    ``mm`` needs no packing, so it is paired with the fastest other method.
    """
    names = {name for timed in seconds.values() for name in timed}

    def loss(other: str) -> float:
        return sum(
            math.log(min(timed.get(name, math.inf) for name in ("mm", other)) / min(timed.values()))
            for timed in seconds.values()
        )

    if packed:
        names = {"mm", min(names - {"mm"} or names, key=loss)}
    return {
        case: min(
            names & set(timed), key=lambda name: timed[name] * (1 if name == "mm" else _WORTH)
        )
        for case, timed in seconds.items()
    }


def least_times(works: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The least time of each in a few rounds, after one that warms up. Infinite for a method that
    this processor cannot run.

    In each round all run once, so that a machine that is slow for a while is so for all of them.
    """
    seconds = dict.fromkeys(works, math.inf)
    for number in range(_ROUNDS):
        for name, work in works.items():
            if number > 1 and seconds[name] > _FAR * min(seconds.values()):
                continue
            start = time.perf_counter()
            try:
                work()
            except RuntimeError:
                continue
            if number:
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds
