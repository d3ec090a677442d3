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
def put_tile(total, out, out_bases, rank, owner, row, column, rows, N, stride, PUTS: tl.constexpr):
    """Store the first `rows` rows of a tile at `row` and `column` of ``out``: this rank's, or, if
    `PUTS`, the part of `owner`.
    """
    BLOCK_M: tl.constexpr = total.shape[0]
    BLOCK_N: tl.constexpr = total.shape[1]
    corner = out + row.to(tl.int64) * stride + column
    if PUTS:
        corner = peer_pointer(corner, out_bases, rank, owner)
    down, across = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    inside = (down < rows)[:, None] & (column + across < N)[None, :]
    tl.store(
        corner + down[:, None] * stride + across[None, :],
        total.to(out.dtype.element_ty),
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
