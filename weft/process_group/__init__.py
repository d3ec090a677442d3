"""weft as a backend of torch.distributed: ``init_process_group("weft")``, ``"cpu:weft,cuda:nccl"``,
``new_group(backend="weft")``.

`register` is an entry point that torch calls when it is imported; importing weft calls it too. It
does not load weft: the first group does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft import variables

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, _DistributedBackendOptions

    from weft.process_group.fallback import Group


def register() -> None:
    """Register the backend ``weft``, and make weft's errors subclasses of torch.distributed's;
    idempotent.
    """
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "WEFT"):
        return
    import weft.errors as errors

    errors.set_base(dist.DistBackendError)
    dist.Backend.register_backend("weft", _backend, extended_api=True, devices=["cpu"])


def _backend(group: _DistributedBackendOptions, options: object) -> Backend | Group:
    """The constructor that torch calls, on all ranks."""
    variables.check()
    from weft.process_group import compiled
    from weft.process_group.fallback import Group
    from weft.process_group.operations import Operations
    from weft.process_group.replaced import replace

    replace()
    native = compiled.backend()
    rank, ranks, timeout = group.group_rank, group.group_size, group.timeout.total_seconds()
    operations = Operations(group.store, rank, ranks, timeout, group.global_ranks_in_group)
    if native is None:
        return Group(operations)
    made: Backend = native.make(operations, rank, ranks, timeout)
    return made
