"""The methods to multiply matrices on a CPU: those that torch offers, and weft's own product of
16-bit numbers.

`torch.mm` is often not the fastest: oneDNN's linear kernel reaches twice its float32 rate on some
processors, and multiplying float16 through float32 hundreds of times its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.kernels import half
from weft.kernels.weights import Weight, as_tensor, transposed

_BLOCK = 1024
"""Rows of oneDNN's product at a time, which bounds its result, that is copied: a product that packs
the weight anew takes as long as some hundred rows more.

Measured on a 2-core Zen 4: where the weight is not packed, blocks of 256 rows take 0.99 to 1.02
times as long, of 128 rows 1.03 to 1.06; where it is, 256 rows 1.01 to 1.02, and all 2048 at once
1.00 to 1.01 (2048 x 1024 x 1024 in float32 and bfloat16).
"""
_MAKING = {4: 1 << 26, 2: 1 << 28}
"""By the bytes of a number: multiplications that take about as long as making a kernel of oneDNN's,
which has one for each number of rows, 0.3 to 1 ms, or several with tiles. Products of fewer are
padded to few numbers of rows.

Measured on a 2-core Xeon with AMX: a kernel for 512 x 512 takes 0.3 to 0.4 ms in float32, 0.3 to
1.1 in bfloat16; padded products take 1.05 to 1.12 times as long.
"""
_FEW = 128  # rows up to which padding leaves 33 kernels; blocks of several have as many, or more
_SMALL_WEIGHT = {True: 1 << 20, False: 1 << 19}
"""By whether it is packed: elements of a weight that is read again, and packed again, in less time
than a kernel is made: with `_FEW` rows it takes a fraction of `_MAKING`.

Measured on a 2-core Zen 4, which makes kernels fast: nothing is lost, as 80 numbers of rows from
130 to 1100 take 0.99 to 1.05 times as long as by a kernel for each.
"""
_LEAST = 16  # rows of a block of several, so that bits do not depend on their number


def _empty(x: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, packed: bool) -> None:
    out.copy_(bias) if bias is not None else out.zero_()


def mm(x: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, packed: bool = False) -> None:
    if bias is None:
        torch.mm(x, b, out=out)
    else:
        torch.addmm(bias.to(x.dtype), x, b, out=out)


def mm_packed(x: Tensor, weight: Any, out: Tensor, bias: Tensor | None) -> None:
    """`mm` with the source of a packed weight."""
    if bias is None:
        torch.mm(x, weight.plain, out=out)
    else:
        torch.addmm(bias.to(x.dtype), x, weight.plain, out=out)


def _mm_column(x: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, packed: bool) -> None:
    column = out.contiguous()
    mm(x, b.contiguous(), column, bias)
    if column is not out:
        out.copy_(column)


def _mm_float32(x: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, packed: bool) -> None:
    narrow = out.dtype != torch.float32
    # with out=, which autocast leaves as it is
    product = torch.empty(out.shape, dtype=torch.float32, device=out.device) if narrow else out
    torch.mm(x.float(), b, out=product)
    if bias is not None:
        product.add_(bias)
    if narrow:
        out.copy_(product)


def _onednn(x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, packed: bool) -> None:
    """oneDNN's linear kernel, which returns a new tensor: block by block, so that it is small and
    copied from the cache.
    """
    dtype = w.dtype
    x = x.contiguous() if transposed(x) else x
    b = None if bias is None else bias.to(dtype)
    rows, size = x.shape[0], w.shape[0] * w.shape[1]
    blocks = _blocks(rows, size <= _SMALL_WEIGHT[packed])
    if len(blocks) == 1:
        out.copy_(_product(x.to(dtype), w, b))
        return
    for block in blocks:
        out[block].copy_(_product(x[block].to(dtype), w, b))


class Method(NamedTuple):
    """A method of multiplying: ``run(x, form(weight), out, bias, packed)``.

    `form` makes the form in which `run` takes a weight, in each product; `packed` makes it once,
    for a packed weight.
    """

    form: Callable[[Tensor], Tensor]
    packed: Callable[[Tensor], Tensor]
    run: Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], None]


def _itself(b: Tensor) -> Tensor:
    return b


def _dense(b: Tensor) -> Tensor:
    """`b` transposed, without gaps between rows and columns, for which oneDNN has no fast
    kernel.
    """
    return (b if b.is_contiguous() or b.t().is_contiguous() else b.contiguous()).t()


def _reordered(b: Tensor) -> Tensor:
    """`b` in a layout of oneDNN's own."""
    made: Tensor = torch.ops.mkldnn._reorder_linear_weight(b.t().contiguous())
    return made


METHODS: dict[str, Method] = {
    "empty": Method(_itself, _itself, _empty),
    "mm": Method(_itself, _itself, mm),
    "mm column": Method(_itself, _itself, _mm_column),
    "mm/float32": Method(Tensor.float, Tensor.float, _mm_float32),
    "onednn": Method(_dense, _reordered, _onednn),
    "onednn/float32": Method(lambda b: _dense(b).float(), lambda b: _reordered(b.float()), _onednn),
    "native/float32": Method(Tensor.resolve_neg, half.panels, half.multiply),
}
"""The methods by name; ``/float32`` computes in float32."""


@functools.lru_cache(4096)
def _blocks(rows: int, small: bool) -> list[slice]:
    """The blocks of at most `_BLOCK` rows in which a product is computed: with a `small` weight of
    few sizes, since each has a kernel.
    """
    heights = (_BLOCK, 512, 256, _FEW)
    found = list[slice]()
    start = 0
    while start < rows:
        left = rows - start
        height = min(left, _BLOCK)
        if small and left > _FEW:
            height = next((h for h in heights if left == h or left - h >= _LEAST), _FEW - _LEAST)
        found.append(slice(start, start + height))
        start += height
    return found


def _product(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """The product by the kernel for `kernel_rows` rows: x is padded by some of its rows."""
    rows = x.shape[0]
    if more := kernel_rows(rows, w.shape[0] * w.shape[1], x.itemsize) - rows:
        return _kernel(torch.cat((x, x[:more])), w, bias)[:rows]
    return _kernel(x, w, bias)


@functools.lru_cache(4096)
def kernel_rows(rows: int, size: int, itemsize: int) -> int:
    """The number of rows of the kernel that multiplies `rows` rows of such numbers by a weight of
    `size` elements: one of few, at most an eighth or one more, unless making a kernel takes less
    time than using it.

    It depends on nothing else, and so do bits: kernels for other numbers of rows may sum in other
    orders.
    """
    step = max(2, 1 << max(0, (rows - 1).bit_length() - 4))
    padded = -(-rows // step) * step
    return padded if rows > 1 and padded * size <= _MAKING[itemsize] else rows


def _kernel(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")
    return product


def on_device(x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None) -> None:
    """``out = x @ weight (+ bias)`` on a GPU, by torch."""
    b = as_tensor(weight)
    if not (x.numel() and b.numel()):
        _empty(x, b, out, bias, False)
        return
    if out.dtype == x.dtype:
        mm(x, b, out, bias)
        return
    torch.mm(x, b, out_dtype=out.dtype, out=out)
    if bias is not None:
        out.add_(bias)
