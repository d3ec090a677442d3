"""A short storm, with fixed seeds: some kinds of trials, in shared memory and between hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.hosts import WHY_NOT
from support.storm.kinds import KINDS
from support.storm.trial import trial_of

QUICK = "kill,mismatch,files,outstanding,outstanding-mismatch,fork,fork-all,threads-share,threads-come,ctrl-c,handler-within,jobs,containers"


def run_storm(*options: str, script: str = "storm.py") -> subprocess.CompletedProcess[str]:
    """The outcome of a storm, whose ranks are forked from a process of its own, which has no
    threads.
    """
    command = [sys.executable, Path(__file__).parents[1] / script, *options]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


@pytest.mark.parametrize(
    ("places", "kinds", "trials"),
    [
        ("shared", QUICK, 8),
        pytest.param(
            "hosts", "kill,mismatch", 2, marks=pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
        ),
    ],
)
@pytest.mark.slow
def test_a_short_storm(places, kinds, trials):
    done = run_storm("--seed", "3", "--trials", str(trials), "--places", places, "--kind", kinds)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{trials} trials from seed 3 on" in done.stdout


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="shared"),
        pytest.param(
            ("--hosts",),
            marks=pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
            id="hosts",
        ),
    ],
)
@pytest.mark.slow
def test_a_short_storm_of_losses_and_joiners(options):
    done = run_storm("--rounds", "10", *options, script="shrink_storm.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 rounds" in done.stdout


def test_a_trial_is_repeated_by_its_seed_kind_and_place():
    for name, kind in KINDS.items():
        trial = trial_of(5, name, kind, ("shared", "hosts", "compile"))
        assert trial == trial_of(5, name, kind, (trial.place,))


@pytest.mark.slow
def test_an_unknown_kind_is_refused():
    done = run_storm("--kind", "kill,thunder")
    assert done.returncode == 2
    assert "thunder" in done.stderr
