"""Everything that a call launches, loaded before anything on the device waits.

To load a kernel, torch's and cuBLAS's too, may wait for all work of the device: with a kernel among
it that waits for this rank, until the time limit. So the first call of a kind *rehearses* each of
its steps but notifies and waits, on the same lanes: products, sums and copies with results that
nobody reads, weft's kernels without any work. Ranks that share a GPU notify each other before each
call whether one of them has to, since the others' kernels must not wait meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from weft.errors import WeftError
from weft.gpu.lanes import LaneOperands, Step
from weft.kernels.weights import Weight
from weft.plan import Compute, Copy, Reduce, accesses

if TYPE_CHECKING:
    from weft.gpu.program import DeviceProgram

LOADING = threading.Lock()
"""Held while kernels are compiled and loaded, so that ranks of one process do it once."""
_ALIGNED = 16
"""Bytes of the widest access: kernels differ by the multiple of it at which an operand begins."""


class Launches(Protocol):
    """A launch of one of weft's kernels in a program."""

    def step(self, operands: LaneOperands, idle: bool = False) -> Step:
        """The launch with these operands; an `idle` one loads all kernels that it may need, and
        does nothing.
        """


class Loading:
    """What is loaded for a program's calls."""

    def __init__(self, program: DeviceProgram) -> None:
        self.program = program
        self.loaded: set[Hashable] = set()

    def prepare(
        self,
        operands: LaneOperands,
        launches: Mapping[range, Sequence[Launches]],
        lanes: Mapping[str, str],
    ) -> None:
        """Load what a call with these operands launches, by `launches` for parts of the compute
        lane, if it is the first of its kind; collective among ranks that share a GPU. `lanes` has
        the engine's lane for each of the program's.

        Raises `WeftError` while a graph is captured, in which nothing can be loaded.
        """
        program, engine = self.program, self.program.engine
        if not engine.world.backend.loads_kernels:
            return
        traced = {part: tuple(map(type, every)) for part, every in launches.items()}
        kind = (*_layouts(operands), *lanes.items(), *traced.items())
        new = kind not in self.loaded
        if _capturing():
            if new:
                raise WeftError(
                    f"the first {program.plan.operator} with tensors of these layouts loads "
                    "kernels: call it once before you capture it in a graph"
                )
            return
        several = engine.world.backend.ranks_per_device > 1
        with engine.world.failure.fail_on_error:
            if several and not any(engine.exchange_locked(program.call, "loads" if new else "")):
                return
            if new:
                self._load(operands, launches, lanes)
                self.loaded.add(kind)
            if several:
                engine.agree(program.call)

    def _load(
        self,
        operands: LaneOperands,
        launches: Mapping[range, Sequence[Launches]],
        lanes: Mapping[str, str],
    ) -> None:
        for name, lane in lanes.items():
            if self.program.parts[name]:
                own = launches if name == "compute" else {}
                rehearsal = partial(self._rehearse, name, operands, own)
                self.program.engine.lane(lane).start(rehearsal).finish()

    def _rehearse(
        self, name: str, operands: LaneOperands, launches: Mapping[range, Sequence[Launches]]
    ) -> None:
        """Run each different step of a lane once, on that lane."""
        program, done = self.program, set[Hashable]()
        lane = program.lanes[program.lane_names.index(name)]
        with LOADING:
            for part in program.parts[name]:
                for launch in launches.get(part, ()):
                    launch.step(operands, idle=True)()
                instruction = lane[part.start]
                if part in launches or not isinstance(instruction, Compute | Copy | Reduce):
                    continue
                kind = self._kind(instruction, operands)
                if kind not in done:
                    done.add(kind)
                    program.step(instruction, operands, _scratch)()

    def _kind(self, instruction: Compute | Copy | Reduce, operands: LaneOperands) -> Hashable:
        """What selects the kernel of an instruction."""
        tensors = (self.program.find(r, operands.tensors) for r in accesses(instruction))
        how: Hashable = None
        if isinstance(instruction, Compute):
            how = instruction.kernel, instruction.weight
        elif isinstance(instruction, Reduce):
            how = instruction.op
        return type(instruction), how, *map(_layout, tensors)


def _layouts(operands: LaneOperands) -> tuple[Hashable, ...]:
    """What the kernels of a call depend on, apart from its program."""
    tensors, weights, bias, _ = operands
    return *bias, *map(_layout, (*tensors.values(), *weights.values(), *bias.values()))


def _layout(t: Weight) -> Hashable:
    """The properties of an operand by which kernels are selected."""
    if not isinstance(t, Tensor):
        return t.layout
    return t.dtype, t.shape, t.stride(), t.data_ptr() % _ALIGNED


def _scratch(t: Tensor) -> Tensor:
    """A tensor with the layout of another one, and other memory."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    ahead = t.data_ptr() % _ALIGNED // t.itemsize
    return t.new_empty(ahead + max(size, 0)).as_strided(t.shape, t.stride(), ahead)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
