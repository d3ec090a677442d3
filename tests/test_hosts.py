"""Ranks on several hosts: all operators, what is refused, and what happens when hosts or ranks are lost."""

from __future__ import annotations

import json
import time
from pathlib import Path

import host_ranks
import pytest
from hosts import hosts, needs_hosts

SCRIPT = Path(host_ranks.__file__)
SOON = 5.0  # seconds; survivors take milliseconds, and the machine may be busy
pytestmark = needs_hosts


@pytest.fixture(scope="module")
def two_hosts():
    with hosts(2, gbps=10) as net:
        yield net


def found(folder, part, ranks):
    return [json.loads((folder / f"{part}{rank}").read_text()) for rank in range(ranks)]


def wait_for(net, *files):
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files) and not net.over() and time.monotonic() < deadline:
        time.sleep(0.02)


def assert_told_of_the_death(folder, ranks):
    death = float((folder / "death").read_text())
    for name, words, when in found(folder, "killed", ranks - 1):
        assert name == "PeerLost", words
        assert words.startswith(f"rank {ranks - 1} (pid "), words
        assert "of all_gather_matmul call" in words
        assert when - death < SOON


@pytest.mark.data
def test_two_hosts_of_two_ranks_and_one_that_dies(two_hosts, tmp_path):
    two_hosts.start(SCRIPT, 2, "operators,traffic,killed", tmp_path)
    ended = two_hosts.finish()
    assert (tmp_path / "death").exists(), ended
    assert_told_of_the_death(tmp_path, 4)
    one, _, other, _ = found(tmp_path, "traffic", 4)  # of which two each are of one host
    ratios = {name: (one[name][0] + other[name][0]) / (one[name][1] + other[name][1]) for name in one}
    print(ratios)
    assert all(ratio <= 1.05 for ratio in ratios.values()), ratios


@pytest.mark.data
def test_two_hosts_of_one_rank(two_hosts, tmp_path):
    """Also that a job can begin right after another that lost a rank."""
    two_hosts.run(SCRIPT, 1, "operators,refusals,mismatch", tmp_path)


@pytest.mark.data
def test_a_host_that_is_cut_off(two_hosts, tmp_path):
    two_hosts.start(SCRIPT, 1, "doctor,cut_off,operators", tmp_path)
    wait_for(two_hosts, *(tmp_path / f"running{rank}" for rank in range(2)))
    two_hosts.cut_off(1)
    wait_for(two_hosts, *(tmp_path / f"gave_up{rank}" for rank in range(2)))
    two_hosts.reconnect(1)
    (tmp_path / "reconnected").touch()
    for code, text in two_hosts.finish():
        assert code == 0, text
    printed, _ = found(tmp_path, "doctor", 2)
    assert all(words in printed for words in ("eth0 10.77.0.1", "eth0 10.77.0.2", "0 - 1", "Gbit/s")), printed
    for name, words, seconds in found(tmp_path, "cut_off", 2):
        assert name == "PeerTimeout", words
        assert "of all_gather_matmul call" in words
        assert seconds < host_ranks.LIMIT + SOON


@pytest.mark.data
def test_three_hosts_and_one_that_leaves_and_one_that_dies(tmp_path):
    with hosts(3) as net:
        net.start(SCRIPT, 1, "operators,leaves,killed", tmp_path)
        ended = net.finish()
    assert (tmp_path / "death").exists(), ended
    assert_told_of_the_death(tmp_path, 3)
