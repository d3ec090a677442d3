"""The launcher of ranks that outlive each other: exit codes, what it prints, and its end."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from weft.world import survivors


def run(program, ranks=3):
    """The exit code of ranks that run a program, in which `rank` is the number of each."""
    script = f"import os, sys, time\nrank = int(os.environ['RANK'])\n{program}"
    return survivors.run(ranks, [sys.executable, "-c", script])


@pytest.mark.parametrize(
    ("program", "code", "printed"),
    [
        ("", 0, ""),
        (
            "if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(0.5)",
            0,
            "was ended by SIGKILL; 2 left",
        ),
        ("if rank == 0: sys.exit(3)\ntime.sleep(0.5)", 0, "ended with exit code 3; 2 left"),
        ("time.sleep(0.5 * rank)\nsys.exit(4 + rank)", 4, "rank 2"),
        ("time.sleep(0.5 * rank)\nos.kill(os.getpid(), 15)", 128 + 15, "was ended by SIGTERM"),
    ],
)
def test_the_exit_code(program, code, printed, capfd):
    assert run(program) == code
    assert printed in capfd.readouterr().err


def test_ranks_share_a_store_of_the_launcher():
    joined = (
        "from torch.distributed import TCPStore\n"
        "store = TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n"
        "store.set(str(rank), b'')\n"
        "store.wait([str(each) for each in range(int(os.environ['WORLD_SIZE']))])"
    )
    assert run(joined, ranks=2) == 0


def test_a_signal_ends_all_ranks(capfd):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert run("time.sleep(60)") == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in capfd.readouterr().err
