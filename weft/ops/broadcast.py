"""Broadcast as an operator: one rank's tensor on every rank."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from weft.ops import arguments
from weft.ops.collective import ANY, Handle, Work, call_later, call_now, handed_out, many, sent_rows, slot_rows
from weft.plan import Plan
from weft.schedules import broadcast as schedule
from weft.schedules.common import Hosts
from weft.schedules.workload import pieces
from weft.world import World

# No matter of caches: what the source takes off its peers has to be worth their waiting for it, and a piece, its signals.
SHARED_BYTES = 256 << 10  # from this size on of a broadcast its source moves rows, too
PIECE_BYTES = 64 << 10  # what its source stages at a time, while the others, who have nothing else to do, fetch what came before


def broadcast(
    tensor: Tensor,
    source: int,
    *,
    algorithm: str = "auto",
    world: World | None = None,
    timeout: float | None = None,
) -> Tensor:
    """Overwrite `tensor`, which must be contiguous, with that of rank `source`, and return it; any dtype of `ANY`.

    `algorithm` is ``pull`` (ranks read it; auto's choice on one host), ``push`` (the source puts it to each other host, or rank on
    one; auto's choice on several) or ``ring`` (each hands it to the next, so the source sends it once).
    """
    return call_now(_prepare, tensor, tensor, (source, algorithm), world, timeout)


def broadcast_async(
    tensor: Tensor,
    source: int,
    *,
    algorithm: str = "auto",
    world: World | None = None,
    timeout: float | None = None,
) -> Handle:
    """Begin `broadcast`, with the same arguments, and return at once."""
    return call_later(_prepare, tensor, tensor, (source, algorithm), world, timeout)


def _prepare(world: World, tensor: Tensor, out: Tensor, source: int, algorithm: str) -> Work:
    arguments.check_input(tensor, "tensor", world, ANY)
    arguments.check_algorithm(algorithm, schedule.ALGORITHMS, world)
    if not 0 <= source < world.ranks:
        raise ValueError(f"there is no rank {source} in a world of {world.ranks}")
    if not tensor.is_contiguous():
        raise ValueError("tensor must be contiguous")
    rows = tensor.view(-1, 1)
    mine, theirs = ("a", "out") if world.rank == source else ("out", "a")
    tensors = {mine: rows, theirs: rows[:0]}
    # Where ranks are many, or wait for a core, a source that waits for nobody gains more than it costs that all meet now and then.
    if algorithm in ("auto", "pull") and many(world) and handed_out(world, rows.numel() * rows.itemsize):
        return Work(schedule.eager(source, world.levels), (len(rows),), tensors, tensor)
    symmetric, shared = world.is_symmetric(rows), rows.numel() * rows.itemsize >= SHARED_BYTES
    cut = world.ranks if shared else 1
    if not symmetric:
        cut = pieces(len(rows), slot_rows(rows, len(rows), 1, world, PIECE_BYTES))
    if algorithm == "ring":
        cut = pieces(len(rows), sent_rows(rows, len(rows)))
    plan = _plan(cut, world.ranks, source, algorithm, symmetric, shared, world.topology)
    return Work(plan, (len(rows),), tensors, tensor)


@lru_cache(1024)
def _plan(cut: int, ranks: int, source: int, algorithm: str, symmetric: bool, shared: bool, hosts: Hosts | None) -> Plan:
    places, staged = hosts or range(ranks), hosts is None and not symmetric
    if algorithm == "ring":
        return schedule.ring(cut, source, places, staged=staged)
    if hosts is not None or algorithm == "push":
        return schedule.push(source, places, staged=staged)
    return schedule.broadcast(ranks, cut, source, symmetric_a=symmetric, shared=shared)
