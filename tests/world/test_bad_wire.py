"""Ranks on hosts whose network is bad: lost, late and reordered packets, a cut wire, no power."""

from __future__ import annotations

import json
import time

import pytest
from support.bad_wire import needs_wire, wired_hosts
from support.ucx import by_ucx_slowly, transports

pytestmark = needs_wire


def results(folder, name, ranks):
    return [json.loads((folder / f"{name}{rank}").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("loss", "delay", "jitter"),
    [
        pytest.param(0.01, 0.001, 0.001, id="short"),
        pytest.param(0.01, 0.020, 0.005, id="long", marks=pytest.mark.slow),
    ],
)
@by_ucx_slowly
def test_packets_are_lost_late_and_in_another_order(tmp_path, loss, delay, jitter, environment):
    with wired_hosts(2, loss, delay, jitter, environment) as net:
        net.start_forked("few_calls", tmp_path)
        [(code, text)] = net.finish()
    assert code == 0, text


@pytest.mark.slow
@transports
def test_a_wire_that_is_cut_for_three_seconds(tmp_path, environment):
    with wired_hosts(2, delay=0.0005, environment=environment) as net:
        net.start_forked("goes_on", tmp_path)
        net.wait_for(tmp_path, "calling")
        net.cut_off(1)
        time.sleep(3)
        net.reconnect(1)
        (tmp_path / "whole").touch()
        [(code, text)] = net.finish()
    assert code == 0, text
    one, other = results(tmp_path, "goes_on", 2)
    assert one == other > 1


@pytest.mark.slow
@transports
def test_a_host_without_power_is_named(tmp_path, environment):
    """Its process ends while its wire is cut: neither end nor reset of a connection arrives."""
    with wired_hosts(2, delay=0.0005, environment=environment) as net:
        net.start_forked("cut_for_ever", tmp_path)
        net.wait_for(tmp_path, "calling")
        net.cut_off(1)
        (tmp_path / "cut").touch()
        net.finish()
    name, text, late, _ = json.loads((tmp_path / "cut_for_ever0").read_text())
    assert name == "PeerTimeout", text
    assert "rank 1 (pid " in text
    assert "is its host, 10.77.0.2, or the network down?" in text
    assert late < 5
