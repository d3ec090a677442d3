"""weft's communicator of vLLM, in the environment that `make vllm` sets up."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".clients" / "vllm" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: `make vllm` installs it")
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_calls_of_the_communicator(ranks):
    checks = Path(__file__).parent / "communicator_checks.py"
    ran = subprocess.run(
        [
            PYTHON,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            checks,
        ],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr
    assert "all checks passed" in ran.stdout
