"""The rendezvous of a torch elastic agent that starts all ranks of a job, on this host.

torch's rendezvous of several agents records the call stack at each of its steps, which takes 0.1 s,
and a second in a process that has imported thousands of modules.
"""

from __future__ import annotations

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "weft"
"""The name of this rendezvous among torch's."""


class OneAgent(RendezvousHandler):
    """An agent that waits for no other and serves the store of its ranks at a free port."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.job = parameters.run_id
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def next_rendezvous(self) -> RendezvousInfo:
        ranks = RendezvousStoreInfo("localhost", self.store.port)
        return RendezvousInfo(PrefixStore(self.job, self.store), 0, 1, ranks)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self.job

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else would begin another rendezvous."""

    def shutdown(self) -> bool:
        return True


rendezvous_handler_registry.register(BACKEND, OneAgent)
