"""Plans of collectives that are chosen by measuring them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from support.ranks import on_ranks, start

import weft
from weft import cache
from weft.engines import engine
from weft.errors import MismatchError
from weft.ops import agreement, granularity, measured
from weft.ops.measured import Choice, Choices, Class, Trial
from weft.schedules.barrier import barrier

KEY = Class("all_gather", 18)
SIZES = [8 << 10, 64 << 10, 200 << 10, 1 << 20]
CALLS = 34  # more than a trial of three plans takes


def evaluated(trial, least, delay=0, oversubscribed=False):
    """The outcome of a phase in which rank 1 is late for every call, sizes alternate, and each plan
    takes its time of `least` for a MiB once and ten times as long in all other rounds.
    """
    names, rows = [], []
    while not trial.complete:
        names.append(trial.name)
        trial.calls.append((0, 0, 0))
    for rank in range(2):
        row = []
        for at, name in enumerate(names):
            begin, size = 1000 * at + 100 * rank, 2 << at % 2 << 20
            once = at // 2 // len(trial.names) == 1
            took = least[name] * (size >> 20) * (1 if once else 10)
            row += [begin, 1000 * at + 100 + took - rank, size]
        rows.append([*row, delay * rank, 100])
    return trial.end_phase(torch.tensor(rows), oversubscribed)


def test_the_fastest_is_chosen_although_calls_are_interrupted():
    trial = Trial(KEY, ["slots", "short slots", "read"])
    assert evaluated(trial, {"slots": 30, "short slots": 50, "read": 25}) is None
    assert trial.names == ["slots", "read"], "the slow one is not tried again"
    assert evaluated(trial, {"slots": 30, "read": 25}) == Choice("read", 25, False)


def test_rows_are_read_in_place_unless_that_is_slower():
    trial = Trial(KEY, ["slots", "read"])
    assert evaluated(trial, {"slots": 100, "read": 104}) is None
    assert evaluated(trial, {"slots": 100, "read": 104}) == Choice("read", 104, False)
    trial = Trial(KEY, ["slots", "read"])
    assert evaluated(trial, {"slots": 100, "read": 107}) is None
    assert evaluated(trial, {"slots": 100, "read": 107}) == Choice("slots", 100, False)


def test_a_choice_on_busy_cores_says_so():
    for oversubscribed, busy in (False, True), (True, False):
        trial = Trial(KEY, ["slots", "read"])
        choice = evaluated(trial, {"slots": 10, "read": 90}, 50, oversubscribed)
        assert choice == Choice("slots", 10, busy)


def test_a_stored_choice_is_compared_with_its_record():
    assert evaluated(Trial(KEY, ["read"], 20), {"read": 25}) == Choice("read", 20, False)
    assert evaluated(Trial(KEY, ["read"], 20), {"read": 15}) == Choice("read", 15, False)
    assert evaluated(Trial(KEY, ["read"], 10), {"read": 25}) is None
    assert evaluated(Trial(KEY, ["read"], 10), {"read": 25}, delay=50) == Choice("read", 10, False)


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


def found(world):
    choices = engine(world).selections[Choices]
    return {key: choice for key, choice in choices.found.items() if isinstance(choice, Choice)}


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
        chosen.append(engine(world).selections[Choices].found[Class("all_gather", 18)])
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
    return [{tuple(key): each.name for key, each in found(w).items()} for w in (first, again)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_call_is_right(ranks, tmp_path):
    outcomes = on_ranks(every_call_is_right, ranks, tmp_path)
    first, again = outcomes[0]
    assert outcomes == [(outcomes[0])] * ranks, "all ranks choose the same"
    assert {operator for operator, _ in first} == {"all_gather", "broadcast", "all_to_all"}
    assert len(first) >= 2 * len(SIZES)
    assert again.keys() == first.keys(), "those of the first world were stored"
    assert [*tmp_path.glob("collectives-*.json")]


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


@pytest.mark.parametrize(
    "entries",
    [
        [],
        {"2 ranks": {"all_gather": ["read", 5, False]}},
        {"2 ranks": {"all_gather 18": ["read", 5]}},
        {"2 ranks": {"all_gather 18": ["other", 5, False]}},
        {"2 ranks": {"all_gather 99": ["read", 5, False]}},
        {"2 ranks": {"all_gather 18": ["read", 1 << 60, False]}},
    ],
)
def test_stored_values_of_another_form_count_as_missing(entries, tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    cache.store(measured._file(), entries)
    assert measured._stored("2 ranks") == {}
    measured._store("2 ranks", KEY, Choice("read", 5, True))
    measured._store("3 ranks", KEY, Choice("slots", 7, False))
    assert measured._stored("2 ranks") == {KEY: Choice("read", 5, True)}
    file, count, busy = measured.kept()
    assert (file.parent, count, busy) == (tmp_path, 2, 1)
    measured.forget()
    assert measured.kept() == (file, 0, 0)


def described_anew(world):
    """Peers compare the description of each execution, not that of the first one."""
    own = engine(world)
    for text in ("all_gather(…)\nfirst", "all_to_all(…)\nsecond"):
        for plan, tensors, rows in (
            (barrier(world.levels, "begin"), {}, ()),
            (agreement._from_rank_0(world.levels, None), *numbers_of_rank_0(world)),
        ):
            own.execute_as(text, plan, tensors, rows)
            assert world.executor.peer_call(world.rank, world.executor.calls) == text


def numbers_of_rank_0(world):
    numbers = torch.arange(3, dtype=torch.int64).view(3, 1)
    whole, none = ("a", "out") if world.rank == 0 else ("out", "a")
    return {whole: numbers, none: numbers[:0]}, (3,)


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
    world = SimpleNamespace(reads_memory=reads, huge_pages=True)
    of_class = {}
    for each in (size // 2 + 1, size - 1, size, size + 1, 2 * size):
        found = granularity.plans(world, each, *[lambda: None] * 4)
        names = of_class.setdefault(Class.of("all_gather", each), [*found])
        assert [*found] == names, each
    assert len(of_class) == 2
