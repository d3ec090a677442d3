"""weft's communicator and layers of vLLM, in the environment that `make vllm` sets up."""

import subprocess
from pathlib import Path

import pytest
from support.hosts import hosts, needs_hosts
from support.vllm_client import BIN, ROOT, needs_vllm

HERE = Path(__file__).parent


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_calls_of_the_communicator(ranks):
    words = [
        BIN / "python",
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    ran = subprocess.run(
        [*words, HERE / "communicator_checks.py"],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr
    assert "all checks passed" in ran.stdout


@pytest.mark.slow
@needs_vllm
@needs_hosts
@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_between_hosts(ranks, monkeypatch):
    """With so many ranks on each host."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))
    with hosts(2, gbps=1) as two:
        two.start(HERE / "layers_checks.py", ranks, python=str(BIN / "python"))
        ended = two.finish()
    assert [code for code, _ in ended] == [0, 0], ended
    assert any("all checks passed" in printed for _, printed in ended)
