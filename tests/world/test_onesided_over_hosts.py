"""One-sided calls between real hosts: all that they do on one host, and a peer that dies."""

import json
import re
from pathlib import Path

import pytest
from support import host_ranks
from support.hosts import hosts, needs_hosts
from support.ucx import by_ucx, needs_ucx

pytestmark = needs_hosts


def found(folder, part, ranks):
    return [json.loads((folder / f"{part}{rank}").read_text()) for rank in range(ranks)]


def assert_all_lost(folder, ranks):
    """A call in progress names the dead rank; one that begins later finds the world closed."""
    closed = r"this world is closed: PeerLost: "
    for calls in found(folder, "dies_while_called", ranks):
        for name, words in calls:
            late = "" if name == "PeerLost" else closed
            assert re.match(rf"{late}rank {ranks} \(pid \d+\) died while rank", words), words
        assert "PeerLost" in [name for name, _ in calls]


@pytest.mark.data
@pytest.mark.slow
def test_two_hosts_and_a_peer_that_dies_while_called(tmp_path):
    with hosts(2, gbps=10) as net:
        net.start_forked("one_sided,dies_while_called", tmp_path)
        ended = net.finish()
    assert (tmp_path / "dies_while_called0").exists(), ended
    assert found(tmp_path, "one_sided", 2) == [None] * 2
    assert_all_lost(tmp_path, 1)


@pytest.mark.data
@pytest.mark.slow
def test_two_hosts_of_two_ranks(tmp_path):
    with hosts(2, gbps=10) as net:
        net.start(Path(host_ranks.__file__), 2, "one_sided,dies_while_called", tmp_path)
        ended = net.finish()
    assert (tmp_path / "dies_while_called0").exists(), ended
    assert found(tmp_path, "one_sided", 4) == [None] * 4
    assert_all_lost(tmp_path, 3)


@needs_ucx
@pytest.mark.slow
def test_two_hosts_by_ucx_and_a_peer_that_dies_while_called(tmp_path):
    with hosts(2, gbps=10, environment=by_ucx("eth0")) as net:
        net.start_forked("one_sided,dies_while_called", tmp_path)
        ended = net.finish()
    assert (tmp_path / "dies_while_called0").exists(), ended
    assert found(tmp_path, "one_sided", 2) == [None] * 2
    assert_all_lost(tmp_path, 1)
