"""The device backend interface, implemented here for CPUs and by `weft.gpu.backend` for streams."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weft.schedules.device_options import DEFAULT, DeviceOptions
from weft.world import memory
from weft.world.signals import Signals

if TYPE_CHECKING:
    from weft.bootstrap.rendezvous import StoreRendezvous
    from weft.world.world import World


class Backend:
    """The CPU, where each lane is a thread; other backends are subclasses.

    Attributes: `device` (of the ranks' tensors), `stream_ordered` (whether lanes are streams),
    `products` (the library that multiplies: ``torch`` or ``triton``), `ranks_per_device` (the
    number of ranks on this rank's device), `group` (the name of the process group by which ranks
    share its memory, or None), `comm_threads` (as in `weft.init`).
    """

    stream_ordered = False
    runs_kernels = False
    loads_kernels = False
    products = "torch"
    ranks_per_device = 1
    group: str | None = None

    def __init__(self, comm_threads: int = 1, device: torch.device | None = None) -> None:
        self.comm_threads = comm_threads
        self.device = torch.device("cpu") if device is None else device

    def check_options(self, options: DeviceOptions, ranks: int) -> None:
        """Raise `ValueError` for options that a world of `ranks` ranks cannot honour here."""
        if options != DEFAULT:
            raise ValueError(
                f"device options ({options}) are of worlds whose lanes are streams, and this one's "
                'are threads of the host: make it with device="cuda", or for tests with '
                'products="triton"'
            )

    def join(self, group: dist.ProcessGroup | None, meeting: StoreRendezvous) -> None:
        """Keep the group of the ranks, or make one, if their memory needs it. A world on a CPU does
        not, and must not keep the group and its threads alive.
        """

    def share(self, ranks: int, options: DeviceOptions) -> None:
        """Let this number of ranks, threads of this process, share the device. Raises `ValueError`
        if it cannot serve so many.
        """

    def on_thread(self) -> AbstractContextManager[Any]:
        """The context in which a rank of a local world works on its thread."""
        return nullcontext()

    def allocate(
        self, world: World, shape: Sequence[int], dtype: torch.dtype, call: str | None = None
    ) -> torch.Tensor:
        """A tensor in a new segment of symmetric memory, as `weft.world.memory.allocate` makes
        it.
        """
        return memory.allocate(world, shape, dtype, call)

    def signals(self, world: World, count: int, name: str) -> Signals:
        """`count` counters on every rank."""
        return Signals(world, count, name)

    def engine(self, world: Any) -> Any:
        """The engine of a world, None if it is one of processes or threads on CPUs."""
        return None

    @property
    def device_id(self) -> str:
        """An identifier that distinguishes the devices of ranks; empty for a CPU."""
        return ""

    def meet(self, devices: Sequence[str]) -> None:
        """Prepare for ranks on these devices, each a `device_id`."""

    def prepare(self, world: Any) -> None:
        """Load what later calls of a new world need; collective."""


def backend_of(
    device: torch.device | str,
    products: str,
    streams: bool,
    comm_threads: int = 1,
    shared: bool = False,
) -> Backend:
    """The backend of a device, for products and lanes as in `weft.init`; `shared` by ranks that are
    threads of this process.

    Raises `WeftError` for a device that is missing or unsupported, and without Triton for its
    products; `ValueError` for other products and for `comm_threads` that is not positive.
    """
    if not (isinstance(comm_threads, int) and comm_threads > 0):
        raise ValueError(f"comm_threads must be a positive integer; got {comm_threads!r}")
    if str(device) == "cpu" and products == "torch" and not streams:
        return Backend(comm_threads)
    # loaded only where it is needed: the one import that runs up the house
    made: Backend = import_module("weft.gpu.backend").backend_of(
        device, products, streams, comm_threads, shared
    )
    return made
