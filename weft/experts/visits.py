"""Token dispatch to the ranks, or hosts, of the chosen experts, and the combine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

import weft._native as _native
from weft.checks import name
from weft.experts.weights import Experts
from weft.ops.arguments import check_experts_of_ranks
from weft.ops.dims import adjacent
from weft.schedules.peers import Hosts
from weft.world import World


class Visits(NamedTuple):
    """The rows of a rank's tokens: their number for each part, which is a rank or a host, the token
    of each row, ordered by part, and the rows of each token (tokens, top), followed by -1. `hosts`
    has the host of each part.
    """

    counts: list[int]
    tokens: Tensor
    places: Tensor
    hosts: Sequence[int]


def check_sizes(sizes: Sequence[int], experts: Experts, world: World) -> tuple[int, ...]:
    """The numbers of experts of all ranks. Raises `ValueError` or `TypeError` unless those of this
    rank are `experts`.
    """
    found = check_experts_of_ranks(sizes, world)
    first, own = sum(found[: world.rank]), found[world.rank]
    if (experts.first, experts.shape.number) != (first, own):
        raise ValueError(
            f"experts_of_ranks {[*found]} gives rank {world.rank} {own} experts from number "
            f"{first} on; got {experts}"
        )
    return found


def find(chosen: Tensor, sizes: Sequence[int], hosts: Hosts, for_hosts: bool = False) -> Visits:
    """The rows of tokens that chose these experts, of which each rank has so many: for each rank,
    or for each of the `hosts` of ranks.
    """
    chosen = adjacent(chosen)
    places = torch.empty(chosen.shape, dtype=torch.int64, device="cpu")
    tokens = torch.empty(chosen.numel(), 1, dtype=torch.int64, device="cpu")
    parts = [*hosts] if for_hosts else [*range(len(sizes))]
    counts = _native.find_visits(chosen, [*accumulate(sizes)], parts, places, tokens)
    host_of = [*range(len(counts))] if for_hosts else [*hosts]
    return Visits(counts, tokens[: sum(counts)], places, host_of)


def add_up(rows: Tensor, visits: Visits) -> Tensor:
    """Each token's sum of its rows: within each host in the order of the ranks, then over the hosts
    in their order, both in float32 or float64 and rounded to the dtype of the rows.
    """
    out = rows.new_empty(len(visits.places), rows.shape[1])
    dtype = getattr(_native.Dtype, name(rows.dtype))
    ends = [*accumulate(visits.counts)]
    _native.add_up_visits(rows, visits.places, ends, visits.hosts, out, dtype)
    return out
