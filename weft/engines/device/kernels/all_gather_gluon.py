"""The all-gather of `kernels.all_gather` in Gluon, where the layout of a tile over threads is stated, not inferred.

Each thread holds 16 bytes of a tile side by side and `TILE / (4 * threads)` such pieces, so that every load and every store of a
warp covers a contiguous stretch of memory in the widest accesses there are. Triton infers the same layout; stating it makes that a
property of the source, and lets threads per warp and warps be chosen against the tile.

Gluon has no interpreter: this kernel is compiled in tests, and runs only on GPUs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from weft.engines.device.kernels.symmetric import await_open, complete, peer_pointer, tell_open


@gluon.jit(do_not_specialize=["vectors", "rank", "max_polls"])
def all_gather_gluon_kernel(
    shard,
    gathered,
    gathered_bases,
    counters,
    counter_bases,
    calls,
    tickets,
    timeout_record,
    vectors,
    rank,
    max_polls,
    RANKS: gl.constexpr,
    TILE: gl.constexpr,
    LANES: gl.constexpr,
):
    layout: gl.constexpr = gl.BlockedLayout([4], [LANES], [gl.num_warps()], [0])
    if vectors == 0:
        return
    program, programs = gl.program_id(0), gl.num_programs(0)
    call = gl.load(calls) + 1
    words = vectors.to(gl.int64) * 4
    if program == 0:
        tell_open(counters, counter_bases, rank, RANKS)
    mine = gathered + rank.to(gl.int64) * words
    targets = ()
    for step in gl.static_range(RANKS):
        targets = targets + (peer_pointer(mine, gathered_bases, rank, (rank + step) % RANKS),)
    await_open(counters, call, timeout_record, rank, max_polls, RANKS)
    start = program * TILE + words * 0
    while start < words:
        offsets = start + gl.arange(0, TILE, layout=layout)
        inside = offsets < words
        tile = gl.load(shard + offsets, mask=inside)
        for step in gl.static_range(RANKS):
            gl.store(targets[step] + offsets, tile, mask=inside)
        start += programs * TILE
    complete(counters, counter_bases, call, tickets, timeout_record, rank, programs, max_polls, RANKS)
