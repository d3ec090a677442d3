"""vLLM's worker without its shared memory: sums go through torch.distributed, on gloo."""

from __future__ import annotations

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.v1.worker.cpu_worker import CPUWorker


class Worker(CPUWorker):  # type: ignore[misc]
    """A worker whose ranks find no name in common for shared memory, as ranks on several hosts."""

    def init_device(self) -> None:
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
        super().init_device()
