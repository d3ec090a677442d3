"""weft as a backend of torch.distributed: ``init_process_group("weft")``, ``"cpu:weft,cuda:nccl"``,
``new_group(backend="weft")``.

`register` tells torch of it: when torch is imported, which looks for such entry points, or when
weft is, whichever is later. It loads nothing of weft; the first group does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions

    from weft.process_group.group import Group


def register() -> None:
    """Make the backend ``weft`` known to torch.distributed, whose errors weft's then are too; again
    does nothing.
    """
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "WEFT"):
        return
    import weft.errors as errors

    errors.set_base(dist.DistBackendError)
    dist.Backend.register_backend("weft", _group, extended_api=True, devices=["cpu"])


def _group(given: _DistributedBackendOptions, options: object) -> Group:
    """What torch calls, on all ranks, to make a group."""
    from weft.process_group.group import Group

    return Group(
        given.store,
        given.group_rank,
        given.group_size,
        given.timeout.total_seconds(),
        given.global_ranks_in_group,
    )
