"""The compute lane of a fused operator as one persistent kernel: it multiplies rows as they arrive.

Of n programs each computes every n-th tile, in the order of the lane, and executes the lane's waits
before the first tile that needs them: this rank's own rows come first, then peers' rows. Between
two products there is no launch, no partly filled wave of programs, and no work of the host. Both
factors are read through tensor descriptors, which are TMA transfers on sm_90 and later. The first
loads of a tile follow its waits, and the stores of the tile before it. The kernel does not move
rows of x: a copy engine, peers, or `kernels.all_gather` do. `kernels.matmul_put` has the stores of
tiles and the notifies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.checks import name as dtype_name
from weft.gpu.kernels.clock import time_of_all_stores
from weft.gpu.kernels.matmul_put import arrive, put_tile
from weft.gpu.kernels.symmetric import CounterTables, wait
from weft.gpu.kernels.tiles import launch_tables
from weft.plan import Compute, Instruction, Signal, Wait
from weft.schedules.device_options import Tile, tile_name

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Blocks(NamedTuple):
    """Sizes of a tile and of the steps along K, warps per program, stages of the pipeline of
    loads, and whether a tile is stored in slices.
    """

    m: int = 128
    n: int = 256
    k: int = 64
    warps: int = 8
    stages: int = 4
    sliced: bool = True


def blocks(tile: Tile | None, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Blocks:
    """The sizes for a tile on a GPU of this kind, for factors of this dtype; without a tile the
    largest. Raises `ValueError` for a tile that is too large for them.
    """
    amd = device.type == "cuda" and torch.version.hip is not None
    return sizes(tile, amd, dtype == torch.float32)


def sizes(tile: Tile | None, amd: bool, wide: bool) -> Blocks:
    """`blocks` for AMD's or NVIDIA's GPUs; `wide`: factors have 4 bytes per element.

    With these sizes no register is spilled, whether stores are wide or not, and all tiles fit in
    shared memory, on the GPUs that tests compile for.
    """
    largest = (64, 128) if wide else (128, 128) if amd else (128, 256)
    m, n = tile or largest
    if m * n > (most := largest[0] * largest[1]):
        raise ValueError(
            f"a tile of {tile_name((m, n))} does not fit in the registers: on this GPU, with "
            f"this dtype, a tile has at most {most} elements, as {tile_name(largest)}"
        )
    if wide:  # full float32 precision, without matrix instructions on NVIDIA's GPUs
        return Blocks(m, n, 16, 8 if m * n == most else 4, 3, sliced=not amd)
    large = m * n >= 128 * 128
    warps = 8 if large else 4
    if amd:  # there slices of a tile would have to pass through the shared memory
        return Blocks(m, n, 32, warps, 2, sliced=False)
    return Blocks(m, n, 64, warps, 4)


def smaller(tile: Tile, rows: Sequence[int], columns: int, programs: int) -> Tile:
    """A tile for products of these numbers of rows, and of `columns` columns, by `programs`
    programs: this one, or its half, or the half of that and so on down to 64x64, while at least
    half of the programs would have no tile.
    """
    m, n = tile
    tiles = triton.cdiv(columns, n) * sum(triton.cdiv(each, m) for each in rows)
    if 2 * tiles > programs or tile == (64, 64):
        return tile
    return smaller((m, n // 2) if n > m else (m // 2, n), rows, columns, programs)


def check(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Raise `ValueError` unless the kernel can multiply these: tensor descriptors need rows that
    begin at multiples of 16 bytes.
    """
    aligned = all(
        t.stride(1) == 1
        and t.stride(0) * t.itemsize % 16 == 0
        and t.data_ptr() % 16 == 0
        and t.numel() > 0
        for t in (x, _rows(weight))
    )
    if not (
        aligned
        and x.dtype in DTYPES
        and weight.dtype == x.dtype
        and out.dtype in DTYPES
        and out.stride(1) == 1
    ):
        raise ValueError(
            f"weft's product kernel takes {', '.join(dtype_name(dtype) for dtype in DTYPES)}, and "
            "rows of x and of the weight, or of its transpose, that begin at multiples of 16 "
            "bytes; "
            f"got x {_layout(x)}, weight {_layout(weight)}, "
            f"out {_layout(out)}. Pad them, or multiply by torch.mm in a world with "
            'products="torch"'
        )


def vector(out: Tensor) -> int:
    """The elements that the kernel stores at once to `out`: 16 bytes if its rows begin and end at
    multiples of these, else one.
    """
    elements = 16 // out.itemsize
    whole = out.data_ptr() % 16 == out.stride(0) % elements == out.shape[1] % elements == 0
    return elements if whole else 1


