"""Stores of the tiles of a product on this rank or a peer, and the notifies after them.

This is half of a matmul + reduce-scatter or all-reduce: every tile is stored in the memory of the
rank that adds it up, in a buffer for this rank's tiles. `kernels.sum_in_rank_order` adds them up
later, since sums in the order of arrival would not be reproducible.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.gpu.kernels.symmetric import last_to_arrive, notify, peer_pointer


@triton.jit
def put_tile(
    total,
    bias,
    out,
    out_bases,
    rank,
    owner,
    row,
    column,
    rows,
    N,
    stride,
    BIAS: tl.constexpr,
    PUTS: tl.constexpr,
    VECTOR: tl.constexpr,
    SLICED: tl.constexpr,
):
    """Store the first `rows` rows of a tile, to which it adds the `bias` if `BIAS`, at `row` and
    `column` of ``out``: this rank's, or, if `PUTS`, the part of `owner`.

    Stores are of `VECTOR` elements, in units of which `N` and `stride` are: of 16 bytes, or of one
    element. `SLICED`: slices of the tile are stored one after the other, so narrow that the
    addresses of all stores of one fit in the registers.
    """
    SLICE: tl.constexpr = (64 if VECTOR > 1 else 16) if SLICED else total.shape[1]
    stride *= VECTOR
    corner = out + row.to(tl.int64) * stride + column
    corner = tl.multiple_of(corner, VECTOR * out.dtype.element_ty.primitive_bitwidth // 8)
    if PUTS:
        corner = peer_pointer(corner, out_bases, rank, owner)
    _store(total, bias + column, corner, rows, N * VECTOR - column, stride, BIAS, SLICE)


@triton.jit
def _store(total, bias, corner, rows, columns, stride, BIAS: tl.constexpr, SLICE: tl.constexpr):
    """Store the first `rows` rows and `columns` columns of a tile at `corner`."""
    BLOCK_M: tl.constexpr = total.shape[0]
    BLOCK_N: tl.constexpr = total.shape[1]
    if BLOCK_N > SLICE:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = total.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        _store(left, bias, corner, rows, columns, stride, BIAS, SLICE)
        _store(right, bias + HALF, corner + HALF, rows, columns - HALF, stride, BIAS, SLICE)
    else:
        down, across = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        if BIAS:
            more = tl.load(bias + across, mask=across < columns, other=0.0)
            total += more.to(tl.float32)[None, :]
        inside = (down < rows)[:, None] & (across < columns)[None, :]
        tl.store(
            corner + down[:, None] * stride + across[None, :],
            total.to(corner.dtype.element_ty),
            mask=inside,
        )


@triton.jit
def arrive(link, notifies, links, tickets, counters, counter_bases, rank):
    """Count a stored tile before notify number `link`; after the last one, notify the rank, and
    count an arrival at the next notify.

    `notifies` is int32 (links, 3): rank, counter, arrivals. So each has the meaning of a notify of
    a plan: all tiles before it have been stored.
    """
    while link < links:
        entry = notifies + link * 3
        if last_to_arrive(tickets + link, tl.load(entry + 2)):
            notify(counters + tl.load(entry + 1) * 8, counter_bases, rank, tl.load(entry))
            link += 1
        else:
            link = links
