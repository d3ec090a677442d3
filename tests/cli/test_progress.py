"""Progress bars: on a terminal's stderr, and nowhere else."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

PREDICT = "predict all-gather-matmul --machine ascend-910b1 --sweep ranks=2:4"


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
    assert b"predicting" not in errors(terminal=False)
