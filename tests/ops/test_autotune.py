"""Autotune: the first calls of a size class measure variants and select the fastest."""

import json
import random
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.caches import own_cache
from support.ranks import on_ranks

import weft
from weft.engines import engine
from weft.ops import driver, stored
from weft.ops.autotune import DROPPED_FROM, IN_A_ROW, Trial
from weft.ops.call import Selection
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Variant, Workload


def selected(world):
    return [choice for choice in engine(world).selections.values() if isinstance(choice, Selection)]


def first_calls(world, operator, link, directory):
    """The variants of the calls of a class until the selection is final, the selected one, and its
    explanation.
    """
    own_cache(directory)
    if link:
        world.emulate_link(0.2, 5.0)
    a, b, taken = torch.randn(400, 64), torch.randn(64, 32), []
    seen, call = driver.select, getattr(weft, operator)

    def select(call):
        selection = seen(call)
        taken.append(selection.variant)
        return selection

    driver.select = select
    while not selected(world):
        call(a, b)
        assert len(taken) <= 2 * IN_A_ROW * len(DROPPED_FROM) * len({*taken})
    driver.select = seen
    (choice,) = selected(world)
    return taken, choice.variant, weft.explain(a, b, operator=operator)


QUICK = [
    ("all_gather_matmul", False),
    ("matmul_reduce_scatter", True),
    ("all_to_all_matmul", True),
]


@pytest.mark.parametrize(
    ("operator", "link"),
    [
        pytest.param(*each, marks=[] if each in QUICK else [pytest.mark.slow])
        for each in product(sorted(OPERATORS), (False, True))
    ],
)
def test_the_first_calls_measure_until_a_variant_is_selected(operator, link, tmp_path):
    (taken, variant, text), *others = on_ranks(first_calls, 2, operator, link, str(tmp_path))
    variants = {*taken}
    moving = {*OPERATORS[operator].algorithms} - {*OPERATORS[operator].moves_nothing}
    if link and len(moving) == 1:
        assert len(variants) == 1
        return
    assert len(variants) > 1
    assert {each.algorithm for each in variants} <= {
        *OPERATORS[operator].auto_candidates,
        *OPERATORS[operator].auto_candidates_over_links,
        "push",
        "one_shot",
    }
    assert variant in variants
    assert f"ranks: {variant}, at most " in text
    assert "it was the fastest in the first calls of its class" in text
    assert text.count(" ms  ") == len(variants)
    for other in others:
        assert other[:2] == (taken, variant), "all ranks run the same variant in the same call"


def nothing_to_try(world):
    b = torch.randn(64, 32)
    for rows, dtype in ((8, torch.float32), (400, torch.float64)):
        weft.all_gather_matmul(torch.randn(rows, 64, dtype=dtype), b.to(dtype))
    weft.all_gather_matmul(torch.randn(400, 64), b, algorithm="pull")
    assert all(isinstance(choice, Selection) for choice in engine(world).selections.values())
    weft.all_gather_matmul(torch.randn(300, 64), b)
    (trial,) = (choice for choice in engine(world).selections.values() if isinstance(choice, Trial))
    weft.all_gather_matmul(torch.randn(300 if world.rank else 1, 64), b, shard_rows=[1, 300])
    assert len(trial.calls) == 1, (
        "a product of one row may have other bits, so the call follows the rule"
    )


def quick_links(world):
    """Rows that pass a link quickly are sent uncut; pieces are tried if they may pay."""
    a, b = torch.randn(512, 256), torch.randn(256, 32)  # half a MiB
    found = []
    for gbps in (100.0, 16.0, 1.0):  # 42 us, 0.26 ms and 4.2 ms
        world.emulate_link(gbps)
        default = weft.explain(a, b).splitlines()[0]
        weft.all_gather_matmul(a, b)
        found.append(
            (
                default.split(": ")[1].split(",")[0],
                type(engine(world).selections[[*engine(world).selections][-1]]),
            )
        )
    return found


def test_rows_that_pass_a_link_quickly_are_sent_uncut():
    for found in on_ranks(quick_links, 2):
        assert found == [("sequential", Selection), ("sequential", Trial), ("push", Trial)]


def test_variants_with_other_bits_are_not_mixed():
    on_ranks(nothing_to_try, 2)


CALL = SimpleNamespace(comparable=lambda variants: True)
"""A call, as far as a trial reads it."""


