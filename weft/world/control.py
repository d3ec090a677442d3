"""The memory of headers and counters by which ranks check each other's calls."""

from __future__ import annotations

import weft._native as _native
from weft.errors import SymmetricMemoryError
from weft.world.notes import Notes


def control_segment(notes: Notes, world: int, timeout: float) -> tuple[_native.Segment, bool]:
    """The control segment of the world of this number in this process, and whether all ranks can
    read ordinary tensors in each other's memory. Ranks exchange it first.
    """
    placement = notes.placement
    size = _native.Executor.control_bytes(placement.ranks)
    header = _native.Executor.header_bytes
    doing = "to make the world"
    here = [*filter(placement.hosts.here, range(placement.ranks))]
    elsewhere = [peer for peer in placement.others if not placement.hosts.here(peer)]
    # the calls of ranks on other hosts are kept behind the part of one rank of this
    sizes = {rank: size + (rank == here[0]) * len(elsewhere) * header for rank in here}
    try:
        own, file = _native.create_mapping(sizes[placement.rank])
    except OSError as error:
        raise SymmetricMemoryError(
            f"rank {placement.rank} has no memory to make the world: {error}"
        ) from None
    parts = [own] * placement.ranks
    local = [peer for peer in here if peer != placement.rank]
    for peer in local:
        notes.send(peer, placement.staging_reason, file, doing)
    reads_memory = placement.has_peers_here and not placement.staging_reason
    for peer in local:
        late = f"for rank {peer} (pid {placement.pids[peer]}) {doing}"
        staged, theirs = notes.receive(peer, doing, late, timeout)
        parts[peer] = notes.attach(peer, theirs, sizes[peer], doing)
        reads_memory = reads_memory and not staged
    for at, peer in enumerate(elsewhere):
        parts[peer] = _native.part_of_mapping(parts[here[0]], size + at * header, header)
    return _native.Segment(parts, placement.rank, world, 0), reads_memory
