"""The barrier: a plan of signals alone."""

from __future__ import annotations

from weft.checks import check_timeout
from weft.engines import engine
from weft.schedules import barrier as schedule
from weft.world import World, current


def barrier(world: World | None = None, timeout: float | None = None) -> None:
    """Return once all ranks have called it; collective.

    Everything that any rank put, wrote or notified before is visible to all ranks after.
    Asynchronous transfers count only if they were over before. `timeout` is in seconds, the world's
    by default. As of every collective call, a time-out or an interrupt closes the world on all
    ranks. Raises `PeerTimeout`, `PeerLost`, `MismatchError` (a peer makes another collective call).
    """
    check_timeout(timeout)
    chosen = current(world)
    own = engine(chosen)
    known = own.calls.get(barrier)
    if known is None:
        program = own.program(schedule.barrier(chosen.levels), {})
        known = program, program.bind({}, ())
        if own.remembers:
            own.calls[barrier] = known
    program, binding = known
    program.execute_alone(binding, timeout)
