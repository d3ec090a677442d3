"""Asynchronous calls whose plans need numbers of all ranks, which ranks exchange first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from torch import Tensor

from weft.checks import check_timeout
from weft.errors import PeerTimeout, SymmetricMemoryError
from weft.ops.collective import CollectiveCall
from weft.ops.handle import Handle, begin
from weft.world import World


class DeferredHandle(Handle):
    """A collective that begins after the exchange of its numbers, itself a collective in progress:
    when the handle is asked for it, or before this rank's next call, whichever is first.

    So all ranks begin it between the same calls, without another thread, and at most one call of a
    world is deferred.
    """

    def __init__(
        self,
        world: World,
        exchange: Handle,
        prepare: Callable[[Tensor], CollectiveCall],
        description: str,
        result: Tensor,
        timeout: float | None,
    ) -> None:
        self._world, self._exchange, self._prepare = world, exchange, prepare
        self._description, self._result, self._timeout = description, result, timeout
        self._begun: Handle | None = None
        self._error: Exception | None = None
        world.exclusive.deferred = self

    def begin(self) -> None:
        """Wait for the numbers of all ranks, and begin the call; once."""
        numbers = self._exchange.wait()
        if self._world.exclusive.deferred is not self:
            return
        self._world.exclusive.deferred = None
        with self._world.failure.fail_on_error:
            try:
                call = self._prepare(numbers)
                call.description, call.timeout = self._description, self._timeout
                self._begun = begin(call)
            except (ValueError, SymmetricMemoryError) as error:  # on all ranks
                self._error = error

    def done(self) -> bool:
        """Whether `wait` would return at once; begins the call if it can."""
        if self._begun is None and self._error is None and self._exchange.done():
            self.begin()
        return self._error is not None or (self._begun is not None and self._begun.done())

    def wait(self, timeout: float | None = None) -> Tensor:
        """As `Handle.wait`; also raises the error of numbers that do not fit."""
        check_timeout(timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout

        def wait_for(handle: Handle) -> None:
            if not handle._join(max(0.0, deadline - time.monotonic())):
                operator = self._description.partition("(")[0]
                raise PeerTimeout(f"{operator} is not done after {timeout:g} s")

        if self._begun is None and self._error is None:
            wait_for(self._exchange)
            self.begin()
        if self._error is not None:
            raise self._error
        if self._begun is None:
            self._world.failure.check()
        assert self._begun is not None, "an error of `begin` has closed the world"
        wait_for(self._begun)
        return self._begun.wait()
