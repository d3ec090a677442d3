"""Collectives in progress: the handles of the ``_async`` forms."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from torch import Tensor

from weft.checks import check_timeout
from weft.engines.program import Program
from weft.errors import PeerTimeout
from weft.ops import driver
from weft.ops.autotune import current_selection

if TYPE_CHECKING:
    from weft.ops.collective import CollectiveCall


class Handle:
    """A collective in progress, made by the ``_async`` forms."""

    def __init__(self, program: Program, call: CollectiveCall) -> None:
        self._program, self._result = program, call.results[0]
        self._number = program.started
        self._call: CollectiveCall | None = call

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._call is None or self._reused() or self._program.done()

    def _reused(self) -> bool:
        """Whether a later call has started the program again, which the end of this one permits."""
        return self._program.started != self._number

    def wait(self, timeout: float | None = None) -> Tensor:
        """Wait for the result, and return it.

        Raises `PeerTimeout` after `timeout` seconds; the collective continues, and `wait` can be
        called again. Raises `ValueError` for a `timeout` that is not positive, and the errors of
        the collective itself.
        """
        if self._call is not None:
            check_timeout(timeout)
            if not self._join(timeout):
                operator = self._program.plan.operator
                raise PeerTimeout(f"{operator} is not done after {timeout:g} s")
            self._call.finish()
            self._call = None
        return self._result

    def _join(self, timeout: float | None) -> bool:
        """Wait until the call has ended, and raise its error; False after `timeout` seconds."""
        if self._call is None or self._reused():
            return True
        if not self._program.join(float("inf") if timeout is None else timeout):
            return False
        if self._program.failure is not None:
            raise self._program.failure
        return True


def begin(call: CollectiveCall) -> Handle:
    """Begin a checked call and return at once."""
    variant = current_selection(call)
    with call.world.exclusive:
        call.engine.limit_outstanding()
        # concurrent calls need separate programs
        programs = (driver.prepare(call, variant, number) for number in count())
        program = next(program for program in programs if program.idle())
        # not the call itself, whose world may be dropped meanwhile
        retained = call.tensors, call.results
        program.start(call.bind(program), retained, call.timeout)
        program.started += 1
    return Handle(program, call)
