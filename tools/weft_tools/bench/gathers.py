"""The gathers of `weft bench overlap`: by weft's algorithms, or on NVIDIA's GPUs by multicast and
by NCCL without SMs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import WeftError
from weft.ops.all_gather import all_gather, all_gather_async
from weft.plan.launch import Launch
from weft.world import World
from weft_tools.bench import nccl
from weft_tools.bench.settings.overlap import OverlapSettings


class Gather(NamedTuple):
    """An all-gather of `source` into `gathered`.

    `gather` orders it before later work of the caller's stream; `begin` lets it run in the
    background and returns an object to wait for. `comm_sms` is the number of SMs that it occupies
    at most.
    """

    name: str
    source: Tensor
    gathered: Tensor
    gather: Callable[[], object]
    begin: Callable[[], Any]
    comm_sms: int = 0


def gathers_of(settings: OverlapSettings, world: World, a: Tensor) -> list[Gather]:
    """The gathers of `a` that the settings ask for. Raises `WeftError` for one that this machine
    does not support.
    """
    found = []
    for name in settings.gathers:
        if name == "multicast":
            found.append(_multicast(world, a))
        elif name == "nccl-zero-cta":
            found.append(_zero_cta(world, a))
        elif name == "kernel":
            for sms in settings.sms:
                label = f"kernel on {sms} SM{'s' if sms > 1 else ''}"
                options = {"algorithm": "kernel", "launch": Launch(comm_sms=sms)}
                found.append(_by_weft(label, settings, world, a, sms, **options))
        else:
            found.append(_by_weft(name, settings, world, a, 0))
    return found


def _by_weft(
    label: str, settings: OverlapSettings, world: World, a: Tensor, sms: int, **options: Any
) -> Gather:
    empty = partial(torch.empty, device=world.device) if settings.plain_out else world.empty
    gathered = empty(len(a) * world.ranks, dtype=a.dtype)
    given: dict[str, Any] = {"out": gathered, "world": world, **options}
    gather, begin = partial(all_gather, a, **given), partial(all_gather_async, a, **given)
    return Gather(label, a, gathered, gather, begin, sms)


def _multicast(world: World, a: Tensor) -> Gather:
    """One store of a GPU to the memory of all, by NVSwitch, with torch's operator."""
    import torch.distributed._symmetric_memory  # registers the operator
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    supported = _SymmetricMemory.has_multicast_support(DeviceType.CUDA, world.device.index)
    operator = getattr(torch.ops.symm_mem, "multimem_all_gather_out", None)
    if not supported or operator is None or world.backend.group is None:
        raise WeftError("--gather multicast needs GPUs on an NVSwitch: leave it out")
    gathered = world.empty(len(a) * world.ranks, dtype=a.dtype)
    gather = partial(operator, a, world.backend.group, gathered)
    sms = multicast_sms(a.nbytes)
    return Gather("multicast", a, gathered, gather, _in_background(gather), sms)


def multicast_sms(size: int) -> int:
    """The programs by which torch stores `size` bytes by multicast: 1024 threads of 16 bytes each,
    in torch from 2.9 on.
    """
    return max(1, min(8, -(-size // (1024 * 16))))


def _zero_cta(world: World, a: Tensor) -> Gather:
    """NCCL with the policy that leaves all SMs to products: it copies by copy engines from and to
    its own symmetric memory. With NCCL 2.28 both must be: an input that is not goes by SMs.
    """
    groups: Any = getattr(dist, "ProcessGroupNCCL", None)
    policy = getattr(groups, "NCCL_CTA_POLICY_ZERO", None)
    if policy is None:
        raise WeftError("--gather nccl-zero-cta needs torch with NCCL 2.28 or newer: leave it out")
    options = groups.Options()
    options.config.cta_policy = policy
    group = dist.new_group(backend="nccl", pg_options=options)

    def make() -> tuple[Tensor, Tensor]:
        source = torch.empty_like(a)
        return source, torch.empty(len(a) * world.ranks, dtype=a.dtype, device=world.device)

    source, gathered = nccl.in_registered_memory(world, group, make, "--gather nccl-zero-cta")
    gather = partial(dist.all_gather_into_tensor, gathered, source, group=group)
    return Gather("nccl-zero-cta", source, gathered, gather, partial(gather, async_op=True))


class _Ended(NamedTuple):
    """Work on its own stream."""

    stream: Any

    def wait(self) -> None:
        """Order it before later work of the current stream."""
        torch.cuda.current_stream().wait_stream(self.stream)


def _in_background(gather: Callable[[], object]) -> Callable[[], _Ended]:
    """Begin a gather on its own stream, after the work of the current stream."""
    stream: Any = torch.cuda.Stream()

    def begin() -> _Ended:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            gather()
        return _Ended(stream)

    return begin
