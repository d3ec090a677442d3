"""Matrix products of a compute lane on a device: one `torch.mm` each, or one persistent kernel for
a sequence of products.

With ``torch`` a product is put on the stream behind the waits before it. With ``triton`` a run of
products, waits and notifies is one launch of `kernels.all_gather_matmul`, which itself waits and
notifies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from weft.gpu.counters import DeviceCounters
from weft.gpu.fixed import Geometry
from weft.gpu.kernels import symmetric
from weft.gpu.kernels.all_gather_matmul import ProductKernel, check
from weft.gpu.lanes import LaneOperands, Step
from weft.kernels.weights import as_tensor
from weft.plan import Compute, Instruction, Signal
from weft.schedules.device_options import Tile


class ProductLaunch:
    """One launch of the product kernel in a program, for a `part` of its compute lane.

    `full_buffer` returns a rank's buffer, or its name if each call passes its tensor; `index`
    returns the index of a signal's counter; the kernel has at most `programs` programs, and a
    `tile`, and for this rank's own input before other rows an `own_tile`, if they are given.
    """

    def __init__(
        self,
        part: Sequence[Instruction],
        full_buffer: Callable[[int, str], Tensor | str],
        geometry: Mapping[str, Geometry],
        index: Callable[[Signal], int],
        counters: DeviceCounters,
        programs: int,
        tile: Tile | None,
        own_tile: Tile | None,
    ) -> None:
        products = [i for i in part if isinstance(i, Compute)]
        world = counters.world
        self.part = part
        self.counters = counters
        self.output = products[0].dst.buffer
        assert products[0].weight is not None
        self.weight = products[0].weight
        sources = [*dict.fromkeys(i.srcs[0][:2] for i in products)]
        self.sources = [full_buffer(rank, buffer) for rank, buffer in (sources[0], sources[-1])]
        self.out = full_buffer(world.rank, self.output)
        self.bases = counters.bases  # unused if the launch writes to this rank's rows only
        if any(i.dst.rank != world.rank for i in products):
            assert isinstance(self.out, Tensor)
            self.bases = symmetric.bases(world, self.out)
        own_first = len(sources) > 1 and isinstance(self.sources[0], str)
        source = geometry[sources[0][1]]
        output = geometry[self.output]
        self.product = ProductKernel(
            part,
            output.columns,
            source.dtype,
            output.dtype,
            index,
            world.rank,
            programs,
            world.device,
            tile,
            own_tile if own_first else None,
        )

    def step(self, operands: LaneOperands, idle: bool = False, times: Tensor | None = None) -> Step:
        """The launch with these operands, whose kernel writes the `times` of its tiles, if any; an
        `idle` launch only loads the kernel. Raises `ValueError` for operands that the kernel cannot
        multiply.
        """
        own, x, out = (
            operands.tensors[t] if isinstance(t, str) else t for t in (*self.sources, self.out)
        )
        weight = as_tensor(operands.weights[self.weight])
        limit = symmetric.time_limit(operands.timeout)
        check(own, weight, out)
        check(x, weight, out)
        bias = operands.bias.get(self.weight)
        return lambda: self.product(
            own, x, weight, bias, out, self.bases, self.counters.tables, limit, idle, times
        )
