"""The compute lane of an all-gather + matmul as one persistent kernel: it multiplies rows as they arrive.

Each program goes through the tiles in the order of the lane, taking one in so many, and through the lane's waits when a tile is the
first that needs them; no launch, no wave of programs that drains, and no host between two products. Both factors are read through
tensor descriptors, which are TMA transfers on sm_90 and later. The rows are put in place by somebody else: a copy engine, peers,
or `weft.kernels.all_gather`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.symmetric import POLLS, wait
from weft.kernels.tiles import follow
from weft.plan import Instruction, Signal

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Blocks(NamedTuple):
    """Sizes of a tile and of the steps along K, warps per program and stages of the pipeline that loads."""

    m: int = 128
    n: int = 256
    k: int = 64
    warps: int = 8
    stages: int = 3


def blocks_for(device: torch.device) -> Blocks:
    """Sizes at which nothing is spilled from registers on the makers' GPUs that tests compile for."""
    return Blocks(n=128, k=32, stages=2) if device.type == "cuda" and torch.version.hip else Blocks()


def fits(x: Tensor, weight: Tensor, out: Tensor) -> bool:
    """Whether the kernel can multiply these: rows that begin at multiples of 16 bytes, as descriptors demand."""
    aligned = all(
        t.stride(1) == 1 and t.stride(0) * t.itemsize % 16 == 0 and t.data_ptr() % 16 == 0 and t.numel() > 0
        for t in (x, _rows(weight))
    )
    return aligned and x.dtype in DTYPES and weight.dtype == x.dtype and out.dtype in DTYPES and out.stride(1) == 1


def check(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Raise `ValueError` unless the kernel can multiply these."""
    if not fits(x, weight, out):
        raise ValueError(
            f"rows of x and of the weight, or of its transpose, must begin at multiples of 16 bytes, and all be of "
            f"{', '.join(map(str, DTYPES))}, x and weight of the same; got x {tuple(x.shape)} {x.dtype} with strides {x.stride()}, "
            f"weight {tuple(weight.shape)} {weight.dtype} with strides {weight.stride()}, out {out.dtype}"
        )


def _rows(weight: Tensor) -> Tensor:
    """The weight (K, N) or its transpose, whichever has contiguous rows."""
    return weight if weight.stride(1) == 1 else weight.t()


class Product:
    """``out = x @ weight (+ bias)`` for the rows and in the order of a lane of `Matmul` and `Wait` instructions.

    `x` (rows, K), `weight` (K, N) and `out` (rows, N) are such as `fits` accepts; `index` says where a signal's counter lies in
    `counters`, int64 (n, 8), and `base`, int64 (n,) says on the device what it had reached when this execution began. A call puts
    the kernel, of `programs` programs, on the current stream.
    """

    def __init__(
        self,
        lane: Sequence[Instruction],
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        index: Callable[[Signal], int],
        programs: int,
        blocks: Blocks | None = None,
    ) -> None:
        check(x, weight, out)
        blocks = blocks or blocks_for(x.device)
        made, waits = follow(lane, triton.cdiv(weight.shape[1], blocks.n), blocks.m)
        device = x.device
        self.tiles = torch.tensor(made, dtype=torch.int32).to(device)
        self.waits = torch.tensor([(index(signal), count) for signal, count in waits] or [(0, 0)], dtype=torch.int64).to(device)
        self.grid = (min(programs, len(made)),)
        rows, transposed = _rows(weight), weight.stride(1) != 1
        self.x = TensorDescriptor.from_tensor(x, [blocks.m, blocks.k])
        self.weight = TensorDescriptor.from_tensor(rows, [blocks.n, blocks.k] if transposed else [blocks.k, blocks.n])
        self.out = out
        self.options: dict[str, Any] = {
            "K": x.shape[1],
            "BLOCK_M": blocks.m,
            "BLOCK_N": blocks.n,
            "BLOCK_K": blocks.k,
            "TRANSPOSED": transposed,
            "FENCE": device.type == "cuda" and torch.version.hip is None,
            "num_warps": blocks.warps,
            "num_stages": blocks.stages,
        }

    def __call__(self, bias: Tensor | None, counters: Tensor, base: Tensor, ledger: Tensor, polls: int = POLLS) -> None:
        kernel: Any = all_gather_matmul_kernel
        tables = self.tiles, self.waits, len(self.tiles), counters, base, ledger, polls
        addend = self.out if bias is None else bias
        shape = self.out.shape[1], self.out.stride(0)
        kernel[self.grid](self.x, self.weight, addend, self.out, *tables, *shape, BIAS=bias is not None, **self.options)


@triton.jit
def product(
    x,
    weight,
    row,
    column,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """A tile of ``x @ weight`` in float32, from the descriptors of both; `weight` is one of the transpose if `TRANSPOSED`."""
    total = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    for k in range(0, K, BLOCK_K):
        a = x.load([row, k])
        b = weight.load([column, k]).T if TRANSPOSED else weight.load([k, column])
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def all_gather_matmul_kernel(
    x,  # descriptor of (rows, K)
    weight,  # descriptor of (K, N), or of its transpose
    bias,
    out,
    tiles,  # int32 (tiles, 5): first row, last + 1, column, shift, waits before it
    waits,  # int64 (waits, 2): counter, count
    number,
    counters,
    base,
    ledger,
    polls,
    N,
    stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FENCE: tl.constexpr,
    BIAS: tl.constexpr,
):
    tile = tl.program_id(0)
    done = tile * 0
    while tile < number:
        entry = tiles + tile * 5
        first, last, column = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2) * BLOCK_N
        shift, needed = tl.load(entry + 3), tl.load(entry + 4)
        if done < needed:
            while done < needed:
                index = tl.load(waits + done * 2).to(tl.int32)
                wait(counters, index, tl.load(base + index) + tl.load(waits + done * 2 + 1), ledger, polls)
                done += 1
            if FENCE:  # what came by stores is read by TMA, which is another way to memory
                tl.inline_asm_elementwise("fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], tl.int32, False, 1)
        total = product(x, weight, first, column, K, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED)
        rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        if BIAS:
            total += tl.load(bias + column + columns, mask=column + columns < N, other=0.0).to(tl.float32)[None, :]
        corner = out + (first + shift).to(tl.int64) * stride + column
        inside = (first + rows < last)[:, None] & (column + columns < N)[None, :]
        tl.store(corner + rows[:, None] * stride + columns[None, :], total.to(out.dtype.element_ty), mask=inside)
        tile += tl.num_programs(0)
