"""Several ranks of one vLLM engine on each of several hosts."""

from __future__ import annotations

import functools
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import WorkerProc


def register() -> None:
    """Let vLLM find the host of a rank. It divides ranks by the devices of a host, and all CPUs are
    one device: it takes all but the first rank to be on another host than its engine.
    """
    connect = WorkerProc._init_message_queues
    if hasattr(connect, "__wrapped__"):
        return

    @functools.wraps(connect)
    def run(worker: WorkerProc, engine: Any, config: Any) -> None:
        ranks = config.parallel_config.local_world_size
        type(current_platform).device_count = classmethod(lambda platform: ranks)
        connect(worker, engine, config)

    WorkerProc._init_message_queues = run
