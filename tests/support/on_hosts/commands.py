"""Commands of weft whose ranks are on several hosts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import time

import pytest
from rich.console import Console

import weft._native as _native
from weft.cli import app
from weft.doctor.checks import diagnose


def doctor():
    """The output of weft doctor on hosts with a fault: a firewall, an interface, and the last
    host's clocks, one of which does not move: links are not timed by it.
    """
    first, last = (
        os.environ["RANK"] == "0",
        os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1),
    )
    # drops the answers of servers on this host
    firewall = [
        "ip",
        "rule",
        "{}",
        "ipproto",
        "tcp",
        "sport",
        "30000-60999",
        "blackhole",
    ]

    def diagnosed():
        printed = io.StringIO()
        well = diagnose(Console(file=printed, width=200, soft_wrap=True), verbose=True)
        return well, printed.getvalue()

    with contextlib.ExitStack() as stack:
        for word, undo in (("add", "delete"),) if first else ():
            subprocess.run([part.format(word) for part in firewall], check=True)
            stack.callback(subprocess.run, [part.format(undo) for part in firewall], check=True)
        found = [diagnosed()]
    with pytest.MonkeyPatch.context() as patch:
        if last:
            patch.setenv("GLOO_SOCKET_IFNAME", "eth7")
        found.append(diagnosed())
    with pytest.MonkeyPatch.context() as patch:
        if last:
            now = time.time_ns
            patch.setattr(time, "time_ns", lambda: now() + 90 * 10**9)
            patch.setattr(_native, "now", lambda: 0)
        found.append(diagnosed())
    return found


def doctor_by_ucx():
    """The output of weft doctor."""
    printed = io.StringIO()
    diagnose(Console(file=printed, width=200, soft_wrap=True))
    return printed.getvalue()


def benches(folder):
    """Benchmarks of every kind measure, or refuse to measure on several hosts."""
    few = ["--warmup", "1", "--iterations", "1", "--threads", "1"]
    fused, sizes = ["--shape", "64x32x16", *few], ["--sizes", "4K", *few]
    measured = {
        **dict.fromkeys(("all-gather-matmul", "matmul-all-reduce"), fused),
        **dict.fromkeys(("reduce-scatter", "all-to-all"), sizes),
        "p2p": sizes,
        "overlap": ["--shape", "64x64x64", "--size", "4K", *few],
    }
    found = []
    for name, options in measured.items():
        code, _ = command("bench", name, *options, "--json", folder / name)
        assert code == 0, name
        if os.environ["RANK"] == "0":
            found.append(json.loads((folder / name).read_text()))
    refused = {
        "direct is not possible in this world": [
            "all-gather-matmul",
            *fused,
            "--algorithm",
            "direct",
        ],
        "pull is not possible in this world": ["all-gather", *sizes, "--algorithm", "pull"],
        "one_shot is not possible in this world": ["all-reduce", *sizes, "--algorithm", "one_shot"],
        "a link can be emulated on one host only": [
            "matmul-all-reduce",
            *fused,
            "--link-gbps",
            "1",
        ],
        "ranks on several hosts have a real link": ["overlap", "--link-gbps", "1", *few],
    }
    for words, arguments in refused.items():
        code, text = command("bench", *arguments)
        assert (code, words in text) == (2, True), text
    return found


def command(*arguments):
    """The exit code of a weft command that this rank joins, and its error output."""
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        try:
            app([str(argument) for argument in arguments], standalone_mode=True)
        except SystemExit as end:
            return end.code or 0, output.getvalue()
    return 0, output.getvalue()