def _layout(t: Tensor) -> str:
    return f"{tuple(t.shape)} {dtype_name(t.dtype)} with strides {t.stride()}"


def _rows(weight: Tensor) -> Tensor:
    """The weight (K, N) or its transpose, whichever has contiguous rows."""
    return weight if weight.stride(1) == 1 else weight.t()


class ProductKernel:
    """``out = x @ weight (+ bias)`` for the rows and in the order of a launch (`kernels.tiles`) of
    a compute lane.

    `launch` has its tables, `waits` the places of the waits. `columns` is N, `dtype` the factors'
    dtype and `out` the result's; `index` returns the index of a signal's counter. The kernel has at
    most `programs` programs, and a `tile`; if none is given, the largest, or a `smaller` one. Rows
    of the first of two sources may have another one, `own_tile`.
    """

    def __init__(
        self,
        part: Sequence[Instruction],
        columns: int,
        dtype: torch.dtype,
        out: torch.dtype,
        index: Callable[[Signal], int],
        rank: int,
        programs: int,
        device: torch.device,
        tile: Tile | None = None,
        own_tile: Tile | None = None,
    ) -> None:
        gpu = device.type == "cuda"
        amd = torch.version.hip is not None
        size = blocks(tile, device, dtype)
        if tile is None:
            rows = [i.dst.rows for i in part if isinstance(i, Compute)]
            size = blocks(smaller((size.m, size.n), rows, columns, programs), device, dtype)
        own = blocks(own_tile, device, dtype) if own_tile else size
        self.blocks, self.own_blocks = size, own
        self.launch = launch = launch_tables(
            part, triton.cdiv(columns, size.n), size.m, (triton.cdiv(columns, own.n), own.m)
        )
        self.waits = [place for place, i in enumerate(part) if isinstance(i, Wait)]
        waits = [(index(signal), count) for signal, count in launch.waits] or [(0, 0)]
        notifies = [
            (peer, index(signal), arrivals) for peer, signal, arrivals in launch.notifies
        ] or [(0, 0, 0)]
        self.grid = (max(1, min(programs, len(launch.tiles))),)
        self.sizes = launch.first, len(launch.tiles)
        self.links = len(launch.notifies)
        self.rank = rank
        self.tables = (
            torch.tensor(launch.tiles, dtype=torch.int32, device="cpu").to(device),
            torch.tensor(waits, dtype=torch.int64, device="cpu").to(device),
            torch.tensor(notifies, dtype=torch.int32, device="cpu").to(device),
            torch.zeros(len(notifies), dtype=torch.int32, device=device),
        )
        self.options: dict[str, Any] = {
            "SOURCES": 1 + (launch.first < len(launch.tiles)),
            "PUTS": any(tile[4] != rank for tile in launch.tiles),
            "NOTIFIES": self.links > 0,
            "OWN_M": own.m,
            "OWN_N": own.n,
            "BLOCK_M": size.m,
            "BLOCK_N": size.n,
            "BLOCK_K": size.k,
            "SLICED": size.sliced,
            "FENCE": gpu and not amd,
            "num_warps": max(size.warps, own.warps),
            "num_stages": size.stages,
        }

    def __call__(
        self,
        own: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        out_bases: Tensor,
        counter_tables: CounterTables,
        limit: int,
        idle: bool = False,
        times: Tensor | None = None,
    ) -> None:
        """Put the kernel on the current stream. The first source is `own` (rows, K), the second, if
        there is one, `x`.

        `weight` is (K, N), `bias` (N,), and `out` (rows, N) this rank's part of the result. If
        peers' parts are written, too, `out_bases` is the table of their addresses
        (`kernels.symmetric.bases`). `check` must have accepted all tensors. An `idle` kernel is
        loaded and does nothing. A kernel with `times`, int64 (tiles, 3), writes to them for each
        tile when it begins to wait for its rows, begins to multiply them, and has stored it.
        """
        elements = vector(out)
        transposed = weight.stride(1) != 1
        kernel: Any = all_gather_matmul_kernel
        kernel[self.grid](
            *_descriptors(own, weight, self.own_blocks),
            *_descriptors(x, weight, self.blocks),
            out if bias is None else bias,
            out,
            out_bases,
            *self.tables,
            self.tables[1] if times is None else times,
            *counter_tables,
            *((0, 0) if idle else self.sizes),
            self.links,
            self.rank,
            limit,
            out.shape[1] // elements,
            out.stride(0) // elements,
            VECTOR=elements,
            K=own.shape[1],
            TRANSPOSED=transposed,
            BIAS=bias is not None,
            TRACE=times is not None,
            **self.options,
        )


