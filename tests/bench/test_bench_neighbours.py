"""Busy neighbours of a benchmark: they run while it measures, and end with it however it ends. No
test asserts a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.pairs import pairs
from support.ranks import on_ranks
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft.errors import WeftError
from weft_tools.bench import neighbours as module
from weft_tools.bench.neighbours import neighbours

START = """
import os, sys, time, weft
from weft_tools.bench.neighbours import neighbours

def rank():
    with weft.init() as world, neighbours(world, 2) as started:
        print(os.getpid(), *started, flush=True)
        time.sleep(1000)

if __name__ == "__main__":
    weft.launch(rank, 1) if "launched" in sys.argv else rank()
"""


def running(pid):
    """Whether this process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def started(world):
    with neighbours(world, 2) as own:
        during = [(running(pid), os.sched_getaffinity(pid)) for pid in own]
    return during, [running(pid) for pid in own], frozenset().union(*world.cores)


def test_one_rank_starts_them_on_the_cores_of_all():
    (during, after, cores), (others, _, _) = on_ranks(started, 2)
    assert during == [(True, cores)] * 2
    assert after == [False, False]
    assert others == [], "one set for a host"


def test_an_exception_ends_them():
    with weft.init() as world, pytest.raises(KeyboardInterrupt), neighbours(world, 1) as pids:
        raise KeyboardInterrupt
    assert not running(*pids)


@pairs(
    ("started_by", "number"),
    ("itself", "launched"),
    (signal.SIGINT, signal.SIGTERM, signal.SIGKILL),
    [("itself", signal.SIGINT), ("itself", signal.SIGTERM), ("launched", signal.SIGKILL)],
)
@pytest.mark.slow
def test_the_death_of_the_bench_ends_them(number, started_by, tmp_path):
    """Of the only rank, or of the process that launched it."""
    script = tmp_path / "bench.py"
    script.write_text(START)
    with subprocess.Popen(
        [sys.executable, script, started_by],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as bench:
        rank, *pids = map(int, bench.stdout.readline().split())
        alive = [os.pidfd_open(pid) for pid in pids]
        bench.send_signal(number)
        ended = [bool(select.select([each], [], [], 60)[0]) for each in alive]
        bench.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)  # it outlives a launcher that was killed
    for each in alive:
        os.close(each)
    assert ended == [True, True]


def test_one_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setattr(module, "_BUSY", "raise SystemExit(3)")
    with (
        weft.init() as world,
        pytest.raises(WeftError, match="did not start"),
        neighbours(world, 1),
    ):
        pass


def of_rows(result):
    return [row["time_us"] for row in result["rows"]]


def of_views(result):
    return [*result["times_ms"].values(), *result["baselines_ms"].values()]


@pytest.mark.data
@pytest.mark.parametrize(
    ("command", "count", "times"),
    [
        pytest.param(["all-reduce", "--sizes", "8"], 0, of_rows, marks=pytest.mark.slow),
        pytest.param(["all-reduce", "--sizes", "8"], 1, of_rows, marks=pytest.mark.slow),
        (["all-gather-matmul", "--shape", "64x64x32"], 1, of_views),
    ],
)
def test_results_have_them_and_percentiles(command, count, times, tmp_path):
    file = tmp_path / "result.json"
    few = ["--warmup", "1", "--iterations", "2", "--threads", "1", "--neighbours", str(count)]
    done = CliRunner().invoke(app, ["bench", *command, *few, "--json", str(file)])
    assert done.exit_code == 0, done.stderr
    assert ("beside 1 busy process" in done.stdout) == bool(count)
    assert "p99" in done.stdout
    result = json.loads(file.read_text())
    assert result["verified"]
    assert result["neighbours"] == count
    assert all(0 < time["min"] <= time["median"] <= time["p99"] for time in times(result))
    assert all(row["calls"] == 1 for row in result.get("rows", [])), "each call is timed by itself"