def measured(trial, times, hosts=(0, 0), waited=lambda call: 0, oversubscribed=False):
    """The selection of a trial whose variants take these times, and the variants of its calls.

    `times` are nanoseconds per unit of work by algorithm, or such times for each of its calls;
    `waited` is the part of a call that a rank waits for a core.
    """
    draw, made, choice = random.Random(0), [], None
    while choice is None:
        work, now = draw.choice((300, 350, 384)), draw.randrange(1 << 40)
        name = trial.next(CALL).variant.algorithm
        each = times[name]
        took = each[made.count(name)] if isinstance(each, list) else each
        took = took * work
        made.append(name)
        if trial.record(now, now + took, round(took * waited(len(made))), work):
            other = 10**12 * hosts[1]  # nanoseconds by which another host's clock is ahead
            apart = other - 9 * took  # a rank that began early was waiting
            early = [
                (begin + apart, end + apart, wait, work) for begin, end, wait, work in trial.calls
            ]
            choice = trial.end_round([[*trial.calls], early], hosts, oversubscribed)
    return choice.variant.algorithm, made


def trial_of(times, record=0.0):
    return Trial(None, [Variant(name) for name in times], record)


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
@pytest.mark.parametrize(
    ("times", "wanted", "calls"),
    [
        ({"direct": 1000, "sequential": 900, "push": 920}, "sequential", 22),
        ({"direct": 1000, "sequential": 990, "push": 1450}, "direct", 20),  # too little to gain
        ({"direct": 1000, "sequential": 800, "push": 5000}, "sequential", 10),
        ({"direct": 1000, "sequential": 2000, "push": 5000}, "direct", 6),
    ],
)
def test_the_fastest_variant_is_selected_by_several_calls(times, wanted, calls, hosts):
    selection, made = measured(trial_of(times), times, hosts)
    assert (selection, len(made)) == (wanted, calls)


