"""vLLM on weft when a worker of an engine dies or stops."""

from __future__ import annotations

import re
import signal

import pytest
from support.vllm_client import engine, llm, needs_vllm

LIMIT = 60.0  # seconds: generous, vLLM without weft may wait for minutes


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_worker_ends_the_engine_and_is_named_by_weft_or_vllm(tmp_path, lost):
    words = llm(tmp_path / "model", tensor_parallel_size=2)
    with engine(words, VLLM_CPU_OMP_THREADS_BIND="0|1") as vllm:
        vllm.until("decoding")
        files = vllm.shared_memory()
        vllm.kill_worker(lost)
        assert vllm.end() < LIMIT
        assert vllm.process.returncode != 0
        # vLLM's monitor may end the engine before the other rank waits for the lost one
        by_weft = rf"PeerLost: rank {lost} \(pid \d+\) died while rank {1 - lost} "
        by_vllm = rf"Worker proc VllmWorker-{lost} died unexpectedly"
        assert re.search(f"{by_weft}|{by_vllm}", vllm.text)
        assert not re.search(rf"PeerLost: rank {1 - lost} ", vllm.text)
        assert "EngineDeadError" in vllm.text
        assert not vllm.processes()
        assert not {path for path in files if path.exists()}


@needs_vllm
@pytest.mark.slow
def test_a_stopped_worker_ends_the_engine_after_the_time_limit_and_is_named(tmp_path):
    words = llm(tmp_path / "model", tensor_parallel_size=2, distributed_timeout_seconds=20)
    with engine(words, VLLM_CPU_OMP_THREADS_BIND="0|1") as vllm:
        vllm.until("decoding")
        vllm.kill_worker(1, signal.SIGSTOP)
        late = vllm.until("PeerTimeout: rank 0 waited 20 s for rows")
        assert re.search(r"rank 1 \(pid \d+\) has not made the call", late)
        vllm.until("EngineDeadError")
        vllm.resume()  # vLLM may leave it stopped
        assert vllm.end() < LIMIT
        assert vllm.process.returncode != 0
        assert not vllm.processes()
