"""The examples run as they are told to, at small sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name, *arguments):
    """What an example prints."""
    done = subprocess.run([sys.executable, EXAMPLES / name, *map(str, arguments)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.data
def test_custom_schedule(tmp_path):
    picture = tmp_path / "timeline.png"
    assert "all_gather_matmul / doubling on 4 ranks" in example("custom_schedule.py", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.data
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensor_parallel_transformer(dtype):
    sizes = "--dim 64 --layers 2 --heads 4 --kv-heads 2 --hidden 96 --vocab 128 --batch 2 --prompt 16 --generated 3 --iterations 1"
    printed = example("tensor_parallel_transformer.py", *sizes.split(), "--dtype", dtype, "--explain")
    for word in ("prefill", "decode", "train", "logits agree", "gradients agree", "matmul_all_reduce", "matmul_reduce_scatter"):
        assert word in printed
