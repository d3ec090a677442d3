"""Worlds whose lanes are streams: those of a GPU, and threads in their place on a CPU."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from weft import installation
from weft.bootstrap.rendezvous import StoreRendezvous
from weft.errors import WeftError
from weft.gpu import driver, memory
from weft.gpu.options import check_queues
from weft.gpu.signals import DeviceSignals
from weft.schedules.device_options import DEFAULT, DeviceOptions
from weft.world import World
from weft.world.backend import Backend
from weft.world.signals import Signals

_TRITON = "3.6"
_OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class StreamBackend(Backend):
    """A GPU, or on a CPU threads that behave as its streams."""

    stream_ordered = True

    def __init__(self, device: torch.device, products: str, comm_threads: int) -> None:
        super().__init__(comm_threads, device)
        self.products = products
        self.on_gpu = device.type == "cuda"
        self.runs_kernels = self.on_gpu or products == "triton"
        self.loads_kernels = self.on_gpu

    def check_options(self, options: DeviceOptions, ranks: int) -> None:
        if options == DEFAULT:
            return
        if options.links > max(1, ranks - 1):
            raise ValueError(
                f"each link serves other peers, so a rank of {ranks} has at most "
                f"{max(1, ranks - 1)}; got {options.links} links"
            )
        of_kernel = options.tile or options.own_tile or options.compute_sms
        if of_kernel and self.products != "triton":
            raise ValueError(
                "tile, own_tile and compute_sms are of weft's product kernel, and this world "
                f'multiplies by torch.mm: make it with products="triton"; got {options}'
            )
        if not self.runs_kernels and options.comm_sms:
            raise ValueError(
                "comm_sms is of a kernel, which on a CPU runs under Triton's interpreter: make the "
                f'world with products="triton"; got {options}'
            )

    def join(self, group: dist.ProcessGroup | None, meeting: StoreRendezvous) -> None:
        if self.on_gpu and group is not None:
            self.group, self.kept = group.group_name, group
        elif self.on_gpu and meeting.ranks > 1:
            self.group, self.kept = memory.named_group(meeting)

    def share(self, ranks: int, options: DeviceOptions) -> None:
        if self.on_gpu:
            check_queues(ranks, options.links)
            driver.check_loading()
        self.ranks_per_device = ranks

    def prepare(self, world: Any) -> None:
        if self.on_gpu:
            world.engine = self.engine(world)
            world.engine.load()

    @property
    def device_id(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid) if self.on_gpu else ""

    def meet(self, devices: Sequence[str]) -> None:
        if self.on_gpu and len({*devices}) < len(devices):
            os.environ.setdefault(_OVERLAPPING, "1")

    def on_thread(self) -> AbstractContextManager[Any]:
        return _Stream(self.device) if self.on_gpu else nullcontext()

    def allocate(
        self, world: World, shape: Sequence[int], dtype: torch.dtype, call: str | None = None
    ) -> torch.Tensor:
        if self.on_gpu:
            return memory.allocate(world, shape, dtype, call)
        return super().allocate(world, shape, dtype, call)

    def signals(self, world: World, count: int, name: str) -> Signals:
        if self.runs_kernels:
            return DeviceSignals(world, count, name)
        return super().signals(world, count, name)

    def engine(self, world: Any) -> Any:
        from weft.gpu.engine import DeviceEngine

        return DeviceEngine(world)


class _Stream:
    """The stream of a rank that is a thread, complete at the end of the context, after an error
    too: its waits have time limits.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = driver.take_stream(device, urgent=False)
        weakref.finalize(self, driver.give_back, self.stream, urgent=False)

    def __enter__(self) -> None:
        # each rank computes gradients on its own thread; on a shared one ranks would wait for each
        # other
        torch.autograd.set_multithreading_enabled(False)
        self.context = torch.cuda.stream(self.stream)
        self.context.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.stream.synchronize()
        finally:
            self.context.__exit__(kind, error, trace)


def backend_of(
    device: torch.device | str, products: str, streams: bool, comm_threads: int, shared: bool
) -> Backend:
    """As `weft.world.backend.backend_of`; a GPU becomes the current one."""
    if str(device).startswith("cuda"):
        driver.set_variables(shared)
    place = check_device(device)
    check_products(products, place)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    elif products == "torch" and not streams:
        return Backend(comm_threads, place)
    return StreamBackend(place, products, comm_threads)


def check_device(device: torch.device | str) -> torch.device:
    """The device with its index. Raises `WeftError` for a device that is missing or unsupported."""
    unsupported = f"weft supports the devices cpu and cuda; got {device}"
    try:
        place = torch.device(device)
    except RuntimeError:
        raise WeftError(unsupported) from None
    if place.type == "cuda":
        if not torch.cuda.is_available():
            raise WeftError('no GPU that torch can use was found; use device="cpu"')
        _check_triton("GPUs need")
        return torch.device(
            "cuda", torch.cuda.current_device() if place.index is None else place.index
        )
    if place.type != "cpu":
        raise WeftError(unsupported)
    return place


def device_of_rank() -> torch.device:
    """The GPU of this rank's local rank, which the launcher's variable LOCAL_RANK has; with more
    ranks than GPUs they share them in turn.

    Raises `WeftError` without a GPU.
    """
    driver.set_variables(shared=False)
    if not torch.cuda.is_available():
        raise WeftError('no GPU that torch can use was found; use device="cpu"')
    number = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", number % torch.cuda.device_count())


def check_products(products: str, device: torch.device) -> None:
    """Raise `ValueError` or `WeftError` unless a world on `device` can multiply by `products`,
    ``torch`` or ``triton``.
    """
    if products not in ("torch", "triton"):
        raise ValueError(f"products must be torch or triton; got {products!r}")
    if products == "triton":
        _check_triton("weft's product kernel needs", ', or use products="torch"')
        if device.type == "cpu":
            import triton

            if not triton.knobs.runtime.interpret:
                raise WeftError(
                    "on a CPU Triton's kernels run only under its interpreter: set "
                    "TRITON_INTERPRET=1 before anything imports "
                    'them, or use products="torch"'
                )


def _check_triton(need: str, instead: str = "") -> None:
    """Raise `WeftError` unless Triton is installed, in a version that weft's kernels support."""
    found = None
    if find_spec("triton") is not None:
        import triton

        found = triton.__version__
    if found is None or TorchVersion(found) < _TRITON:
        raise WeftError(
            f"{need} Triton {_TRITON} or newer, and there is {found or 'none'}: "
            f"{installation.command('gpu')}{instead}"
        )