def _descriptors(x: Tensor, weight: Tensor, size: Blocks) -> tuple[Any, Any]:
    """The descriptors of both factors for tiles of this size."""
    rows = _rows(weight)
    part = [size.k, size.n] if weight.stride(1) == 1 else [size.n, size.k]
    return (
        TensorDescriptor.from_tensor(x, [size.m, size.k]),
        TensorDescriptor.from_tensor(rows, part),
    )


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
    """A tile of ``x @ weight`` in float32, from the descriptors of both; `weight` describes the
    transpose if `TRANSPOSED`.
    """
    total = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    for k in range(0, K, BLOCK_K):
        a = x.load([row, k])
        b = weight.load([column, k]).T if TRANSPOSED else weight.load([k, column])
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def pass_waits(done, needed, waits, counters, base, timeout_record, limit, FENCE: tl.constexpr):
    """Execute the first `needed` waits of the lane, of which this program has executed `done`;
    returns the new number.
    """
    if done < needed:
        while done < needed:
            index = tl.load(waits + done * 2).to(tl.int32)
            wait(
                counters,
                index,
                tl.load(base + index) + tl.load(waits + done * 2 + 1),
                timeout_record,
                limit,
            )
            done += 1
        if FENCE:  # arrivals were written by stores; TMA reads memory through another proxy
            tl.inline_asm_elementwise(
                "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], tl.int32, False, 1
            )
    return done


@triton.jit(
    do_not_specialize=["first", "number", "links", "rank", "limit", "N", "stride"],
    do_not_specialize_on_alignment=["bias", "out"],
)
def all_gather_matmul_kernel(
    own,  # descriptor of (rows, K): the source of the first tiles
    own_weight,  # descriptor of (K, N), or of its transpose, for these
    x,  # descriptor of (rows, K): the source of the other tiles
    weight,  # as `own_weight`, for them
    bias,
    out,
    out_bases,  # int64 (ranks,)
    # int32 (tiles, 7): first row, last + 1, column, row shift, rank, waits before, notifies before
    tiles,
    waits,  # int64 (waits, 2): counter, count
    notifies,  # int32 (notifies, 3): rank, counter, arrivals
    tickets,  # int32 (notifies,)
    times,  # int64 (tiles, 3), in nanoseconds, written if `TRACE`
    counters,
    counter_bases,
    base,
    timeout_record,
    first,  # number of tiles of the first source
    number,  # of tiles
    links,
    rank,
    limit: tl.int64,  # of a wait, in nanoseconds
    N,  # in units of VECTOR elements, as the next
    stride,
    K: tl.constexpr,
    SOURCES: tl.constexpr,
    PUTS: tl.constexpr,
    VECTOR: tl.constexpr,
    SLICED: tl.constexpr,
    NOTIFIES: tl.constexpr,
    OWN_M: tl.constexpr,
    OWN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FENCE: tl.constexpr,
    BIAS: tl.constexpr,
    TRACE: tl.constexpr,
):
    tile = tl.program_id(0)
    done = tile * 0
    for source in tl.static_range(SOURCES):
        while tile < (first if source < SOURCES - 1 else number):
            entry = tiles + tile * 7
            row, last = tl.load(entry), tl.load(entry + 1)
            column = tl.load(entry + 2) * (OWN_N if source == 0 else BLOCK_N)
            if TRACE:
                tl.store(times + tile * 3, time_of_all_stores())
            done = pass_waits(
                done, tl.load(entry + 5), waits, counters, base, timeout_record, limit, FENCE
            )
            if TRACE:
                tl.store(times + tile * 3 + 1, time_of_all_stores())
            total = product(
                own if source == 0 else x,
                own_weight if source == 0 else weight,
                row,
                column,
                K,
                OWN_M if source == 0 else BLOCK_M,
                OWN_N if source == 0 else BLOCK_N,
                BLOCK_K,
                TRANSPOSED,
            )
            to = row + tl.load(entry + 3)
            put_tile(
                total,
                bias,
                out,
                out_bases,
                rank,
                tl.load(entry + 4),
                to,
                column,
                last - row,
                N,
                stride,
                BIAS,
                PUTS,
                VECTOR,
                SLICED,
            )
            if TRACE:
                tl.store(times + tile * 3 + 2, time_of_all_stores())
            if NOTIFIES:
                arrive(tl.load(entry + 6), notifies, links, tickets, counters, counter_bases, rank)
            tile += tl.num_programs(0)
