"""Several ranks of one vLLM engine on each of several hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import WorkerProc

from weft.vllm.replace import replace


def register() -> None:
    """Let vLLM find the host of a rank. It divides ranks by the devices of a host, and all CPUs are
    one device: it takes all but the first rank to be on another host than its engine.
    """
    replace(WorkerProc, "_init_message_queues", with_ranks_as_devices)


def with_ranks_as_devices(connect: Callable[..., None]) -> Callable[..., None]:
    """vLLM's method that connects a worker to its engine, on a host with a device for each rank."""

    def run(worker: WorkerProc, engine: Any, config: Any) -> None:
        ranks = config.parallel_config.local_world_size
        type(current_platform).device_count = classmethod(lambda platform: ranks)
        connect(worker, engine, config)

    return run
