"""Expert parallelism in vLLM, in the environment that `make vllm` sets up."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.vllm_client import BIN, needs_vllm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    needs_vllm,
]

PROMPTS, TOKENS = 8, 6
# One process and several add float32 in another order; the top token must lead by far more.
LEAD = 1e-4


def in_vllm(program: str, *arguments: str, threads: str = "0"):
    """What the program prints; it and all that it starts end here."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": threads,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_PLUGINS": "weft",
    }
    process = subprocess.Popen(
        [BIN / "python", Path(__file__).parent / program, *arguments],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=900)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    return printed


def lines(printed: str, word: str):
    return [json.loads(line[len(word) :]) for line in printed.splitlines() if line.startswith(word)]


def test_all_ranks_parts_of_vllms_experts_add_up_to_the_layer():
    differences = dict(lines(in_vllm("experts_checks.py"), "DIFFERENCE "))
    # a choice's row and a rank's part are rounded to bfloat16, by 2^-9 at most: at most 12 of them
    assert set(differences) == {"float32", "bfloat16", "int8"}
    assert differences["float32"] < 1e-5
    assert differences["bfloat16"] < 12 * 2**-9
    assert differences["int8"] < 12 * 2**-9


Generate = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def generate(tmp_path_factory: pytest.TempPathFactory):
    """Tokens, and their leads, of one of the models on some ranks."""
    folder = tmp_path_factory.mktemp("models")
    draw = random.Random(0)
    prompts = [[draw.randrange(4000) for _ in range(draw.randrange(1, 30))] for _ in range(PROMPTS)]
    reference: dict[str, list[Any]] = {}

    def run(model: str, tensor: int = 1, data: int = 1, **options: Any):
        if not (folder / model).exists():
            in_vllm("experts_checkpoint.py", model, str(folder / model))
        spec = {
            "model": str(folder / model),
            "dtype": "float32",
            "tensor": tensor,
            "data": data,
            "expert": tensor * data > 1,
            "compiled": False,
            "prompts": prompts,
            "owners": [number % data for number in range(PROMPTS)],
            "tokens": TOKENS,
        }
        cores = sorted(os.sched_getaffinity(0))
        threads = "|".join(str(cores[k % len(cores)]) for k in range(tensor * data))
        program = json.dumps(spec | options)
        (tokens,) = lines(in_vllm("experts_tokens.py", program, threads=threads), "TOKENS ")
        return tokens

    def of_one_process(model: str):
        if model not in reference:
            reference[model] = run(model)
        return reference[model]

    def compared(model: str, **options: Any):
        """Pairs of the tokens of one process and of several, where one process is sure."""
        pairs = list(zip(of_one_process(model), run(model, **options), strict=True))
        sure = [(one, several) for (one, lead), (several, _) in pairs if lead > LEAD]
        assert len(sure) > PROMPTS / 2
        return sure

    return compared


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("mixtral", {"tensor": 2, "compiled": True}),
        # all but one of the prompts on rank 0; then rank 1 has nothing to do but its experts
        ("mixtral", {"data": 2, "owners": [0] * (PROMPTS - 1) + [1]}),
        # a shared expert, and 10 experts over 4 ranks
        ("qwen2", {"tensor": 2, "data": 2}),
        # the layer's tokens are split over the ranks of a tensor-parallel group, too
        ("qwen3", {"tensor": 2, "data": 2, "owners": [1] * PROMPTS}),
    ],
    ids=["tensor", "data", "both-shared", "both-split"],
)
def test_the_same_tokens_as_one_process(generate: Generate, model: str, options: dict[str, Any]):
    for one, several in generate(model, **options):
        assert several == one
