"""The log: levels by WEFT_LOG, the rank in every line, nothing per call."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
from io import StringIO

import torch
from support.ranks import group, on_ranks

import weft
from weft import log
from weft.process_group import worlds

CALLS = 40


@contextlib.contextmanager
def logged(level="info"):
    """What the logger of weft prints in this process."""
    os.environ[log.VARIABLE] = level
    with contextlib.redirect_stderr(StringIO()) as printed:
        log.configure()
    yield printed
    del logging.getLogger("weft").handlers[:]


def lines(printed):
    """The rank, level and message of each line."""
    pattern = r"\d\d:\d\d:\d\d\.\d{3} weft rank (\S+) ([A-Z]+): (.*)"
    return [re.fullmatch(pattern, line).groups() for line in printed.getvalue().splitlines()]


def work():
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    for _ in range(CALLS):
        weft.all_gather_matmul(a, b)
        weft.all_reduce(torch.ones(4))


def of_a_job(_):
    with logged() as printed:
        with weft.init(timeout=20):
            work()
        return lines(printed)


def test_a_job_logs_its_worlds_and_selections():
    for rank, found in enumerate(on_ranks(of_a_job, 2, context=contextlib.nullcontext)):
        assert {(who, level) for who, level, _ in found} == {(str(rank), "INFO")}
        first, *selected, last = [text for _, _, text in found]
        assert re.match(rf"made world \w+: rank {rank} of 2, pid \d+ on cores ", first)
        assert re.match(r"closed world \w+ after call \d+", last)
        assert bool(selected) == (rank == 0)  # rank 0 selects for all
        for text in selected:
            assert text.startswith("all_gather_matmul(a=(64, 64) float32) and calls of its class: ")


def of_threads(_):
    with logged("debug") as printed:
        with weft.local_world(2) as local:
            local.run(work)
        return lines(printed)


def test_each_thread_of_a_local_world_has_its_rank():
    [found] = on_ranks(of_threads, 1)
    for rank in "01":
        own = [(level, text.partition(" ")[0]) for who, level, text in found if who == rank]
        assert ("INFO", "made") in own
        assert ("INFO", "closed") in own
        assert ("DEBUG", "compiled") in own
    assert len(found) < CALLS


def of_a_group(_):
    with logged() as printed:
        pair = torch.distributed.new_group([1, 2], backend="weft")
        if torch.distributed.get_rank():
            worlds.find(pair).failure.fail(RuntimeError("a test"))
        torch.distributed.barrier()  # rank 0 serves the store
        return lines(printed)


def test_the_rank_is_that_of_the_job():
    _, one, two = on_ranks(of_a_group, 3, context=group)
    for rank, found in (("1", one), ("2", two)):
        assert {who for who, *_ in found} == {rank}
        assert re.match(r"made world \w+: rank [01] of 2", found[0][2])
        assert re.match(r"world \w+ has failed: RuntimeError: a test", found[1][2])


def imported(value):
    """The process that imports weft with this value of the variable."""
    program = (
        "import logging, weft; log = logging.getLogger('weft'); print(log.handlers, log.level); "
        "weft.PeerLost"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, log.VARIABLE: value},
        capture_output=True,
        text=True,
    )


def test_other_values_are_refused_and_without_one_nothing_is_configured():
    wrong = imported("verbose")
    assert "ValueError: WEFT_LOG is debug, info, warning or error; got 'verbose'" in wrong.stderr
    assert wrong.returncode
    assert imported("").stdout.split() == ["[]", "0"]
    assert imported("warning").stdout.split()[-1] == str(logging.WARNING)