def test_a_host_that_begins_late_makes_no_variant_fast():
    """Rows that have arrived before make its own part of a call short, and its peer's long."""
    trial, choice, of_late = trial_of({"push": 1000, "sequential": 900}), None, []
    while choice is None:
        took = 1000 if trial.next(CALL).variant.algorithm == "push" else 900
        late = 300 if took == 1000 else 0
        of_late.append((late, took, 0, 1))
        if trial.record(0, took + late // 2, 0, 1):
            choice, of_late = trial.end_round([[*trial.calls], of_late], (0, 1)), []
    assert choice.variant.algorithm == "sequential"


@pytest.mark.parametrize("preempted", range(8))
def test_a_preempted_call_decides_nothing(preempted):
    fast = [900] * 8
    fast[preempted] = 25_000
    times = {"direct": 1000, "sequential": fast}
    assert measured(trial_of(times), times)[0] == "sequential"


@pytest.mark.parametrize("lucky", range(8))
def test_a_lucky_call_decides_nothing(lucky):
    fast = [1060] * 8
    fast[lucky] = 950
    times = {"push": 3000, "direct": 1000, "sequential": fast}
    assert measured(trial_of(times), times)[0] == "direct"


def test_a_stored_variant_is_checked_and_measured_again_if_it_became_slower():
    times = {"direct": 1000, "sequential": 900}
    trusted, changed = trial_of(times, record=800.0), trial_of(times, record=600.0)
    assert measured(trusted, times) == ("direct", ["direct"] * 4)
    assert trusted.round == 0, "there is nothing new to store"
    selection, made = measured(changed, times)
    assert (selection, made[:4]) == ("sequential", ["direct"] * 4)
    assert changed.measured(Variant(selection)) == stored.Measured(Variant("sequential"), 900.0)
    busy = trial_of(times, record=600.0)
    assert measured(busy, times, waited=lambda call: 0.5)[0] == "direct", "others ran meanwhile"


def test_a_round_in_which_ranks_wait_for_cores_is_repeated():
    times = {"direct": [1700, 9000] + [900] * 6, "sequential": 1000}
    _, made = measured(trial_of(times), times)
    assert made.count("direct") == 2, "it is dropped after a round"
    busy = {"waited": lambda call: 0.8 if call == 2 else 0.0}
    assert measured(trial_of(times), times, **busy)[0] == "direct"
    shared = measured(trial_of(times), times, **busy, oversubscribed=True)
    assert shared[0] == "sequential", "ranks that share cores always wait for one"


def test_measurements_of_a_busy_machine_say_so():
    times = {"direct": 1000, "sequential": 900}
    for part, busy in ((0.05, False), (0.3, True)):
        trial = trial_of(times)
        measured(trial, times, waited=lambda call, part=part: part)
        assert trial.measured(Variant("sequential")).busy == busy


def bits(world, seed):
    """All variants give the same bits for random sizes and dtypes, as far as torch's products of few
    and many rows do; with K this short they do everywhere.
    """
    draw, same = random.Random(seed), torch.Generator().manual_seed(seed + world.rank)
    for _ in range(6):
        rows, k, n = draw.randrange(32, 600), draw.randrange(1, 300), draw.randrange(1, 200)
        dtype, packed = draw.choice((torch.float32, torch.bfloat16)), draw.random() < 0.5
        for operator in OPERATORS.values():
            divides = operator.default_shards(rows, world.ranks) is not None
            total_rows = rows if divides else rows * world.ranks
            a = torch.randn(total_rows, k, generator=same).to(dtype)
            b = torch.randn(k, n, generator=same).to(dtype)
            b = weft.pack(b) if packed else b
            results = {
                name: getattr(weft, operator.name)(a, b, algorithm=name, chunk_rows=64)
                for name in operator.algorithms
            }
            wanted = results[operator.baseline]
            for name, result in results.items():
                assert torch.equal(result, wanted), (operator.name, name, rows, k, n, dtype, packed)


def test_every_variant_gives_the_same_bits():
    on_ranks(bits, 2, 5)


def learned(world, directory):
    own_cache(directory)
    a, b = torch.randn(400, 64), torch.randn(64, 32)
    while not selected(world):
        weft.all_gather_matmul(a, b)
    weft.barrier()
    chosen = selected(world)[0].variant.algorithm
    (path,) = Path(directory).glob("variants-*.json")
    (entry,) = json.loads(path.read_text()).values()
    weft.barrier()  # before it may be measured again, if other programs are busy meanwhile
    engine(world).selections.clear()
    return chosen, entry, again(world)


def again(world):
    """The variants of the first calls of a class with a stored measurement."""
    a, b, taken = torch.randn(400, 64), torch.randn(64, 32), []
    while not selected(world):
        weft.all_gather_matmul(a, b)
        (trial,) = engine(world).selections.values()
        if isinstance(trial, Trial):
            taken.append(trial.next(CALL).variant.algorithm)
    return taken


def test_selections_are_cached_on_disk(tmp_path):
    ((chosen, entry, taken), *_) = on_ranks(learned, 2, str(tmp_path))
    assert entry["algorithm"] == chosen
    assert entry["busy"] or taken[:2] == [chosen] * 2, "it is checked before others are tried"


def candidates_of_measured_classes(world, directory):
    """The candidates of a class that was measured earlier, whatever the rule selects."""
    own_cache(f"{directory}/{world.rank}")  # both store, and one may do so late

    def remember(case, measured):
        stored.remember(stored.key(case, engine(world).setting), measured)

    a, b = world.empty(400, 64), torch.randn(64, 32)
    case = Workload("all_gather_matmul", (400, 400), 64, 32, "float32", "float32", packed=False)
    remember(case, stored.Measured(Variant("ring", 4), 1.0))
    assert "ranks: ring, at most 100 rows per transfer: it was measured" in weft.explain(a, b)
    assert "ranks: ring" not in weft.explain(a, b, chunk_rows=9)
    assert "ranks: ring" not in weft.explain(a[:100], b)
    busy = stored.Measured(Variant("ring", 4), 1.0, busy=True)
    remember(case._replace(rows=(200, 200)), busy)
    assert "ranks: ring" not in weft.explain(a[:200], b), "it is to be measured again"
    world.emulate_link(1.0)
    assert "ranks: ring" not in weft.explain(a, b), "it was measured in shared memory"
    remember(case, stored.Measured(Variant("direct"), 1.0))
    assert "ranks: push" in weft.explain(a, b), "direct is not possible over an emulated link"


def test_a_measured_variant_precedes_the_rule(tmp_path):
    on_ranks(candidates_of_measured_classes, 2, str(tmp_path))


def deterministic(world, directory):
    own_cache(f"{directory}/{world.rank}")
    a, b = world.empty(400, 64), torch.randn(64, 32)
    case = Workload("all_gather_matmul", (400, 400), 64, 32, "float32", "float32", packed=False)
    name = stored.key(case, engine(world).setting)
    stored.remember(name, stored.Measured(Variant("ring", 4), 1.0))
    torch.use_deterministic_algorithms(True)
    weft.all_gather_matmul(a, b)
    assert engine(world).selections == {}
    for _ in range(2):  # all plans of a collective give the same bits, so they are measured
        weft.all_gather(torch.ones(50_000))
    ((key, trial),) = engine(world).selections.items()
    return weft.explain(a, b), key.workload.operator, len(trial.calls)


def test_deterministic_algorithms_leave_the_selection_to_the_rule(tmp_path):
    for text, operator, calls in on_ranks(deterministic, 2, str(tmp_path)):
        assert "ranks: direct, " in text
        assert (operator, calls) == ("all_gather", 2)


def over_links(world):
    """The candidates where peers' memory is not read in place, as on several hosts."""
    world.emulate_link(0.2, 5.0)
    a, b = torch.randn(2048, 64), torch.randn(64, 32)
    weft.all_gather_matmul(a, b)
    (trial,) = engine(world).selections.values()
    return trial.candidates


def test_over_links_several_numbers_of_pieces_are_tried():
    for left in on_ranks(over_links, 2):
        assert {variant.algorithm for variant in left} == {"push", "sequential"}
        assert {variant.pieces for variant in left if variant.algorithm == "push"} >= {2, 4, 8, 16}
