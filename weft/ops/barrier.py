"""The barrier: a plan of signals alone."""

from __future__ import annotations

from weft._native import repeat
from weft.checks import check_timeout
from weft.engines import engine
from weft.ops import between_hosts
from weft.ops.rejections import report
from weft.schedules import barrier as schedule
from weft.uncompiled import untraced
from weft.world import World, current


@untraced
def barrier(world: World | None = None, timeout: float | None = None) -> None:
    """Return once all ranks have called it; collective.

    All writes, puts and notifies of any rank before the barrier are visible to all ranks after it.
    Asynchronous transfers are included only if they have ended before. `timeout` is in seconds, by
    default the world's. As in every collective call, a timeout or an interrupt closes the world on
    all ranks. Raises `PeerTimeout`, `PeerLost`, `MismatchError` (a peer makes another collective
    call).

    Examples:
        >>> arrived = []
        >>> def together():
        ...     arrived.append(weft.init().rank)
        ...     weft.barrier()
        ...     return len(arrived)
        >>> with weft.local_world(2) as local:
        ...     local.run(together)
        [2, 2]
    """
    try:
        if between_hosts.notified:
            between_hosts.flush(current(world), "for a barrier")
        if repeat(barrier, (), None, None, None, None, world, timeout):
            return
        check_timeout(timeout)
        world = current(world)
        own = engine(world)
        own.drain()
        program = own.program(schedule.barrier(world.placement.levels), {})
        binding = program.bind({}, ())
        with world.exclusive:
            program.execute(binding, timeout)
        if own.caches_calls:
            no_operands = None, None, None, None
            own.calls.add(barrier, (), *no_operands, program, binding, {}, [], program.prepare)
    except Exception as error:
        report(error, world)
        raise
