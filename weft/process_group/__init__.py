"""weft as a backend of torch.distributed: ``init_process_group("weft")``, ``"cpu:weft,cuda:nccl"``,
``new_group(backend="weft")``.

`register` is an entry point that torch calls when it is imported; importing weft calls it too. It
does not load weft: the first group does.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from weft import variables

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions

    from weft.process_group.group import Group


def register() -> None:
    """Register the backend ``weft``, make weft's errors subclasses of torch.distributed's, and put
    weft in gloo's place if the variable WEFT_REPLACES_GLOO asks for it; idempotent.
    """
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "WEFT"):
        return
    import weft.errors as errors

    errors.set_base(dist.DistBackendError)
    dist.Backend.register_backend("weft", _group, extended_api=True, devices=["cpu"])
    if os.environ.get("WEFT_REPLACES_GLOO"):
        from weft.process_group import in_place_of_gloo

        in_place_of_gloo.replace()


def _group(group: _DistributedBackendOptions, options: object) -> Group:
    """The constructor that torch calls, on all ranks."""
    variables.check()
    from weft.process_group.group import Group
    from weft.process_group.replaced import replace

    replace()
    return Group(
        group.store,
        group.group_rank,
        group.group_size,
        group.timeout.total_seconds(),
        group.global_ranks_in_group,
    )
