"""Interpreters of plans, and `engine`, which selects and creates the engine of a world."""

from __future__ import annotations

from weft.engines.engine import Engine
from weft.engines.host import HostEngine
from weft.engines.network import NetworkEngine
from weft.world import World


def engine(world: World) -> Engine:
    """The engine of a world, created at its first use."""
    found: Engine | None = world.engine
    if found is None:
        found = world.engine = _create(world)
        world.repeats = found.calls
    return found


def use_reference(world: World) -> None:
    """Let a world that has made no call yet execute plans by the reference interpreter; see
    `weft.engines.replicated`.
    """
    from weft.engines.replicated import ReferenceEngine

    world.engine = ReferenceEngine(world)


def _create(world: World) -> Engine:
    found: Engine | None = world.backend.engine(world)
    if found is not None:
        return found
    return NetworkEngine(world) if world.hosts.several else HostEngine(world)
