"""Ring attention as a plan of one's own: proved, executed by every engine, and compared with torch
and, bit by bit, with the reference interpreter.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import pytest
import torch
from support.attention import Attend, ring_attention
from support.ranks import on_ranks, reference_world, stream_world
from torch.nn.functional import scaled_dot_product_attention

import weft
from weft.engines import engine, reference
from weft.plan.binding import bind
from weft.plan.proof import accepts
from weft.schedules.workload import Rows
from weft_tools.laboratory.mutants import deleted, repeated
from weft_tools.laboratory.mutation import score
from weft_tools.predict.machine import load
from weft_tools.predict.simulator import simulate

HEADS, WIDE = 2, 8
ATTEND = Attend(HEADS, WIDE**-0.5)
QUERIES, KEYS = (3, 1, 0, 4), (2, 0, 5, 3)
BLOCKS = {"rows that differ": None, "blocks": (5, 7), "empty blocks": (3, 1)}
"""Plans: over rows, with other numbers on each rank, or over blocks, with these on all ranks."""


def planned(ranks, rows):
    """The plan, the rows of its shards, and those of queries and keys on each rank."""
    if rows is None:
        queries, keys = QUERIES[:ranks], KEYS[:ranks]
        return ring_attention(queries, keys, ATTEND), (), queries, keys
    plan = ring_attention([2] * ranks, [2] * ranks, ATTEND, over_blocks=True)
    return plan, rows, [rows[0]] * ranks, [rows[1]] * ranks


def contents(queries, keys, dtype, seed):
    """The inputs of each rank."""
    numbers = torch.Generator().manual_seed(seed)

    def matrix(rows):
        return torch.randn(rows, HEADS * WIDE, generator=numbers).to(dtype)

    return [
        {"queries": matrix(q), "keys": matrix(k), "values": matrix(k)}
        for q, k in zip(queries, keys, strict=True)
    ]


def attention(inputs):
    """Attention of each rank's queries to the keys and values of all ranks, by torch."""
    keys, values = (by_head(torch.cat([i[name] for i in inputs])) for name in ("keys", "values"))
    return [
        scaled_dot_product_attention(by_head(i["queries"]), keys, values).transpose(0, 1).flatten(1)
        for i in inputs
    ]


def by_head(rows):
    return rows.float().unflatten(1, (HEADS, WIDE)).transpose(0, 1)


def attend(ranks, rows, dtype, world=None):
    """This rank's part, twice; the results have the bits of the reference, and are torch's."""
    world = world or weft.init()
    plan, shards, queries, keys = planned(ranks, rows)
    for seed in range(2):
        inputs = contents(queries, keys, dtype, seed)
        own = queries[world.rank]
        state, out = torch.empty(own, HEADS * (WIDE + 2)), torch.empty(own, HEADS * WIDE)
        tensors = {**inputs[world.rank], "state": state, "out": out.to(dtype)}
        engine(world).execute(plan, tensors, rows=shards)
        call = reference.Call(bind(plan, shards), inputs, dtypes={"out": dtype})
        wanted = reference.run(call)[0][world.rank]
        assert torch.equal(tensors["state"], wanted["state"])
        assert torch.equal(tensors["out"], wanted["out"])
        torch.testing.assert_close(tensors["out"], attention(inputs)[world.rank].to(dtype))


def on_a_rank(world, rows, dtype):
    attend(world.ranks, rows, dtype, world)


@pytest.mark.data
@pytest.mark.parametrize("rows", BLOCKS.values(), ids=[*BLOCKS])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ring_attention_on_ranks(ranks, rows):
    on_ranks(on_a_rank, ranks, rows, torch.float32)


@pytest.mark.data
def test_ring_attention_of_half_precision_accumulates_in_float32():
    on_ranks(on_a_rank, 3, (5, 7), torch.bfloat16)


@pytest.mark.data
@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1), (0, 1, 0, 1)], ids=str)
@pytest.mark.parametrize("rows", BLOCKS.values(), ids=[*BLOCKS])
def test_ring_attention_over_two_hosts(hosts, rows):
    with weft.local_world(len(hosts), timeout=20, hosts=hosts) as local:
        local.run(partial(attend, len(hosts), rows, torch.float32))


@pytest.mark.data
@pytest.mark.parametrize("rows", BLOCKS.values(), ids=[*BLOCKS])
@pytest.mark.parametrize("context", [stream_world, reference_world])
def test_ring_attention_by_other_engines(context, rows):
    on_ranks(on_a_rank, 3, rows, torch.float32, context=context)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_ring_attention_is_proved_for_every_size(ranks):
    plan, *_ = planned(ranks, (1, 1))
    weft.verify(plan)
    weft.verify(plan, hosts=[rank % 2 for rank in range(ranks)])
    for rows in ((5, 7), (0, 3), (3, 0), (1, 1)):
        weft.verify(bind(plan, rows))


def test_ring_attention_is_simulated():
    plan = bind(planned(3, (5, 7))[0], (5, 7))
    rows = defaultdict(lambda: Rows(HEADS * WIDE, "float32"))
    spans = simulate(plan, load("cpu"), rows).spans
    assert sum(span.kind == "attend" for span in spans) == 9
    assert all(span.stop > span.start for span in spans if span.kind in ("attend", "divide"))


@pytest.mark.parametrize("mutation", [deleted, repeated])
def test_every_signal_and_every_accumulation_counts(mutation):
    """On 4 ranks a slot is written again."""
    plan = ring_attention([1] * 4, [1] * 4, ATTEND, over_blocks=True)
    accepted = [change for change, changed in mutation(plan) if accepts(changed)]
    harmless = ("twice wait", "twice notify", "twice copy") if mutation is repeated else ()
    assert [each for each in accepted if not any(some in each for some in harmless)] == []


def test_no_mutant_is_missed():
    """A small scale, so that integers, with which mutants are executed, leave no weight at zero."""
    plan = ring_attention([1] * 2, [1] * 2, Attend(1, 1e-6), over_blocks=True)
    for mutation, found in score(plan, seed=0).items():
        assert not found.missed, mutation
        assert found.rejected > 0, mutation
