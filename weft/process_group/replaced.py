"""Patches `dist.monitored_barrier`, which rejects other backends."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from weft.process_group.worlds import operations_of
from weft.uncompiled import uncompiled

_OF_TORCH = dist.monitored_barrier


def replace() -> None:
    """Replace torch's `monitored_barrier`, which rejects all backends except gloo."""
    dist.monitored_barrier = distributed_c10d.monitored_barrier = _monitored_barrier


@uncompiled
@functools.wraps(_OF_TORCH)
def _monitored_barrier(
    group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
) -> None:
    operations = operations_of(dist.group.WORLD if group is None else group)
    if operations is None:
        _OF_TORCH(group, timeout, wait_all_ranks)
    else:
        limit = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        operations.monitored_barrier(limit, wait_all_ranks)
