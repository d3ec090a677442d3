"""Ranks on two hosts exchange rows over another medium: a `Transport` is all that it needs."""

import pytest
import torch
from support.loopback import RANKS, each_rank, two_worlds

import weft
from weft.errors import PeerLost


@pytest.fixture
def worlds():
    with two_worlds() as made:
        yield made


def test_rows_go_by_the_transport(worlds):
    torch.manual_seed(0)
    inputs = [torch.randn(5, 7) for _ in range(RANKS)]

    def exchange(rank):
        own, world = inputs[rank], worlds[rank]
        gathered = [weft.all_gather(own, world=world) for _ in range(3)]
        return *gathered, weft.all_reduce(own, world=world)

    for *gathered, total in each_rank(exchange):
        for rows in gathered:
            torch.testing.assert_close(rows, torch.cat(inputs), rtol=0, atol=0)
        torch.testing.assert_close(total, inputs[0] + inputs[1], rtol=0, atol=0)
    for world in worlds:
        assert world.relay.transport.sent >= 4 * inputs[0].nbytes


def test_a_failure_reaches_a_peer_over_any_transport(worlds):
    worlds[1].fail(RuntimeError("broken"))
    with pytest.raises(PeerLost, match=r"rank 1 .* failed with RuntimeError: broken"):
        weft.all_gather(torch.ones(2, 2), world=worlds[0])
