"""A sample of torch's own suite for backends; ``make torch-suite`` runs all of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLE = [
    "test_all_to_all_single_unequal_split",
    "test_barrier_timeout_full_group",
    "test_grads_same_across_ranks_with_no_sync",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_send_recv_with_tag",
]


@pytest.mark.slow
def test_a_sample_of_torchs_own_suite():
    suite = Path(__file__).parents[1] / "torch_suite.py"
    words = [f"{suite}::TestWeft::{name}" for name in SAMPLE]
    environment = {**os.environ, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        *words,
    ]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert re.search(rf"\b{len(SAMPLE)} passed", ended.stdout), ended.stdout + ended.stderr
