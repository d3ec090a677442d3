"""vLLM on weft with two ranks on each of two hosts, in vLLM's own way without Ray."""

from __future__ import annotations

import re

import pytest
from support.hosts import FIRST, hosts, needs_hosts
from support.vllm_client import BIN, engine, llm, needs_vllm

LIMIT = 60.0  # seconds, generous
OWN_MEMORY = ["sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
"""Begins a command whose shared memory is that of a host of its own."""


@needs_vllm
@needs_hosts
@pytest.mark.slow
def test_two_hosts_give_the_tokens_of_one_process_and_name_a_lost_rank(tmp_path):
    folder, port = tmp_path / "model", 29401
    with engine(llm(folder, "end"), VLLM_CPU_OMP_THREADS_BIND="0,1", VLLM_PLUGINS="") as vllm:
        expected = vllm.tokens()
        vllm.end()
    options = {
        "tensor-parallel-size": 4,
        "nnodes": 2,
        "master-addr": FIRST,
        "master-port": port,
        "distributed-executor-backend": "mp",
    }
    first = llm(folder, node_rank=0, **{key.replace("-", "_"): options[key] for key in options})
    second = [BIN / "vllm", "serve", folder, "--headless", "--node-rank", 1, "--dtype", "float32"]
    second += ["--enforce-eager", "--skip-tokenizer-init"]
    second += [word for key, value in options.items() for word in (f"--{key}", value)]
    with hosts(2) as two:
        inside = [["ip", "netns", "exec", name, *OWN_MEMORY] for name in two.names]
        here, there = (
            {
                "VLLM_HOST_IP": FIRST[:-1] + str(i + 1),
                "GLOO_SOCKET_IFNAME": "eth0",
                "VLLM_CPU_OMP_THREADS_BIND": "0|1",
            }
            for i in range(2)
        )
        with (
            engine(inside[0] + first, **here) as head,
            engine(inside[1] + second, **there) as other,
        ):
            assert head.tokens() == expected
            head.until("decoding")
            other.kill_worker(3)
            assert head.end() < LIMIT
            assert other.end() < LIMIT
            assert re.search(r"PeerLost: rank 3 .*died while rank [01] ", head.text)
            assert not head.processes() | other.processes()
