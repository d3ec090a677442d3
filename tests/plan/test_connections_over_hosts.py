"""The ranks on other hosts with which a rank exchanges messages, as each needs a connection."""

from __future__ import annotations

import pytest
from support.over_hosts import FUSED, PLAIN

from weft.plan.messages import incoming, is_channel, lower_to_messages, target
from weft.schedules.barrier import barrier
from weft.schedules.levels import nested

OF_ALL_PAIRS = {"all_to_all", "all_to_all of few", "all_reduce of few"}
NOT_FOR_HOSTS = {"all_reduce of adjacent ranks"}
BY_RAILS = sorted((FUSED | PLAIN).keys() - OF_ALL_PAIRS - NOT_FOR_HOSTS)


def connected(name, hosts):
    """The ranks elsewhere with which each rank exchanges messages."""
    lowered = lower_to_messages((FUSED | PLAIN)[name](hosts, 1), hosts)
    sent = [{target(lane)[1] for lane in filter(is_channel, lanes)} for lanes in lowered.lanes]
    got = [{sender for sender, _ in incoming(lowered, rank)} for rank in range(len(hosts))]
    return [one | other for one, other in zip(sent, got, strict=True)]


@pytest.mark.parametrize("name", BY_RAILS)
@pytest.mark.parametrize("each", [1, 2, 4])
def test_a_rank_needs_one_connection_to_each_other_host(name, each):
    """To the rank of its place, however many ranks a host has."""
    hosts = tuple(host for host in range(4) for _ in range(each))
    for rank, peers in enumerate(connected(name, hosts)):
        assert peers <= {(rank + at * each) % len(hosts) for at in range(1, 4)}, rank


@pytest.mark.parametrize("name", sorted(OF_ALL_PAIRS))
def test_rows_for_each_rank_need_a_connection_to_each(name):
    hosts = (0, 0, 1, 1, 2, 2)
    for rank, peers in enumerate(connected(name, hosts)):
        assert peers == {peer for peer, host in enumerate(hosts) if host != hosts[rank]}


def test_a_barrier_of_a_thousand_ranks_needs_no_other_connections():
    """Only ranks of the same place are connected: so to at most one of each other host."""
    hosts = tuple(host for host in range(64) for _ in range(16))
    plan = barrier(nested(len(hosts), (hosts, (0,) * len(hosts))))
    for rank, lanes in enumerate(lower_to_messages(plan, hosts).lanes):
        peers = {target(lane)[1] for lane in filter(is_channel, lanes)}
        assert {peer % 16 for peer in peers} <= {rank % 16}
        assert len(peers) <= 63
