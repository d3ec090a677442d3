"""How a device engine makes the products of a compute lane: each by `torch.mm`, or whole runs of
them by one persistent kernel.

With ``torch`` a product is put on the stream behind the waits before it. With ``triton`` a run of
products, waits and notifies is one launch of `kernels.all_gather_matmul`, which does the waiting
and the telling itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from weft.engines.device.counters import DeviceCounters
from weft.engines.device.fixed import Geometry
from weft.engines.device.kernels import symmetric
from weft.engines.device.kernels.all_gather_matmul import Product, check
from weft.engines.device.lanes import Operands, Step
from weft.kernels.weights import plain
from weft.plan import Compute, Instruction, Signal


class Launch:
    """One launch of the product kernel in a program, for a `part` of its compute lane.

    `whole` gives a rank's buffer, or its name if it is the caller's own; `index` says where a
    signal's counter lies; there is room for so many `programs` of the kernel.
    """

    def __init__(
        self,
        part: Sequence[Instruction],
        whole: Callable[[int, str], Tensor | str],
        geometry: Mapping[str, Geometry],
        index: Callable[[Signal], int],
        counters: DeviceCounters,
        programs: int,
    ) -> None:
        products = [i for i in part if isinstance(i, Compute)]
        world = counters.world
        self.counters, self.output = counters, products[0].dst.buffer
        assert products[0].weight is not None
        self.weight = products[0].weight
        sources = [*dict.fromkeys(i.srcs[0][:2] for i in products)]
        self.sources = [whole(rank, buffer) for rank, buffer in (sources[0], sources[-1])]
        self.out = whole(world.rank, self.output)
        self.bases = counters.bases  # of no use where only this rank's own rows are written
        if any(i.dst.rank != world.rank for i in products):
            assert isinstance(self.out, Tensor)
            self.bases = symmetric.bases(world, self.out)
        source, output = geometry[sources[0][1]], geometry[self.output]
        self.product = Product(
            part,
            output.columns,
            source.dtype,
            output.dtype,
            index,
            world.rank,
            programs,
            world.device,
        )

    def step(self, given: Operands, idle: bool = False) -> Step:
        """The launch with these operands, or one that only loads its kernel. Raises `ValueError`
        for what it cannot multiply.
        """
        own, x, out = (
            given.tensors[t] if isinstance(t, str) else t for t in (*self.sources, self.out)
        )
        weight, max_polls = plain(given.weights[self.weight]), symmetric.max_polls(given.timeout)
        check(own, weight, out)
        check(x, weight, out)
        added = given.bias.get(self.weight)
        return lambda: self.product(
            own, x, weight, added, out, self.bases, self.counters.tables, max_polls, idle
        )
