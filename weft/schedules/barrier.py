"""The plan of a barrier."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from weft.plan import Instruction, Notify, Plan, Signal, Wait
from weft.schedules.common import after, before


@cache
def barrier(ranks: int, name: str = "barrier") -> Plan:
    """No rank ends it before all have begun it; exits are as close together as signals travel. `name` is that of its signals."""
    lanes: list[Mapping[str, tuple[Instruction, ...]]] = []
    for rank in range(ranks):
        notifies = [Notify(peer, Signal(name, rank)) for peer in before(rank, ranks)]
        waits = [Wait(Signal(name, peer), 1) for peer in after(rank, ranks)]
        lanes.append({"compute": (*notifies, *waits)})
    return Plan(name, "mesh", {}, tuple(lanes))
