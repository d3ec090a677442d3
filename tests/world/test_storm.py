"""A short storm, with fixed seeds: some kinds of trials, in shared memory and between hosts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.hosts import WHY_NOT
from support.storm.kinds import KINDS
from support.storm.machine import main_thread_starved
from support.storm.rank import wait_for
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


def test_a_child_that_waits_for_a_core_does_not_hang():
    computing = "import time\nwhile time.process_time() < {}: pass"
    core = {min(os.sched_getaffinity(0))}
    busy = [started(computing.format(60), core) for _ in range(5)]
    try:
        began = time.monotonic()
        assert wait_for(started(computing.format(0.2), core).pid, 0.5) == "exit 0"
        assert time.monotonic() > began + 0.5
    finally:
        for each in busy:
            each.kill()
            each.wait()


def test_a_child_that_sleeps_hangs():
    sleeping = started("import time; time.sleep(60)", os.sched_getaffinity(0))
    assert wait_for(sleeping.pid, 0.5) == "a hang of 0.5 s"


def test_the_waits_of_a_process_that_has_ended_are_known():
    computing = "import time\nwhile time.process_time() < {}: pass"
    core = {min(os.sched_getaffinity(0))}
    both = [started(computing.format(0.2), core) for _ in range(2)]
    for each in both:
        os.waitid(os.P_PID, each.pid, os.WEXITED | os.WNOWAIT)
    assert max(main_thread_starved(each.pid) for each in both) > 0.1
    assert [each.wait() for each in both] == [0, 0]


def started(program: str, cores: set[int]) -> subprocess.Popen[bytes]:
    """A process that runs a program on these cores."""
    process = subprocess.Popen([sys.executable, "-S", "-c", program])
    os.sched_setaffinity(process.pid, cores)
    return process


@pytest.mark.slow
def test_an_unknown_kind_is_refused():
    done = run_storm("--kind", "kill,thunder")
    assert done.returncode == 2
    assert "thunder" in done.stderr
