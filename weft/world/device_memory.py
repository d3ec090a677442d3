"""Symmetric memory on GPUs: between processes torch's own, within a process plain tensors that all
ranks can access.

A segment is one allocation, with every rank's part as a tensor. It lives as long as its world.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.torch_version import TorchVersion

import weft._native as _native
from weft import installation
from weft.checks import name as dtype_name
from weft.errors import WeftError
from weft.schedules.device_options import DEFAULT, DeviceOptions
from weft.world import memory
from weft.world.peers import Peers

_TRITON = "3.6"
_OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_parts: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
"""Parts of the ranks of this process, by address."""


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
    if not torch.cuda.is_available():
        raise WeftError('no GPU that torch can use was found; use device="cpu"')
    number = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > count:
        os.environ.setdefault(_OVERLAPPING, "1")
    return torch.device("cuda", number % count)


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


def check_options(
    options: DeviceOptions, stream_ordered: bool, products: str, device: torch.device, ranks: int
) -> None:
    """Raise `ValueError` for options that a world of this kind cannot honour."""
    if options == DEFAULT:
        return
    if not stream_ordered:
        raise ValueError(
            f"device options ({options}) are of worlds whose lanes are streams, and this one's are "
            'threads of the host: make it with device="cuda", or for tests with products="triton"'
        )
    if options.links > max(1, ranks - 1):
        raise ValueError(
            f"each link serves other peers, so a rank of {ranks} has at most {max(1, ranks - 1)}; "
            f"got {options.links} links"
        )
    if products != "triton" and (options.tile or options.compute_sms):
        raise ValueError(
            "tile and compute_sms are of weft's product kernel, and this world multiplies by "
            f'torch.mm: make it with products="triton"; got {options}'
        )
    if products != "triton" and options.comm_sms and device.type == "cpu":
        raise ValueError(
            "comm_sms is of a kernel, which on a CPU runs under Triton's interpreter: make the "
            f'world with products="triton"; got {options}'
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


def allocate(
    world: Peers, shape: Sequence[int], dtype: torch.dtype, call: str | None = None
) -> torch.Tensor:
    """A tensor of zeros in a new segment on the world's device, see `World.empty`; `call` is the
    name of the call in errors.
    """
    size = math.prod(shape) * dtype.itemsize
    call = call or f"empty({tuple(shape)}, {dtype_name(dtype)})"
    compiled = _native.Compiled(call, 0, [], world.ranks)
    world.executor.begin(compiled, world.timeout)
    parts = (
        _in_this_process(world, size, compiled, call)
        if world.group is None
        else _between_processes(world, size)
    )
    world.executor.end(compiled)
    segment = memory.DeviceSegment(parts, world.number, world.executor.calls)
    world.keepalive.append(segment)
    memory.segments[segment.base(world.rank)] = segment
    return parts[world.rank][:size].view(dtype).view(tuple(shape))


def _in_this_process(
    world: Peers, size: int, compiled: _native.Compiled, call: str
) -> list[torch.Tensor]:
    own = torch.zeros(max(size, 1), dtype=torch.uint8, device=world.device)
    drain(world.device)  # zeros are written before any peer gets the address
    _parts[own.data_ptr()] = own
    parts = [own] * world.ranks
    for peer, address, _ in memory.exchange(world, compiled, call, str(own.data_ptr())):
        parts[peer] = _parts[int(address)]
    return parts


def _between_processes(world: Peers, size: int) -> list[torch.Tensor]:
    import torch.distributed._symmetric_memory as symmetric_memory
    from torch._C._distributed_c10d import _SymmetricMemory

    assert world.group is not None
    # A separate allocation: torch's `empty` takes part of a pooled block, and the buffers that
    # peers get are of the whole block.
    make: Any = _SymmetricMemory.empty_strided_p2p
    own: torch.Tensor = make((max(size, 1),), (1,), torch.uint8, world.device).zero_()
    drain(world.device)
    handle: Any = symmetric_memory.rendezvous(own, world.group)
    return [
        own if rank == world.rank else handle.get_buffer(rank, own.shape, own.dtype)
        for rank in range(world.ranks)
    ]


def drain(device: torch.device) -> None:
    """Wait for the current stream only: other streams may hold kernels that wait for this rank."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
