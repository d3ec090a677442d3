"""The launcher of ranks that outlive each other: exit codes, what it prints, and its end."""

from __future__ import annotations

import os
import signal
import sys
from subprocess import Popen
from unittest import mock

import pytest

from weft.launchers import survivors

PROGRAM = """
import os, pathlib, sys, time
rank = int(os.environ["RANK"])
pids = pathlib.Path({folder!r})
(pids / str(rank)).symlink_to(str(os.getpid()))  # one step, unlike writing a file

def await_end(rank):
    while not (pids / str(rank)).is_symlink():
        time.sleep(0.01)
    while os.path.exists(f"/proc/{{os.readlink(pids / str(rank))}}"):
        time.sleep(0.01)

{program}
"""


@pytest.fixture
def run(tmp_path):
    """The exit code of ranks that run a program, in which `rank` is the number of each, and
    `await_end` waits until the launcher knows the end of another.
    """

    def run_program(program, ranks=3):
        script = PROGRAM.format(folder=str(tmp_path), program=program)
        return survivors.run(ranks, [sys.executable, "-c", script])

    return run_program


@pytest.mark.parametrize(
    ("program", "code", "printed"),
    [
        ("", 0, ""),
        (
            "if rank == 1: os.kill(os.getpid(), 9)\nawait_end(1)",
            0,
            "was ended by SIGKILL; 2 left",
        ),
        (
            "if rank == 1: os.kill(os.getpid(), 35)\nawait_end(1)",
            0,
            "was ended by signal 35; 2 left",
        ),
        ("if rank == 0: sys.exit(3)\nawait_end(0)", 0, "ended with exit code 3; 2 left"),
        ("if rank: await_end(rank - 1)\nsys.exit(4 + rank)", 4, "rank 2"),
        (
            "if rank: await_end(rank - 1)\nos.kill(os.getpid(), 15)",
            128 + 15,
            "was ended by SIGTERM",
        ),
    ],
)
def test_the_exit_code(run, program, code, printed, capfd):
    assert run(program) == code
    assert printed in capfd.readouterr().err


def test_ranks_share_a_store_of_the_launcher(run):
    joined = (
        "from torch.distributed import TCPStore\n"
        "store = TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n"
        "store.set(str(rank), b'')\n"
        "store.wait([str(each) for each in range(int(os.environ['WORLD_SIZE']))])"
    )
    assert run(joined, ranks=2) == 0


def test_a_signal_ends_all_ranks(run, capfd):
    assert run("if rank == 2: os.kill(os.getppid(), 15)\ntime.sleep(60)") == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in capfd.readouterr().err


@pytest.fixture
def at_the_second_start(monkeypatch):
    """Calls a function when the second rank is about to be started; the list of those started."""
    started = []

    def install(act):
        def start(*args, **options):
            if len(started) == 1:
                act()
            started.append(process := Popen(*args, **options))
            return process

        monkeypatch.setattr(survivors.subprocess, "Popen", start)
        return started

    return install


def test_a_signal_while_ranks_are_started_ends_all(run, at_the_second_start):
    started = at_the_second_start(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run("time.sleep(60)") == 128 + signal.SIGTERM
    assert [process.returncode for process in started] == [-signal.SIGTERM] * 3


def test_no_rank_stays_when_one_cannot_be_started(run, at_the_second_start):
    started = at_the_second_start(mock.Mock(side_effect=OSError("no more processes")))
    with pytest.raises(OSError, match="no more processes"):
        run("time.sleep(60)")
    assert [process.returncode for process in started] == [-signal.SIGKILL]
