"""A product whose finished tiles go straight to the ranks that add them up: half of a matmul + reduce-scatter or all-reduce.

Peers' rows are multiplied first, each rank beginning with another peer, and the own rows last. Every tile is stored in the inbox of
its owner, where each source has a place of its own; with the last tile for an owner that owner is notified. The sums are taken by
`weft.kernels.sum_in_rank_order`, not here by adding to what is there: the order of arrival must not decide the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.all_gather_matmul import product
from weft.kernels.symmetric import last_to_arrive, notify, peer_pointer, wait


@triton.jit
def matmul_put_kernel(
    x,  # descriptor of (rows, K)
    weight,  # descriptor of (K, N), or of its transpose
    inbox,  # symmetric; (ranks, rows that an owner keeps at most, N)
    inbox_bases,
    tiles,  # int32 (tiles, 5): first row, last + 1, column, owner (or -1: all ranks), row in the inbox
    totals,  # int32 (ranks,): tiles for each owner
    number,
    counters,  # 0 to RANKS - 1 "open", then "arrived", by source
    counter_bases,
    calls,
    tickets,  # int32 (ranks,)
    ledger,
    rank,
    polls,
    N,
    RANKS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    tile, call = tl.program_id(0), tl.load(calls) + 1
    if tile == 0:
        for step in tl.static_range(1, RANKS):
            notify(counters + rank * 8, counter_bases, rank, (rank + step) % RANKS)
    while tile < number:
        entry = tiles + tile * 5
        first, last, column = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2) * BLOCK_N
        owner, place = tl.load(entry + 3), tl.load(entry + 4)
        total = product(x, weight, first, column, K, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED).to(inbox.dtype.element_ty)
        rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        corner = inbox + place.to(tl.int64) * N + column
        offsets = rows[:, None] * N + columns[None, :]
        inside = (first + rows < last)[:, None] & (column + columns < N)[None, :]
        peer, left = tl.where(owner < 0, (rank + 1) % RANKS, owner), tl.where(owner < 0, RANKS, 1)
        while left > 0:
            if peer != rank:
                wait(counters, peer, call, ledger, polls)
            tl.store(peer_pointer(corner, inbox_bases, rank, peer) + offsets, total, mask=inside)
            if last_to_arrive(tickets + peer, tl.load(totals + peer)):
                notify(counters + (RANKS + rank) * 8, counter_bases, rank, peer)
            peer, left = (peer + 1) % RANKS, left - 1
        tile += tl.num_programs(0)
