"""Functions of torch that serve only native backends, and functions that serve weft's as well."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from weft.process_group.group import Group
from weft.process_group.uncompiled import uncompiled

_FP16 = c10d.BuiltinCommHookType.FP16_COMPRESS


@functools.cache
def replace() -> None:
    """Replace these functions in torch."""
    dist.monitored_barrier = distributed_c10d.monitored_barrier = _monitored_barrier(
        dist.monitored_barrier
    )
    ddp: Any = DistributedDataParallel
    ddp._register_builtin_comm_hook = _register_builtin_hook(ddp._register_builtin_comm_hook)


def _monitored_barrier(of_torch: Callable[..., None]) -> Callable[..., None]:
    """torch's function refuses all backends except gloo."""

    @uncompiled
    @functools.wraps(of_torch)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        chosen = dist.group.WORLD if group is None else group
        if isinstance(chosen, Group):
            chosen.monitored_barrier(
                timedelta(seconds=timeout) if isinstance(timeout, float | int) else timeout,
                wait_all_ranks,
            )
        else:
            of_torch(group, timeout, wait_all_ranks)

    return monitored_barrier


def _register_builtin_hook(of_torch: Callable[..., None]) -> Callable[..., None]:
    """torch's native hook for float16 takes futures from native works alone: the same hook in
    Python is in its place.
    """

    @functools.wraps(of_torch)
    def register(model: Any, comm_hook_type: Any) -> None:
        if comm_hook_type == _FP16 and isinstance(model.process_group, Group):
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            model.logger._set_comm_hook_name(str(comm_hook_type))
            c10d._register_comm_hook(model.reducer, model.process_group, fp16_compress_hook)
        else:
            of_torch(model, comm_hook_type)

    return register
