"""The world of a call: its argument, or the default."""

from __future__ import annotations

from weft.errors import WeftError
from weft.world import registry
from weft.world.world import World

LOCAL_MAKER = "the next local.run(...)"
"""The call that makes the next world of the ranks of a local world."""


def current(world: World | None = None) -> World:
    """`world`, or the default world; it must be open."""
    if world is not None:
        check_world(world)
    elif (world := registry.of_thread() or registry.default) is None:
        if any(each.failure.maker == LOCAL_MAKER for each in registry.alive.values()):
            raise WeftError(
                "there is no default world outside local.run, since the ranks of a local world "
                "are its threads: call from a function that local.run(...) runs"
            )
        raise WeftError("there is no default world: call weft.init() first, or pass world=...")
    if world.failure.closed is not None:
        world.failure.check()
    return world


def check_world(world: object) -> None:
    """Raise `TypeError` unless `world` is a `World`."""
    if not isinstance(world, World):
        raise TypeError(
            f"world must be a weft.World, as weft.init(group) makes it; got {type(world).__name__}"
        )
