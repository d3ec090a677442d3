"""Ranks on several hosts: all operators, refusals, and the loss of hosts or ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from support import host_ranks
from support.hosts import AHEAD, hosts, ip, needs_hosts
from support.on_hosts.losses import LIMIT
from support.ucx import by_ucx, by_ucx_slowly, needs_ucx, transports

SCRIPT = Path(host_ranks.__file__)
SOON = 5.0  # seconds; survivors take milliseconds, and the machine may be busy
# seconds by which aligned clocks may differ on a busy machine; the error is less than the time of
# the fastest message
SLACK = 0.1
pytestmark = needs_hosts


@pytest.fixture(scope="module")
def two_hosts():
    with hosts(2, gbps=10) as net:
        yield net


def found(folder, part, ranks):
    return [json.loads((folder / f"{part}{rank}").read_text()) for rank in range(ranks)]


def assert_death_was_reported(folder, ranks):
    death = float((folder / "death").read_text())
    for name, words, when in found(folder, "killed", ranks - 1):
        assert name == "PeerLost", words
        assert words.startswith(f"rank {ranks - 1} (pid "), words
        assert "of all_gather_matmul call" in words
        assert when - death < SOON


@pytest.fixture(scope="module")
def two_by_two(two_hosts, tmp_path_factory):
    """The results of two ranks on each of two hosts, the last of which has died."""
    folder = tmp_path_factory.mktemp("two_by_two")
    two_hosts.start(
        SCRIPT,
        2,
        "operators,calls_at_random,experts_of_hosts,sums_to_the_bit,traces,traffic,killed",
        folder,
    )
    ended = two_hosts.finish()
    assert (folder / "death").exists(), ended
    return folder


@pytest.mark.data
@pytest.mark.slow
def test_two_hosts_of_two_ranks_and_one_that_dies(two_by_two):
    assert (
        found(two_by_two, "calls_at_random", 4)
        == found(two_by_two, "sums_to_the_bit", 4)
        == [None] * 4
    )
    assert_death_was_reported(two_by_two, 4)


@pytest.mark.slow
def test_rows_cross_to_each_host_once(two_by_two):
    """Bytes are counted as they leave a host; ranks 0 and 1 share one."""
    one, _, other, _ = found(two_by_two, "traffic", 4)
    ratios = {
        name: (one[name][0] + other[name][0]) / (one[name][1] + other[name][1]) for name in one
    }
    assert all(ratio <= 1.05 for ratio in ratios.values()), ratios


@pytest.mark.skipif(not AHEAD, reason="hosts share a clock where unshare has no --time")
@pytest.mark.slow
def test_traces_of_several_hosts_are_aligned(two_by_two):
    """No rank leaves a barrier before all have entered it, by the aligned clocks."""
    (barrier, ahead), *_ = found(two_by_two, "traces", 4)
    assert [round(offset / 1e9) for offset in ahead] == [0, 0, AHEAD, AHEAD]
    assert max(start for start, _ in barrier) < min(ended for _, ended in barrier) + 1e9 * SLACK


@pytest.mark.data
@pytest.mark.slow
def test_a_host_that_is_cut_off_and_the_next_job(two_by_two, two_hosts, tmp_path):
    """Immediately after a job that lost a rank, over a slower link."""
    two_hosts.shape(gbps=4)
    two_hosts.start(
        SCRIPT,
        1,
        "doctor,cut_off,operators,sums_to_the_bit,refusals,mismatch,gives_up,benches",
        tmp_path,
    )
    two_hosts.wait_for(tmp_path, "running")
    two_hosts.cut_off(1)
    two_hosts.wait_for(tmp_path, "gave_up")
    two_hosts.reconnect(1)
    (tmp_path / "reconnected").touch()
    for code, text in two_hosts.finish():
        assert code == 0, text
    diagnoses, others = found(tmp_path, "doctor", 2)
    assert [well for well, _ in diagnoses] == [well for well, _ in others] == [False] * 3
    firewalled, on_wrong_interface, late = (printed for _, printed in diagnoses)
    assert re.search(
        r"rank 1 on .* cannot connect to rank 0 on .* at 10.77.0.1, port .*: no answer. Is there a "
        r"firewall",
        firewalled,
    )
    assert "rank 1 on" in on_wrong_interface
    assert (
        "GLOO_SOCKET_IFNAME=eth7 is not an interface with an address; set it to one that the "
        "other hosts can reach: eth0 10.77.0.2" in (on_wrong_interface)
    )
    assert all(
        words in late
        for words in ("eth0 10.77.0.1", "eth0 10.77.0.2", "(rank 1) is 90.0 s ahead of that of")
    ), late
    gbps = float(re.search(r"0 - 1 *│ *([0-9.]+)", late)[1])
    assert 0 < gbps < 1.02 * 4, late  # nothing but a burst is faster, 1.5% of the bytes
    [kind, text_of_peer], own = found(tmp_path, "gives_up", 2)
    assert (kind, text_of_peer) == (
        "PeerLost",
        "rank 1 gave up while rank 0 waited for its address: no address",
    )
    assert own == ["WeftError", "no address"]
    measured, _ = found(tmp_path, "benches", 2)
    assert all(
        (result["ranks"], result["hosts"], result["verified"]) == (2, 2, True)
        for result in measured
    )
    cut_off = found(tmp_path, "cut_off", 2)
    assert cut_off[0][3] == [[0], 1.0]
    assert "ranks [0] do not answer, and may be alive" in cut_off[1][3]
    for name, words, seconds, _ in cut_off:
        assert name == "PeerTimeout", words
        assert "of all_gather_matmul call" in words
        assert seconds < LIMIT + SOON


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nft"), reason="a firewall needs nftables (nft)")
@pytest.mark.parametrize("heals", [False, True], ids=["stays", "heals"])
@pytest.mark.parametrize(
    "how", ["reject with tcp reset", "reject with icmp type port-unreachable", "drop"]
)
def test_a_firewall_that_begins_in_the_midst_of_a_job(two_hosts, tmp_path, how, heals):
    """One world at most continues: that of rank 0, or that of all once the firewall is gone."""
    if heals:
        (tmp_path / "heals").touch()
    two_hosts.start(SCRIPT, 1, "behind_a_firewall", tmp_path)
    try:
        two_hosts.wait_for(tmp_path, "running")
        two_hosts.refuse(how)
        two_hosts.wait_for(tmp_path, "lost")
        if heals:
            two_hosts.allow()
        ended = two_hosts.finish()
    finally:
        if not heals:
            two_hosts.allow()
    (lost, *first), (_, *second) = found(tmp_path, "behind_a_firewall", 2)
    assert lost in ("PeerLost", "PeerTimeout"), ended
    if heals:
        assert first == second == [[0, 1], 2.0]
    else:
        assert first == [[0], 1.0]
        assert second[0] == "PeerTimeout"
        assert "ranks [0] do not answer, and may be alive" in second[1]


@pytest.mark.slow
@transports
def test_a_peer_that_is_lost_in_the_middle_of_a_message(two_hosts, tmp_path, environment):
    """Half of one message has arrived, and half of another one is sent: the threads that wait for
    the rest end.
    """
    two_hosts.start_forked("halfway", tmp_path, environment=environment)
    ended = two_hosts.finish()
    assert (tmp_path / "halfway0").exists(), ended
    [parts] = found(tmp_path, "halfway", 1)
    for (name, words), kept, how in zip(
        parts[::2], parts[1::2], ("closed its world", "KeyError", "died"), strict=True
    ):
        assert name == "PeerLost", words
        assert re.match(rf"rank 1 \(pid .*{how}", words), words
        assert kept == [], kept


@pytest.mark.data
@pytest.mark.slow
@transports
def test_calls_of_many_shapes(two_hosts, tmp_path, environment):
    two_hosts.start_forked("many_shapes", tmp_path, environment=environment)
    [(code, text)] = two_hosts.finish()
    assert code == 0, text
    assert found(tmp_path, "many_shapes", 2) == [None] * 2


@pytest.mark.data
@pytest.mark.slow
def test_mpiexec_starts_ranks_on_two_hosts(two_hosts, tmp_path):
    mpiexec = shutil.which(
        "mpiexec.hydra", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    if not mpiexec:
        pytest.skip("there is no mpiexec.hydra, which comes with the package mpich")
    two_hosts.start_by_mpi(mpiexec, tmp_path, SCRIPT, "operators", tmp_path)
    [(code, text)] = two_hosts.finish()
    assert code == 0, text
    assert found(tmp_path, "operators", 2) == [None] * 2


@pytest.mark.data
@by_ucx_slowly
def test_three_hosts_and_one_that_leaves_and_one_that_dies(tmp_path, environment):
    with hosts(3, gbps=1, environment=environment) as net:
        net.start_forked("operators,sums_to_the_bit,leaves,killed", tmp_path)
        ended = net.finish()
    assert (tmp_path / "death").exists(), ended
    assert_death_was_reported(tmp_path, 3)


@pytest.mark.data
@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="the kernel has no IPv6")
def test_two_hosts_with_ipv6_alone_and_the_smallest_packets(tmp_path):
    with hosts(2, environment={"FIRST_HOST": "fd77::1"}) as net:
        for host, name in enumerate(net.names):
            ip("-n", name, "-4", "address", "flush", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "mtu", "1280")  # the least that IPv6 allows
            ip("-n", name, "address", "add", f"fd77::{host + 1}/64", "dev", "eth0", "nodad")
        net.start_forked("operators,sums_to_the_bit,killed", tmp_path)
        ended = net.finish()
    assert (tmp_path / "death").exists(), ended
    assert found(tmp_path, "sums_to_the_bit", 2) == [None] * 2
    assert_death_was_reported(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.1.1", "10.99.0.1", None])
def test_two_hosts_whose_name_has_no_address_that_others_reach(tmp_path, address):
    """A loopback address, as Debian gives it, one of no host, or none."""
    with hosts(2, environment={"GLOO_SOCKET_IFNAME": ""}) as net:
        for name in net.names:
            net.name_itself(name, address)
        net.start(SCRIPT, 1, "sums_to_the_bit", tmp_path)
        ended = net.finish()
    assert [code for code, _ in ended] == [0, 0]
    assert found(tmp_path, "sums_to_the_bit", 2) == [None] * 2


@pytest.mark.data
@needs_ucx
@pytest.mark.slow
def test_two_hosts_of_two_ranks_by_ucx_and_one_that_dies(tmp_path):
    with hosts(2, gbps=4, environment=by_ucx("eth0")) as net:
        checks = "operators,calls_at_random,experts_of_hosts,sums_to_the_bit,one_sided,killed"
        net.start(SCRIPT, 2, checks, tmp_path)
        ended = net.finish()
    assert (tmp_path / "death").exists(), ended
    assert found(tmp_path, "sums_to_the_bit", 4) == [None] * 4
    assert_death_was_reported(tmp_path, 4)


@pytest.mark.slow
@needs_ucx
def test_two_hosts_by_ucx_that_make_other_calls_and_one_that_is_cut_off(tmp_path):
    with hosts(2, gbps=10, environment=by_ucx("eth0")) as net:
        net.start_forked(
            "doctor_by_ucx,has_a_child,transports_differ,mismatch,refusals,cut_off", tmp_path
        )
        net.wait_for(tmp_path, "running")
        net.cut_off(1)
        net.wait_for(tmp_path, "gave_up")
        net.reconnect(1)
        (tmp_path / "reconnected").touch()
        [(code, text)] = net.finish()
    assert code == 0, text
    for name, words in found(tmp_path, "transports_differ", 2):
        assert name == "WeftError", words
        assert "WEFT_TRANSPORT is ucx on ranks [0], but not on ranks [1]" in words
    printed, _ = found(tmp_path, "doctor_by_ucx", 2)
    assert re.search(r"Rows go to other hosts by UCX 1\.\d+\.\d+, which has tcp/eth0 \(", printed)
    for name, words, seconds, _ in found(tmp_path, "cut_off", 2):
        assert name == "PeerTimeout", words
        assert seconds < LIMIT + SOON


@pytest.mark.data
@needs_ucx
def test_a_full_socket_of_ucx_does_not_keep_a_world_open(tmp_path):
    """UCX would wait for room in it until the kernel gives the connection up."""
    environment = by_ucx("eth0") | {"UCX_TCP_SNDBUF": "2k"}
    with hosts(2, environment=environment) as net:
        net.start_forked("full_socket", tmp_path)
        net.wait_for(tmp_path, "running")
        net.cut_off(1)
        (tmp_path / "cut").touch()
        [(code, text)] = net.finish(30)
    assert code == 0, text
    for name, words, seconds in found(tmp_path, "full_socket", 2):
        assert name == "PeerTimeout", words
        assert seconds < LIMIT + SOON
