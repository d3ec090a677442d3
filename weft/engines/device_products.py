"""How a device engine makes the products of a compute lane: each by `torch.mm`, or whole runs of them by one persistent kernel.

With ``torch`` a product is put on the stream behind the waits before it. With ``triton`` a run of products, waits and notifies is
one launch of `weft.kernels.all_gather_matmul`, which does the waiting and the telling itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from weft.engines.counters import DeviceCounters
from weft.engines.lanes import Step
from weft.kernels import symmetric
from weft.kernels.all_gather_matmul import Product, check
from weft.kernels.tiles import launches
from weft.matmul import Weight, plain
from weft.plan import Instruction, Matmul

if TYPE_CHECKING:
    from weft.engines.device import DeviceProgram


class Run:
    """A part of a program's compute lane that is carried out by product kernels: ``lane[start:stop]``."""

    def __init__(self, program: DeviceProgram, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.launches = [Launch(program, part) for part in launches(program.lanes[0][start:stop])]


class Launch:
    """One launch of the product kernel in a program."""

    def __init__(self, program: DeviceProgram, part: Sequence[Instruction]) -> None:
        products = [i for i in part if isinstance(i, Matmul)]
        world, counters = program.world, program.engine.counters
        assert isinstance(counters, DeviceCounters)
        self.counters, self.output = counters, products[0].dst.buffer
        sources = [*dict.fromkeys(i.src[:2] for i in products)]
        self.sources = [program.whole(rank, buffer) for rank, buffer in (sources[0], sources[-1])]
        self.out = program.whole(world.rank, self.output)
        self.bases = counters.bases  # of no use where only this rank's own rows are written
        if any(i.dst.rank != world.rank for i in products):
            assert isinstance(self.out, Tensor)
            self.bases = symmetric.bases(world, self.out)
        geometry = program.geometry
        dtypes = geometry[sources[0][1]].dtype, geometry[self.output].dtype
        room, columns = program.engine.room, geometry[self.output].columns
        self.product = Product(part, columns, *dtypes, program.engine.index, world.rank, room, world.device)

    def step(
        self,
        tensors: Mapping[str, Tensor],
        weights: Mapping[str, Weight],
        bias: Mapping[str, Tensor],
        timeout: float,
        idle: bool = False,
    ) -> Step:
        """The launch with these tensors, or one that only loads its kernel. Raises `ValueError` for what it cannot multiply."""
        own, x, out = (tensors[t] if isinstance(t, str) else t for t in (*self.sources, self.out))
        weight, polls = plain(weights[self.output]), symmetric.polls(timeout)
        check(own, weight, out)
        check(x, weight, out)
        added = bias.get(self.output)
        return lambda: self.product(own, x, weight, added, out, self.bases, self.counters.counting, polls, idle)
