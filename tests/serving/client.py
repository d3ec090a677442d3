"""The environment of vLLM that `make vllm` sets up."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".clients" / "vllm" / "bin" / "python"
needs_vllm = pytest.mark.skipif(
    not PYTHON.exists(), reason="vLLM is not installed: `make vllm` installs it"
)
