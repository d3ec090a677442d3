"""The local matrix product on a CPU: the fastest of the ways that torch offers.

`torch.mm` is often not the fastest: oneDNN's linear kernel reaches twice its float32 rate on some
processors, and multiplying float16 through float32 hundreds of times its own. Which way wins
depends on the dtype, on the number of rows and on how the weight lies, so all are timed once per
machine and the winners remembered (`weft.cache`).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

import weft.cache as cache
from weft.kernels.weights import PackedWeight, ScaledWeight, Weight, pack, plain, transposed

_ROWS = {1: 2048, 2: 2048, 8: 2048, 64: 2048, 512: 1024}
"""Numbers of rows at which the ways are timed, and the width of the weight: where rows are few one
that most caches do not hold.

Other numbers of rows go by the nearest one below.
"""
_LIES = (
    "packed plain",
    "packed transposed",
    "plain",
    "transposed",
    "columns",
)  # how factors lie: the cases that are timed
_ROUNDS = 5  # of timing, for each provider
_FAR = 8  # times as slow as the fastest is not tried again
_WORTH = 1.05  # torch.mm is replaced only by a way this many times as fast; less is noise
# rows of a packed product whose result still lies in the cache when it is copied to its place
_BLOCK = 256
# the same where each product packs the weight anew, which takes as long as some hundred rows
_REPACKED_BLOCK = 1024
_SMALL = 1 << 18  # below this many multiply-adds torch.mm's call overhead dominates: use it
_MAKING = {4: 1 << 26, 2: 1 << 28}
"""By the bytes of a number: multiplications that take about as long as making a kernel of oneDNN's,
which has one for each number of rows, 0.3 to 1 ms.
"""
_TINY, _FEW = (
    1 << 16,
    128,
    # elements of a weight, and rows, up to which kernels are not, and at most, made before they are
    # needed
)
_SMALL_WEIGHT = {True: 1 << 20, False: 1 << 19}
"""Whether it is packed: elements of a weight that is looked at again, and packed again, in less
time than a kernel is made.
"""
_LEAST = 16  # rows of a block of several, so that bits do not depend on how many there are
_first: dict[
    Hashable, int
] = {}  # rows that a weight like this was multiplied by first; 0 once there were others


def multiply(
    x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None = None, whole: int | None = None
) -> None:
    """``out = x @ weight (+ bias)`` for x (rows, K), weight (K, N), bias (N,) and out (rows, N).

    Where x is a part of more rows these are the `whole`: all parts go one way, so that it does not
    matter how many parts there are.

    The rows of `x` or its columns are contiguous. `x` and `weight` have one dtype; `out` has it
    too, or is float32. Sums are accumulated in float32 (float64 for float64) and rounded once to
    the dtype of `out`. The result depends on nothing but the arguments and the machine. A
    `ScaledWeight` goes with rows that carry their scales, and gives any dtype.
    """
    (part, k), (_, n) = x.shape, weight.shape
    if not (part and k and n):
        out.copy_(bias) if bias is not None else out.zero_()
        return
    if isinstance(weight, ScaledWeight):
        _scaled(x, weight, out, bias)
        return
    rows = whole or part
    if rows * k * n <= _SMALL and x.dtype is out.dtype is torch.float32:
        _mm(x, weight, out, bias)
        return
    _WAYS[chosen(x.dtype, out.dtype, _lie(x, weight), rows)](x, weight, out, bias)


def run(
    sources: Sequence[Tensor],
    weight: Weight,
    out: Tensor,
    bias: Tensor | None,
    rows: int | None,
) -> None:
    """`multiply`, as the host engine calls it."""
    multiply(sources[0], weight, out, bias, rows)


def run_on_device(
    sources: Sequence[Tensor],
    weight: Weight,
    out: Tensor,
    bias: Tensor | None,
    rows: int | None,
) -> None:
    """``out = sources[0] @ weight (+ bias)`` on a GPU, by torch."""
    x = sources[0]
    if 0 in x.shape or 0 in weight.shape:
        multiply(x, weight, out, bias)
        return
    if out.dtype == x.dtype:
        torch.mm(x, plain(weight), out=out)
    else:
        torch.mm(x, plain(weight), out_dtype=out.dtype, out=out)
    if bias is not None:
        out.add_(bias)


def _lie(x: Tensor, weight: Tensor | PackedWeight) -> str:
    """How the factors lie, as `chosen` takes it; a transposed `x`, as for the gradient of a weight,
    goes with any weight.
    """
    if transposed(x):
        return "columns"
    if isinstance(weight, PackedWeight):
        return weight.lies
    return "transposed" if transposed(plain(weight)) else "plain"


def _scaled(x: Tensor, weight: ScaledWeight, out: Tensor, bias: Tensor | None) -> None:
    """The sums in float32 of what the float8 numbers stand for."""
    scales = x[:, -4:].view(torch.float32).contiguous()
    # scaled afterwards: no slower, closer to the exact sums, and torch 2.9's takes no scales of
    # rows on a CPU
    if weight.k:
        one = torch.ones((), device=x.device)
        product = torch._scaled_mm(
            x[:, : weight.k], weight.plain, one, one, out_dtype=torch.float32
        )
        product.mul_(scales).mul_(weight.scales)
    else:
        product = torch.zeros(out.shape)
    out.copy_(product if bias is None else product.add_(bias))


def _mm(x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None) -> None:
    b, made = plain(weight), out
    if out.shape[1] == 1:  # torch 2.9 takes a column of bfloat16 for one without gaps
        b, made = b.contiguous(), out.contiguous()
    if bias is None:
        torch.mm(x, b, out=made)
    else:
        torch.addmm(bias.to(x.dtype), x, b, out=made)
    if made is not out:
        out.copy_(made)


def _mm_float32(x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None) -> None:
    b = weight.laid_out("mm/float32") if isinstance(weight, PackedWeight) else plain(weight).float()
    narrow = out.dtype != torch.float32
    product = torch.mm(x.float(), b, out=None if narrow else out)
    if bias is not None:
        product.add_(bias)
    if narrow:
        out.copy_(product)


def _onednn(
    x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None, way: str = "onednn"
) -> None:
    """oneDNN's linear kernel, which returns a new tensor: block by block, so that it is small and
    copied from the cache.
    """
    packed, dtype = isinstance(weight, PackedWeight), x.dtype if way == "onednn" else torch.float32
    w = (
        weight.laid_out(way)
        if isinstance(weight, PackedWeight)
        else _dense(plain(weight)).to(dtype).t()
    )
    x = x.contiguous() if transposed(x) else x
    b = None if bias is None else bias.to(dtype)
    rows, size = x.shape[0], w.shape[0] * w.shape[1]
    _make_kernels(rows, w, b, dtype)
    blocks = _blocks(rows, _BLOCK if packed else _REPACKED_BLOCK, size <= _SMALL_WEIGHT[packed])
    if len(blocks) == 1:
        out.copy_(_kernel(x.to(dtype), w, b))
        return
    for block in blocks:
        out[block].copy_(_kernel(x[block].to(dtype), w, b))


@functools.lru_cache(4096)
def _blocks(rows: int, most: int, small: bool) -> list[slice]:
    """The blocks of at most so many rows that a product is made in: with a `small` weight of few
    sizes, each with a kernel.
    """
    found, start, heights = (
        list[slice](),
        0,
        [h for h in (_REPACKED_BLOCK, 512, _BLOCK, _FEW) if h <= most],
    )
    while start < rows:
        left = rows - start
        height = min(left, most)
        if small and left > _FEW:
            height = next((h for h in heights if left == h or left - h >= _LEAST), _FEW - _LEAST)
        found.append(slice(start, start + height))
        start += height
    return found


def _make_kernels(rows: int, w: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
    """Have oneDNN make kernels before they are needed.

    As soon as a weight like this is multiplied by a second number of rows they are made for all
    numbers so small that making one takes longer than using it: which come will go on to differ,
    and each call would have to wait for its own.
    """
    size, making = w.shape[0] * w.shape[1], _MAKING[dtype.itemsize]
    if size <= _TINY or min(rows, _FEW) * size > making:
        return
    like = dtype, w.shape, w.is_mkldnn, w.is_mkldnn or w.is_contiguous(), bias is None
    if _first.setdefault(like, rows) not in (rows, 0):
        _first[like] = 0
        for other in range(1, min(_FEW, making // size) + 1):
            _kernel(torch.zeros(other, w.shape[1], dtype=dtype), w, bias)


def _kernel(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")
    return product


def _dense(b: Tensor) -> Tensor:
    """`b` without gaps between its rows and columns, for which oneDNN has no fast kernel."""
    return b if b.is_contiguous() or b.t().is_contiguous() else b.contiguous()


_WAYS: dict[str, Callable[[Tensor, Weight, Tensor, Tensor | None], None]] = {
    "onednn": _onednn,
    "onednn/float32": functools.partial(_onednn, way="onednn/float32"),
    "mm": _mm,
    "mm/float32": _mm_float32,
}


def chosen(dtype: torch.dtype, out_dtype: torch.dtype, lie: str, rows: int) -> str:
    """The name of the way that `multiply` takes: ``mm`` or ``onednn``, with ``/float32`` if it
    computes in float32.

    `lie` says how the factors do: ``plain`` (the weight), ``transposed`` (as that of a linear
    layer), ``packed plain`` or ``packed transposed``; ``columns`` if x is transposed.
    """
    return _way(
        dtype, out_dtype, lie, max(size for size in _ROWS if size <= rows), torch.get_num_threads()
    )


@functools.cache
def _way(dtype: torch.dtype, out_dtype: torch.dtype, lie: str, rows: int, threads: int) -> str:
    return _table(dtype, out_dtype, threads)[lie][str(rows)]


@functools.cache
def _table(dtype: torch.dtype, out_dtype: torch.dtype, threads: int) -> dict[str, dict[str, str]]:
    """The fastest way by number of rows, for factors that lie in one way or another."""
    kind, software = (
        f"{dtype}-{out_dtype}".replace("torch.", ""),
        f"torch {torch.__version__} {threads} threads",
    )
    name, machine = (
        cache.of_this_machine(f"fastest-{kind}", software),
        {"machine": f"{cache.processor()} {software}"},
    )
    ways = _candidates(dtype, out_dtype)

    def fits(found: dict[str, dict[str, str]]) -> bool:
        return all(found[lie][str(rows)] in ways for lie in _LIES for rows in _ROWS)

    table: dict[str, dict[str, str]] = cache.once(
        name, lambda: _measure(dtype, out_dtype) | machine, fits
    )
    return table


def _candidates(dtype: torch.dtype, out_dtype: torch.dtype) -> list[str]:
    if dtype == torch.float64:
        return ["mm"]
    onednn = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ways = ["mm/float32", "onednn/float32"] if dtype != torch.float32 else []
    if dtype == out_dtype:
        ways += ["mm", "onednn"]
    return [way for way in ways if onednn or not way.startswith("onednn")]


@torch.inference_mode(False)
def _measure(dtype: torch.dtype, out_dtype: torch.dtype) -> dict[str, dict[str, str]]:
    """Time every way at every number of rows; a way far behind at one number is not tried at larger
    ones.
    """
    table: dict[str, dict[str, str]] = {}
    weights = {width: torch.randn(width, width).to(dtype) for width in _ROWS.values()}
    cases: list[tuple[bool, Callable[[Tensor], Tensor | PackedWeight]]] = [
        (False, pack),
        (False, lambda b: pack(b.t())),
        (False, lambda b: b),
        (False, lambda b: b.t()),
        (True, lambda b: b),
    ]
    for columns, laid in cases:
        ways, seconds, made = (
            _candidates(dtype, out_dtype),
            {},
            {width: laid(b) for width, b in weights.items()},
        )
        for rows, width in _ROWS.items():
            x, out, weight = (
                torch.randn(rows, width).to(dtype),
                torch.empty(rows, width, dtype=out_dtype),
                made[width],
            )
            x = x.t().contiguous().t() if columns else x
            seconds[rows] = _times(
                {way: functools.partial(_WAYS[way], x, weight, out, None) for way in ways}
            )
            ways = [way for way in ways if seconds[rows][way] < _FAR * min(seconds[rows].values())]
        table[_lie(x, weight)] = _fastest(seconds, isinstance(weight, PackedWeight))
    return table


def _fastest(seconds: dict[int, dict[str, float]], packed: bool) -> dict[str, str]:
    """The fastest way by number of rows. Those for `packed` weights together need one layout: that
    of ``mm`` is the weight itself, so it goes with the one other way with which the times are
    least, relative to the fastest.
    """
    ways = {way for timed in seconds.values() for way in timed}

    def loss(other: str) -> float:
        return sum(
            math.log(min(timed.get(way, math.inf) for way in ("mm", other)) / min(timed.values()))
            for timed in seconds.values()
        )

    if packed:
        ways = {"mm", min(ways - {"mm"} or ways, key=loss)}
    return {
        str(rows): min(
            ways & set(timed), key=lambda way: timed[way] * (1 if way == "mm" else _WORTH)
        )
        for rows, timed in seconds.items()
    }


def _times(works: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """The least time of each in a few rounds, after one that warms up. Infinite for what cannot run
    here.

    In each round all take their turn, so that a machine that is slow for a while is so for all of
    them.
    """
    seconds = dict.fromkeys(works, math.inf)
    for turn in range(_ROUNDS):
        for way, work in works.items():
            if turn > 1 and seconds[way] > _FAR * min(seconds.values()):
                continue
            start = time.perf_counter()
            try:
                work()
            except RuntimeError:
                continue
            if turn:
                seconds[way] = min(seconds[way], time.perf_counter() - start)
    return seconds
