"""Paths of collectives that are chosen by measuring them."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace

import pytest
import torch
from support.ranks import on_ranks, start

import weft
from weft import cache
from weft.engines import engine
from weft.errors import MismatchError
from weft.ops import granularity, stored
from weft.ops.autotune import Trial
from weft.ops.call import Selection
from weft.ops.collective import class_bytes
from weft.ops.stored import Measured
from weft.schedules.workload import Variant

SIZES = [8 << 10, 64 << 10, 200 << 10, 1 << 20]
CALLS = 48  # more than a trial of three plans takes, with two rounds that do not count


def collectives(world, size, call):
    """Collectives of `size` bytes on fresh data, with their results checked."""
    ranks, rank, numbers = world.ranks, world.rank, size // 4
    mine = torch.arange(numbers, dtype=torch.float32) + 1000 * rank + call
    every = torch.cat([mine - 1000 * rank + 1000 * r for r in range(ranks)])
    assert torch.equal(weft.all_gather(mine), every)
    out = torch.full_like(every, math.nan)
    part = out.view(ranks, -1)[rank].copy_(mine)
    assert torch.equal(weft.all_gather(part, out=out), every), "in place"
    source = call % ranks
    sent = mine.clone()
    assert torch.equal(weft.broadcast(sent, source), every.view(ranks, -1)[source])
    shares = mine[: numbers // ranks * ranks]
    parts = every.view(ranks, -1)[:, : len(shares)].reshape(ranks, ranks, -1)[:, rank]
    assert torch.equal(weft.all_to_all(shares), parts.flatten())


def uneven(world):
    """Calls of uneven parts, whose descriptions differ between ranks."""
    ranks, rank = world.ranks, world.rank
    for call in range(CALLS):
        sizes = [
            [20_000 + 1000 * source + 100 * p for p in range(ranks)] for source in range(ranks)
        ]
        mine = torch.full((sum(sizes[rank]),), float(rank + call))
        theirs = [sizes[source][rank] for source in range(ranks)]
        out = weft.all_to_all(mine, input_split_sizes=sizes[rank], output_split_sizes=theirs)
        parts = [torch.full((size,), float(p + call)) for p, size in enumerate(theirs)]
        assert torch.equal(out, torch.cat(parts))
        shards = [30_000 + 1000 * r for r in range(ranks)]
        parts = [torch.full((size,), float(r + call)) for r, size in enumerate(shards)]
        assert torch.equal(weft.all_gather(parts[rank], shard_rows=shards), torch.cat(parts))


@pytest.mark.parametrize("ranks", [2, 3])
def test_calls_of_uneven_parts(ranks):
    on_ranks(uneven, ranks)


def selected(world):
    """The selected algorithms by operator and bytes."""
    return {
        (key.workload.operator, key.workload.rows[0]): selection.variant.algorithm
        for key, selection in engine(world).selections.items()
        if isinstance(selection, Selection)
    }


def repeated(world):
    """Calls on the same tensors, most of them from the call cache, on other layouts on each rank,
    until their class is measured again, twice.
    """
    numbers = SIZES[2] // 4
    out = torch.empty(world.ranks, numbers)
    mine, chosen = torch.full((numbers,), float(world.rank)), []
    for call in range(1300):
        if (call + world.rank) % 7 == 0:
            weft.all_gather(mine)
        else:
            weft.all_gather(mine, out=out.view(-1))
        (found,) = (
            found
            for key, found in engine(world).selections.items()
            if (key.workload.operator, key.workload.rows[0]) == ("all_gather", 1 << 18)
        )
        chosen.append(found)
    assert torch.equal(out, torch.arange(float(world.ranks)).view(-1, 1).expand(-1, numbers))
    assert len({id(each) for each in chosen if isinstance(each, Trial)}) == 2


def every_call_is_right(first, folder):
    patch = pytest.MonkeyPatch()
    patch.setenv("WEFT_CACHE", str(folder))
    try:
        for size in SIZES:
            for call in range(CALLS):
                collectives(first, size, call)
        again = weft.init()
        if again.rank:  # those of rank 0 serve all ranks
            patch.setenv("WEFT_CACHE", "/dev/null")
        for size in SIZES:
            for call in range(CALLS):
                collectives(again, size, call)
        repeated(again)
    finally:
        patch.undo()
    return [selected(world) for world in (first, again)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_call_is_right(ranks, tmp_path):
    outcomes = on_ranks(every_call_is_right, ranks, tmp_path)
    first, again = outcomes[0]
    assert outcomes == [(outcomes[0])] * ranks, "all ranks choose the same"
    assert {operator for operator, _ in first} == {"all_gather", "broadcast", "all_to_all"}
    assert len(first) >= 2 * len(SIZES)
    assert again.keys() == first.keys(), "those of the first world were stored"
    assert [*tmp_path.glob("variants-*.json")]


def explained(world, folder):
    """The first calls of a class alternate, which `weft.explain` tells, and the times it chose by."""
    os.environ["WEFT_CACHE"] = str(folder)  # other tests may have stored the class
    mine, texts = torch.ones(50_000), []
    while not selected(world):
        texts.append(weft.explain(mine, operator="all_gather"))
        weft.all_gather(mine)
    return {*texts}, weft.explain(mine, operator="all_gather"), selected(world)


def test_an_explanation_of_a_collective(tmp_path):
    for first, text, chosen in on_ranks(explained, 2, tmp_path):
        assert len(first) > 1
        assert all("ranks: " in each for each in first)
        ((_, algorithm),) = chosen.items()
        assert text.startswith(f"all_gather over 2 ranks: {algorithm}, ")
        assert "it was the fastest in the first calls of its class" in text
        assert text.count(" ms  ") > 1


def rules(world):
    texts = [
        weft.explain(torch.ones(2), operator="broadcast", source=1),
        weft.explain(torch.ones(50_000), operator="all_reduce", algorithm="ring", op="max"),
        weft.explain(torch.ones(4, 6), operator="reduce_scatter", dim=1, shard_rows=[2, 4]),
    ]
    with pytest.raises(TypeError, match="missing a required argument: 'source'"):
        weft.explain(torch.ones(2), operator="broadcast")
    with pytest.raises(TypeError, match="unexpected keyword argument 'chunk_rows'"):
        weft.explain(torch.ones(2), operator="all_reduce", chunk_rows=3)
    with pytest.raises(ValueError, match="split sizes are exchanged by the call itself"):
        sizes = {"input_split_sizes": [1, 1], "output_split_sizes": [1, 1]}
        weft.explain(torch.ones(2), operator="all_to_all", **sizes)
    return texts


def test_an_explanation_of_a_rule():
    for texts in on_ranks(rules, 2):
        assert texts == [
            "broadcast over 2 ranks: eager, 1 piece per shard: the rule for its size and memory",
            "all_reduce over 2 ranks: ring, 4 pieces per shard: as asked for",
            "reduce_scatter over 2 ranks: eager, 1 piece per shard: the rule for its size and "
            "memory",
        ]


def another_call(world):
    for call in range(8):
        if call == 5 and world.rank:
            weft.all_reduce(torch.ones(50_000))
        weft.all_gather(torch.ones(50_000))


def test_a_peer_that_makes_another_call():
    for outcome in start(another_call, 2):
        assert isinstance(outcome.error, MismatchError), outcome
        assert "all_gather((50000,) float32" in str(outcome.error)
        assert "all_reduce((50000,) float32" in str(outcome.error)


def another_class(world):
    weft.all_gather(torch.ones(50_000 if world.rank else 5_000))


def test_a_peer_whose_call_is_of_another_class():
    for outcome in start(another_class, 2):
        assert isinstance(outcome.error, MismatchError), outcome
        assert "all_gather((50000,) float32" in str(outcome.error)
        assert "all_gather((5000,) float32" in str(outcome.error)


@pytest.mark.parametrize(
    "entries",
    [
        [],
        {"a": ["read", 5, False]},
        {"a": {"algorithm": "read", "pieces": 1, "order": "peer", "ns": 5}},
        {"a": {"algorithm": "read", "pieces": 0, "order": "peer", "ns": 5, "busy": False}},
        {"a": {"algorithm": 7, "pieces": 1, "order": "peer", "ns": 5, "busy": False}},
        {"a": {"algorithm": "read", "pieces": 1, "order": "last", "ns": 5, "busy": False}},
        {"a": {"algorithm": "read", "pieces": 1, "order": "peer", "ns": "x", "busy": False}},
    ],
)
def test_stored_values_of_another_form_count_as_missing(entries, tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    cache.store(stored._name(), entries)
    assert stored.find("a") is None
    read = Measured(Variant("read"), 5.0, True)
    stored.remember("a", read)
    stored.remember("b", Measured(Variant("slots"), 7.0))
    assert stored.find("a") == read
    file, count, busy = stored.kept()
    assert (file.parent, count, busy) == (tmp_path, 2, 1)
    stored.forget()
    assert stored.kept() == (file, 0, 0)


def described_anew(world):
    """Peers compare the description of each exchange, not that of the first one."""
    for text in ("all_gather(…)\nfirst", "all_to_all(…)\nsecond"):
        engine(world).meet(text)
        assert world.executor.peer_call(world.rank, world.executor.calls) == text
        own = f"from {world.rank}…" if world.rank else ""
        assert engine(world).exchange(text, own) == ["", "from 1…"]
        assert world.executor.peer_call(world.rank, world.executor.calls) == text


def test_agreements_compare_the_call_that_they_are_part_of():
    on_ranks(described_anew, 2)


def all_sources(world):
    """Every rank compiles the same programs, whichever rank's tensor is broadcast."""
    for source in range(world.ranks):
        weft.broadcast(torch.ones(3), source)
    return len(engine(world).programs)


def test_ranks_have_the_same_number_of_programs():
    assert on_ranks(all_sources, 2) == [2, 2]


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("size", [4 << 10, 64 << 10, 512 << 10, 2 << 20])
def test_all_sizes_of_a_class_have_the_same_plans(size, reads):
    """At each limit, the sizes around it are of two classes."""
    world = SimpleNamespace(reads_memory=reads, placement=SimpleNamespace(huge_pages=True))
    of_class = {}
    for each in (size // 2 + 1, size - 1, size, size + 1, 2 * size):
        found = granularity.plans(world, each, *[lambda: None] * 4)
        names = of_class.setdefault(class_bytes(each), [*found])
        assert [*found] == names, each
    assert len(of_class) == 2
