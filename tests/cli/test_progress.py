"""Progress: bars on a terminal's stderr, and lines where it is none."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from weft.measure.launched import on_ranks
from weft.measure.progress import progress

PREDICT = "predict all-gather-matmul --machine ascend-910b1 --sweep ranks=2:4"


def at_interrupt():
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return signal.SIGINT in blocked, signal.getsignal(signal.SIGINT)


def test_ctrl_c_ends_ranks_that_measure_at_once():
    """Python's own handler would wait for the end of a call of torch's."""
    assert on_ranks(at_interrupt, 1, threads=1) == (False, signal.SIG_DFL)


def errors(terminal):
    """The stderr of a command, as a terminal or a file gets it."""
    reader, writer = pty.openpty() if terminal else os.pipe()
    command = [sys.executable, "-m", "weft", *PREDICT.split()]
    with open(reader, "rb") as shown:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=writer, env={**os.environ, "TERM": "xterm"}
        )
        os.close(writer)
        assert done.returncode == 0
        assert b"predicting" not in done.stdout
        return shown.read1(1 << 16)


def test_a_terminal_shows_a_progress_bar():
    assert b"predicting" in errors(terminal=True)
    assert errors(terminal=False) == b"predicting ...\n"


def test_each_kind_of_task_has_a_line(capsys):
    with progress("verifying", 5) as advance:
        for task in ("verifying a", "verifying b", "measuring: first call of a", "measuring", ""):
            advance(task)
        advance("verifying a")
    assert capsys.readouterr().err.splitlines() == [
        "verifying ...",
        "measuring ...",
        "verifying ...",
    ]
    with progress("verifying", 5, shown=False) as advance:
        advance("measuring")
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize("shown", ["starting", "preparing", "measuring"])
def test_a_benchmark_shows_each_step_and_ctrl_c_ends_it(shown):
    options = ["--shape", "4096x2048x1024", "--iterations", "1000"]
    command = [sys.executable, "-m", "weft", "bench", "all-gather-matmul", *options]
    reader, writer = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with (
        open(reader, "rb", buffering=0) as screen,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=writer, env=environment, start_new_session=True
        ) as process,
    ):
        os.close(writer)
        seen, limit = b"", time.monotonic() + 180
        while shown.encode() not in seen:
            assert time.monotonic() < limit, seen
            seen += screen.read(1 << 16)
        os.killpg(process.pid, signal.SIGINT)
        while b"stopped by SIGINT" not in seen:
            assert time.monotonic() < limit, seen
            seen += screen.read(1 << 16)
        # Python ends by the signal itself if that came while a text was executed, by which named
        # tuples and data classes are made: a shell has the status 130 of both
        assert process.wait(timeout=20) in (130, -signal.SIGINT)
    assert b"Traceback" not in seen
    hide, show = b"\x1b[?25l", b"\x1b[?25h"
    assert seen.rfind(show) >= seen.rfind(hide), "the cursor is hidden"
