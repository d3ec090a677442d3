"""The device engine: lanes are streams of a GPU, on which copies, products, sums, notifies and
waits are put in order.

The host puts an execution on the streams and returns; it never waits for the device, so that calls
queue up and can be captured in a CUDA graph. Copies are torch's, which a copy engine executes
concurrently with products, or a kernel's on a few SMs (`kernels.copy_rows`). Products are torch's,
too, or weft's own kernel's (`weft.gpu.products`). `DeviceOptions` divide the SMs between
both. On a CPU lanes are threads: slower than the host engine, but the same code as on a GPU, so
that tests do not need one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import weft._native as _native
from weft.engines.engine import Engine
from weft.engines.program import Dtypes, Tensors
from weft.errors import PeerTimeout, PlanError, WeftError
from weft.gpu import tuning
from weft.gpu.counters import Counters, DeviceCounters, counters
from weft.gpu.fixed import Geometry
from weft.gpu.lanes import Lane, lane
from weft.gpu.memory import drain
from weft.gpu.onesided import OneSided
from weft.gpu.options import check_options, hardware
from weft.gpu.program import DeviceProgram
from weft.kernels.weights import Weight, as_tensor
from weft.plan import Launch, Plan
from weft.plan.language import LANES, is_lane
from weft.schedules.device_options import DeviceOptions
from weft.schedules.workload import Variant
from weft.world import World, memory


class DeviceEngine(Engine):
    """Executes plans for one rank of a world on the lanes of its device."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.kernels = world.backend.products == "triton"
        self.launches = self.kernels or world.device.type == "cuda"
        self.products = "products by torch, one after each wait"
        if self.kernels:
            import triton

            from weft.gpu.kernels import interpreter, symmetric

            if symmetric.INTERPRETED:
                interpreter.serve_threads()
            elif world.device.type == "cpu" and triton.knobs.runtime.interpret:
                raise WeftError(
                    "weft's kernels were imported before TRITON_INTERPRET=1 was set; set it when "
                    "Python starts"
                )
            self.products = "products by one persistent kernel, which waits per tile"
        self.lanes: dict[str, Lane] = {}
        self.check_options(world.device_options)
        self._counters: Counters | None = None
        self._one_sided: OneSided | None = None
        self.last: DeviceProgram | None = None
        self.stream: torch.cuda.Stream | None = None  # the caller's stream in the last call

    def load(self) -> None:
        """Load the kernels of signals and of one-sided calls; collective. A world of GPUs does so
        when it is made: later, one of them may wait for this rank.
        """
        self.one_sided.load()
        assert isinstance(self.counters, DeviceCounters)
        self.counters.load()

    @property
    def counters(self) -> Counters:
        """The counters of all signals; created by the first call, collectively."""
        if self._counters is None:
            self._counters = counters(self.world, _native.Executor.max_names * self.world.ranks)
        return self._counters

    @property
    def one_sided(self) -> OneSided:
        if self._one_sided is None:
            self._one_sided = OneSided(self.world, self.timed_out)
        return self._one_sided

    def finish_transfers(self) -> None:
        """Also close the lanes, whose memory is freed next: a wait ends at its time limit."""
        if self._one_sided is not None:
            self._one_sided.close()
        for each in self.lanes.values():
            each.close()
        self.lanes.clear()
        drain(self.world.device)

    def lane(self, name: str) -> Lane:
        """The lane of this name."""
        if name not in self.lanes:
            self.lanes[name] = lane(self.world.device, f"{name} of rank {self.world.rank}")
        return self.lanes[name]

    def lane_names(self, lanes: Collection[str]) -> tuple[str, ...]:
        """Those of any engine, and one for each link after the first."""
        if not all(map(is_lane, lanes)):
            raise PlanError(
                f"streams have the lanes compute, comm, comm1, …; the plan has {', '.join(lanes)}"
            )
        return *LANES, *(name for name in lanes if name not in LANES)

    def exchange(self, call: str, text: str, timeout: float | None = None) -> list[str]:
        """As of any engine, by the hosts of ranks: the caller does not wait for the lanes."""
        with self.world.exclusive, self.world.failure.fail_on_error:
            return self.exchange_locked(call, text, timeout)

    def exchange_locked(self, call: str, text: str, timeout: float | None = None) -> list[str]:
        """`exchange` within a call."""
        world, compiled = self.world, _native.Compiled(call, 0, [], self.world.ranks)
        texts = [text] * world.ranks
        world.executor.begin(compiled, timeout or world.timeout)
        for peer, theirs, _ in memory.exchange(world, compiled, call, text):
            texts[peer] = theirs
        return texts

    @property
    def setting(self) -> str:
        return hardware(self.world)

    def groups(self) -> Sequence[Callable[[Any, Sequence[Variant]], Iterable[Variant]]]:
        return tuning.tiles, tuning.transfers, tuning.sms

    def check_options(self, options: DeviceOptions) -> None:
        """Raise `ValueError` for options that this rank's device cannot honour."""
        check_options(self.world, options)

    def check_product(self, x: Tensor, weight: Weight, out_dtype: torch.dtype) -> None:
        """Raise `ValueError` for a product that this engine cannot compute."""
        if self.kernels and 0 not in (*x.shape, *weight.shape):
            from weft.gpu.kernels.all_gather_matmul import blocks, check

            # contiguous rows, as arrivals are
            rows = x.new_empty(2, x.shape[1])
            out = x.new_empty(1, 1, dtype=out_dtype)
            check(rows, as_tensor(weight), out)
            options = self.world.device_options
            for tile in (options.tile, options.own_tile):
                blocks(tile, x.device, x.dtype)

    def check_launch(self, launch: Launch) -> None:
        if not self.launches:
            super().check_launch(launch)
        from weft.gpu.kernels import all_gather

        all_gather.check(launch, self.world.backend.ranks_per_device, self.world.device)

    def kind(self, tensors: Tensors, rows: Sequence[int]) -> Hashable:
        return (
            *rows,
            *((name, Geometry.of(tensor, self.world)) for name, tensor in tensors.items()),
        )

    def workspace_replaced(self) -> None:
        self.programs.clear()

    @property
    def default_options(self) -> DeviceOptions:
        return self.world.device_options

    def compile(
        self,
        plan: Plan,
        tensors: Tensors,
        rows: Sequence[int],
        dtypes: Dtypes,
        options: DeviceOptions,
    ) -> DeviceProgram:
        if self.world.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise WeftError(
                f"the first {plan.operator} with these sizes and dtypes allocates memory and loads "
                "kernels: call it once before you capture it in a graph"
            )
        return DeviceProgram(self, plan, tensors, rows, dtypes, options)

    def begin(self) -> None:
        """Make the caller's current stream wait for the earlier calls, which may have been made on
        another stream.
        """
        if self.world.device.type == "cuda":
            stream = torch.cuda.current_stream()
            if self.stream not in (None, stream) and not torch.cuda.is_current_stream_capturing():
                stream.wait_stream(self.stream)
            self.stream = stream

    def check(self) -> None:
        """Raise the errors that a stream cannot raise: a peer failed, made another call than this
        rank's last call, or was late.
        """
        world = self.world
        if (last := self.last) is not None:
            for peer in range(world.ranks):
                if world.executor.mismatch(last.compiled, peer):
                    raise self.wait_error(
                        _native.WaitStatus.mismatch, peer, last.compiled, "", world.timeout
                    )
        if world.mesh.failure()[0]:
            raise world.failure.reported("to make its next call")
        if (timeout := self.timed_out()) is not None:
            raise world.failure.fail(timeout)

    def timed_out(self) -> PeerTimeout | None:
        """The error of a kernel's wait that timed out, which the kernel has recorded: of a plan, or
        of a one-sided call.
        """
        try:
            if self._counters is not None:
                self._counters.check(self.describe_counter)
        except PeerTimeout as error:
            return error
        return self.one_sided.timed_out()

    def describe_counter(self, index: int) -> str:
        """The signal of a counter, and the latest call that may have waited for it."""
        name = [*self.names][index // self.world.ranks]
        source = index % self.world.ranks
        call = self.last.plan.operator if self.last else "a call"
        return f'signal "{name}" from rank {source} in {call} or before'
