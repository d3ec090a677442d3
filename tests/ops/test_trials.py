"""The first calls of a class of sizes measure ways to carry them out, with the same bits whichever
way is taken.
"""

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.ranks import on_ranks

import weft
from weft.ops.call import Decision
from weft.ops.trials import CALLS, Trial
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Variant, Workload


def settled(world):
    return [choice for choice in world.choices.values() if isinstance(choice, Decision)]


def first_calls(world, operator, link):
    """The algorithms that the calls of a class take until one stays, that one, and what is said of
    it.
    """
    if link:
        world.emulate_link(0.2, 5.0)
    a, b, taken = torch.randn(400, 64), torch.randn(64, 32), []
    seen, call = weft.ops.fused.decide, getattr(weft, operator)

    def decide(call):
        decision = seen(call)
        taken.append(decision.variant)
        return decision

    weft.ops.fused.decide = decide
    while not settled(world):
        call(a, b)
        assert len(taken) <= CALLS
    weft.ops.fused.decide = seen
    (choice,) = settled(world)
    return taken, choice.variant, weft.explain(a, b, operator=operator)


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("operator", sorted(OPERATORS))
def test_the_first_calls_take_turns_until_one_way_stays(operator, link):
    (taken, way, said), *others = on_ranks(first_calls, 2, operator, link)
    ways = {*taken}
    assert len(ways) > 1
    assert {way.algorithm for way in ways} <= {
        *OPERATORS[operator].auto_candidates,
        *OPERATORS[operator].auto_candidates_over_links,
        "push",
        "one_shot",
    }
    assert way in ways
    assert f"ranks: {way}, at most " in said
    assert "it was the fastest in the first calls of its class" in said
    assert said.count(" ms  ") == len(ways)
    for other in others:
        assert other[:2] == (taken, way), "all ranks take the same way in the same call"


def nothing_to_try(world):
    b = torch.randn(64, 32)
    for rows, dtype in ((8, torch.float32), (400, torch.float64)):
        weft.all_gather_matmul(torch.randn(rows, 64, dtype=dtype), b.to(dtype))
    weft.all_gather_matmul(torch.randn(400, 64), b, algorithm="pull")
    assert all(isinstance(choice, Decision) for choice in world.choices.values())
    weft.all_gather_matmul(torch.randn(300, 64), b)
    (trial,) = (choice for choice in world.choices.values() if isinstance(choice, Trial))
    weft.all_gather_matmul(torch.randn(300 if world.rank else 1, 64), b, shard_rows=[1, 300])
    assert len(trial.calls) == 1, (
        "a product of one row may have other bits, so it goes the usual way"
    )


def quick_links(world):
    """What a link passes at once is multiplied at once; pieces are tried only where they may be
    worth it.
    """
    a, b = torch.randn(512, 256), torch.randn(256, 32)  # half a MiB
    found = []
    for gbps in (100.0, 16.0, 1.0):  # 42 us, 0.26 ms and 4.2 ms
        world.emulate_link(gbps)
        usual = weft.explain(a, b).splitlines()[0]
        weft.all_gather_matmul(a, b)
        found.append(
            (usual.split(": ")[1].split(",")[0], type(world.choices[[*world.choices][-1]]))
        )
    return found


def test_what_passes_a_link_at_once_is_not_cut():
    for found in on_ranks(quick_links, 2):
        assert found == [("sequential", Decision), ("sequential", Trial), ("push", Trial)]


def test_ways_that_differ_are_not_mixed():
    on_ranks(nothing_to_try, 2)


class _Call:
    """A call as a trial sees it."""

    def __init__(self, rows, hosts):
        self.world = SimpleNamespace(hosts=hosts)
        self.workload, self.operator = (
            Workload("all_gather_matmul", (rows, rows), 8, 8, "float32", "float32"),
            OPERATORS["all_gather_matmul"],
        )


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
@pytest.mark.parametrize(
    ("times", "wanted", "calls"),
    [
        ({"direct": 100, "sequential": 90, "push": 95}, "sequential", 12),
        (
            {"direct": 100, "sequential": 80, "push": 120},
            "sequential",
            6,
        ),  # what is clearly slower is tried twice
        (
            {"direct": 100, "sequential": 99, "push": 140},
            "direct",
            12,
        ),  # not worth leaving the usual way
        (
            {"direct": 100, "sequential": 90, "push": 500},
            "sequential",
            11,
        ),  # what is hopeless is tried once
        ({"direct": 100, "sequential": 200, "push": 500}, "direct", 3),
    ],
)
def test_the_fastest_stays(times, wanted, calls, hosts):
    trial, draw, made, choice = (
        Trial([Decision(Variant(name), "") for name in times]),
        random.Random(0),
        0,
        None,
    )
    while choice is None:
        call, now = _Call(draw.choice((300, 350, 384)), hosts), draw.randrange(1 << 40)
        decision = trial.of(call)
        assert trial.includes(call)
        took = round(1e4 * times[decision.algorithm] * sum(call.workload.rows))
        made += 1
        if trial.took(call, now, now + took):
            early, other = (
                trial.said(),
                10**12 * hosts[1],
            )  # by how much another host's clock is ahead
            for at in range(0, len(early), 3):  # who came early only waited
                early[at : at + 2] = early[at] - 9 * took + other, early[at + 1] + other
            choice = trial.heard(call, torch.tensor([trial.said(), early]))
    assert (choice.algorithm, made) == (wanted, calls)


def bits(world, seed):
    """All ways give the same bits for random sizes and dtypes."""
    draw, same = random.Random(seed), torch.Generator().manual_seed(seed + world.rank)
    for _ in range(6):
        rows, k, n = draw.randrange(32, 600), draw.randrange(1, 300), draw.randrange(1, 200)
        dtype, packed = draw.choice((torch.float32, torch.bfloat16)), draw.random() < 0.5
        for operator in OPERATORS.values():
            given = rows * world.ranks if operator.name == "matmul_reduce_scatter" else rows
            a = torch.randn(given, k, generator=same).to(dtype)
            b = torch.randn(k, n, generator=same).to(dtype)
            b = weft.pack(b) if packed else b
            results = {
                name: getattr(weft, operator.name)(a, b, algorithm=name, chunk_rows=64)
                for name in operator.algorithms
            }
            wanted = results["sequential"]
            for name, result in results.items():
                assert torch.equal(result, wanted), (operator.name, name, rows, k, n, dtype, packed)


def test_every_way_gives_the_same_bits():
    on_ranks(bits, 2, 5)


def learned(world, directory):
    os.environ["WEFT_CACHE"] = directory
    a, b = torch.randn(400, 64), torch.randn(64, 32)
    while not settled(world):
        weft.all_gather_matmul(a, b)
    if world.rank == 0:  # which has learned it
        weft.predict.tuned._keep()
    weft.barrier()
    found = weft.explain(a, b)
    world.choices.clear()
    weft.all_gather_matmul(a, b)
    assert len(settled(world)) == 1, "what was measured before is not tried again"
    return settled(world)[0].algorithm, found


def test_what_was_measured_is_remembered(tmp_path):
    ((chosen, _), *_) = on_ranks(learned, 2, str(tmp_path))
    (stored,) = [json.loads(path.read_text()) for path in Path(tmp_path).glob("tuned-*.json")]
    assert [variant["algorithm"] for variant in stored.values()] == [chosen]
