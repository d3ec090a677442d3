"""A call that was made before, found by its tensors: what is left to do is little more than one native call."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from weft.engines.host import Binding, HostProgram
from weft.world import memory


class CachedCall:
    """A call of a program of one lane on certain tensors, to be made again on the same: little more than one native call."""

    def __init__(self, program: HostProgram, binding: Binding, a: Tensor, out: Tensor) -> None:
        self.program, self.binding, self.world, self.engine = program, binding, program.world, program.engine
        self.a, self.out = memory.snapshot(a), memory.snapshot(out)
        self.repeat = partial(program.world.native.repeat, program.native, self.a, self.out)

    def replay(self, a: Tensor, out: Tensor, timeout: float | None) -> bool:
        """Make the call if its tensors are as they were; else, or where there is more to do than the call, do nothing: False."""
        program, world = self.program, self.world
        if self.engine.pending or world.recorder is not None:
            return False
        if program.ahead and program.must_meet():
            if not (self.a.matches(a) and self.out.matches(out)):
                return False  # other tensors that are found by what these were: there may be none of them on other ranks
            self.engine.meet(timeout)
        if program.bound is not self.binding:
            program.apply(self.binding)
        seconds = world.timeout if timeout is None else timeout
        try:
            done = self.repeat(a, out, seconds)
        except BaseException as error:  # what a signal handler raised; a `with` would cost every call
            world.fail(error)
            raise
        if done is False:
            raise program._stopped(0, seconds)
        return done is not None
