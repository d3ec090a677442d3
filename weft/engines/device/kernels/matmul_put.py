"""What follows a tile of a product: it is put where its plan wants it, and with the last one before
a notify a rank is told.

Half of a matmul + reduce-scatter or all-reduce: every tile is stored in the memory of the rank that
adds it up, in a place of this rank's own. The sums are taken by `kernels.sum_in_rank_order`, not
here by adding to what is there: the order of arrival must not decide the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.engines.device.kernels.symmetric import last_to_arrive, notify, peer_pointer


@triton.jit
def put_tile(total, out, out_bases, rank, owner, row, column, rows, N, stride, PUTS: tl.constexpr):
    """Store a tile, of which `rows` rows are meant, from `row` and `column` of ``out`` on: this
    rank's, or that of `owner`.
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
    """A tile before notify number `link` is made: with the last one, tell its rank, and arrive at
    the notify after it.

    `notifies` is int32 (links, 3): rank, counter, arrivals. So each says what a notify of a plan
    says: all before it is there.
    """
    while link < links:
        entry = notifies + link * 3
        if last_to_arrive(tickets + link, tl.load(entry + 2)):
            notify(counters + tl.load(entry + 1) * 8, counter_bases, rank, tl.load(entry))
            link += 1
        else:
            link = links
