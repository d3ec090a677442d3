"""weft in torchft: a process group that a `torchft.Manager` makes anew when replicas come or go."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torchft.process_group import ProcessGroupWrapper

from weft import process_group


class ProcessGroupWeft(ProcessGroupWrapper):  # type: ignore[misc]
    """In place of `torchft.ProcessGroupGloo`, with the same arguments: of replicas on CPUs, on one
    host or several.

    Errors of a lost replica are `weft.PeerLost`; the manager takes them for a failed step, and the
    next quorum makes the group anew.
    """

    def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
        ranks: Any = self._global_ranks or ()
        return process_group.make(store, rank, world_size, self._timeout, ranks)

    def getBackendName(self) -> str:
        return "torchft-weft"
