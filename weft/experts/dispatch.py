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


class Dispatch(NamedTuple):
    """The rows that a rank dispatches. `counts` are the numbers of rows for each destination, a
    rank or a host; `tokens` has the token of each row, ordered by destination; `places` the rows of
    each token (tokens, top), padded with -1; `hosts` the host of each destination.
    """

    counts: list[int]
    tokens: Tensor
    places: Tensor
    hosts: Sequence[int]


def check_sizes(sizes: Sequence[int], experts: Experts, world: World) -> tuple[int, ...]:
    """The number of experts of every rank. Raises `ValueError` or `TypeError` unless this rank's
    match `experts`.
    """
    found = check_experts_of_ranks(sizes, world)
    first, own = sum(found[: world.rank]), found[world.rank]
    if (experts.first, experts.shape.number) != (first, own):
        raise ValueError(
            f"experts_of_ranks {[*found]} gives rank {world.rank} {own} experts from number "
            f"{first} on; got {experts}"
        )
    return found


def find(chosen: Tensor, sizes: Sequence[int], hosts: Hosts, for_hosts: bool = False) -> Dispatch:
    """The dispatch of tokens to their experts, of which each rank has `sizes`: to ranks, or to
    hosts.
    """
    chosen = adjacent(chosen)
    places = torch.empty(chosen.shape, dtype=torch.int64, device="cpu")
    tokens = torch.empty(chosen.numel(), 1, dtype=torch.int64, device="cpu")
    parts = [*hosts] if for_hosts else [*range(len(sizes))]
    counts = _native.find_visits(chosen, [*accumulate(sizes)], parts, places, tokens)
    host_of = [*range(len(counts))] if for_hosts else [*hosts]
    return Dispatch(counts, tokens[: sum(counts)], places, host_of)


def combine(rows: Tensor, dispatch: Dispatch) -> Tensor:
    """Each token's sum of its rows: within each host in the order of the ranks, then over the hosts
    in their order, both in float32 or float64 and rounded to the dtype of the rows.
    """
    out = rows.new_empty(len(dispatch.places), rows.shape[1])
    dtype = getattr(_native.Dtype, name(rows.dtype))
    ends = [*accumulate(dispatch.counts)]
    _native.add_up_visits(rows, dispatch.places, ends, dispatch.hosts, out, dtype)
    return out
