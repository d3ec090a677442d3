"""Options of commands: those of fused operators' benchmarks, and the rejection of every option that
would have no effect, before ranks start.
"""

from __future__ import annotations

import itertools
import json
from functools import wraps
from importlib import import_module

import numpy as np
import pytest
import torch
from support.ranks import beside_gloo, on_ranks
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft.cli.values import Shape
from weft.measure.timing import Stopwatch
from weft_tools.bench import cascade, fused, subjects
from weft_tools.bench.budget import Budget
from weft_tools.bench.settings.fused import AllGatherMatmul
from weft_tools.bench.verification import Problem
from weft_tools.bench.views import verify
from weft_tools.cli import running

FEW = ["--warmup", "1", "--iterations", "2", "--threads", "1"]
CASCADE = "fused = cascade"


def invoke(*words):
    outcome = CliRunner().invoke(app, [*map(str, words)], terminal_width=500)
    return outcome, " ".join(outcome.output.replace("│", " ").split())


def measured(*words):
    """The result of a benchmark as JSON, and its tables."""
    outcome = CliRunner().invoke(app, ["bench", *map(str, words), *FEW, "--json", "-"])
    assert outcome.exit_code == 0, outcome.output
    return json.loads(outcome.stdout), outcome.stderr


@pytest.mark.data
def test_results_are_put_where_they_stay():
    words = ["matmul-all-reduce", "-n", 2, "--shape", "16x24x8", "--algorithm", "push"]
    made, _ = measured(*words, "--symmetric-out", "--baseline", "none")
    assert made["verified"]
    assert made["options"]["symmetric_out"] is True


@pytest.mark.data
def test_the_calls_return_the_gathered_rows_and_add_a_bias(tmp_path):
    words = ["all-gather-matmul", "-n", 3, "--shape", "41x24x8", "--algorithm", "push"]
    words += ["--order", "interleaved", "--chunk-rows", 5, "--comm-threads", 2]
    words += ["--baseline", "none", "--bias", "--return-gathered", "--save-data", tmp_path]
    made, shown = measured(*words)
    assert made["verified"]
    assert (made["algorithm"], made["order"], made["options"]["comm_threads"]) == (
        "push",
        "interleaved",
        2,
    )
    assert set(made["without_gathered_ms"]) == {fused.WITHOUT_GATHERED}
    assert {one["gathered_wrong"] for one in made["cascade"]} == {0}
    assert len(made["cascade"]) == 3
    assert made["wrong"][CASCADE] == 0
    assert "push interleaved, bias, gathered rows returned, 2 comm threads" in shown
    assert "equal gathered rows, bit for bit" in shown
    assert "To return the gathered rows takes" in shown
    ranks = [np.load(tmp_path / f"rank{rank}.npz") for rank in range(3)]
    gathered = np.concatenate([rank["a"] for rank in ranks])
    for rank in ranks:
        assert np.array_equal(rank["gathered"], gathered)
        product = gathered.astype(float) @ rank["b"].astype(float) + rank["bias"]
        assert np.allclose(rank["expected"], product, rtol=1e-12, atol=1e-12)
        assert np.abs(rank["out"] - product).max() <= made["error_bound"]


@pytest.mark.data
@pytest.mark.parametrize(
    ("operator", "options"),
    [
        ("matmul-reduce-scatter", ["-n", 3, "--algorithm", "push", "--order", "interleaved"]),
        pytest.param(
            "matmul-reduce-scatter", ["-n", 1, "--dtype", "float16"], marks=pytest.mark.slow
        ),
        ("all-gather-matmul", ["-n", 2, "--dtype", "bfloat16", "--ablate", "--return-gathered"]),
        ("matmul-all-reduce", ["-n", 2, "--dtype", "bfloat16"]),
    ],
)
def test_a_bias_is_added_once(operator, options):
    made, _ = measured(operator, "--shape", "41x24x8", "--bias", *options)
    assert made["verified"]
    assert made["options"]["bias"]


def spoiled(world, how):
    """The wrong elements of each call of a subject, one of which is spoiled."""
    settings = AllGatherMatmul(
        shape=Shape(12, 8, 4), algorithm="pull", bias=True, return_gathered=True, baseline="none"
    )
    right = weft.all_gather_matmul

    @wraps(right)
    def wrong(*operands, bias=None, return_gathered=False, algorithm="auto", **options):
        bias = None if how == "no bias" else bias
        made = right(*operands, bias=bias, return_gathered=True, algorithm=algorithm, **options)
        if how == "gathered":
            made[1][-1, -1] += 1
        if how == "only fused" and algorithm == "pull":
            made[0][-1, -1] += 64
        return made if return_gathered else made[0]

    weft.all_gather_matmul = wrong
    subject = subjects.GatheredRows(settings, world, Stopwatch(world), Budget(world, 60.0))
    _, checks = verify(subject, world, lambda: None)
    found = cascade.compare_with_cascade(subject, world, 2 * len(subject.views))
    return {name: check.wrong for name, check in checks.items()}, found


def test_a_wrong_bias_or_gathered_matrix_is_found():
    for how, views, of_cascade in (
        ("nothing", 0, [0, 0]),
        ("no bias", 48, [0, 0]),
        ("gathered", 1, [0, 0]),
        ("only fused", 1, [1, 1]),
    ):
        for wrong, found in on_ranks(spoiled, 2, how, context=beside_gloo):
            assert bool(wrong["pipelined"]) == bool(views), how
            assert bool(wrong["sequential"]) == (views > 0 and how != "only fused"), how
            assert wrong["compute"] == 0
            assert [one.wrong for one in found] == of_cascade, how


def test_sentences_on_the_cascade():
    right, near, wrong = (0, 0.0, 0), (0, 0.1, 0), (3, 9.0, 2)
    ranks = [cascade.Agreement(*each)._asdict() for each in (right, near, wrong, near)]
    assert [*cascade.sentences(ranks)] == [
        "Fused and cascade on rank 0: equal outputs, bit for bit; equal gathered rows, bit for "
        "bit.",
        "Fused and cascade on ranks 1, 3: equal outputs, up to rounding; equal gathered rows, bit "
        "for bit.",
        "Fused and cascade on rank 2: 3 elements of the output DIFFER; 2 elements of the gathered "
        "rows DIFFER.",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_with_a_bias_is_verified(dtype):
    problem = Problem(9, 130, 7, dtype, dtype, seed=3, rank=1, bias_seed=4)
    bias = problem.bias
    rows, weight = problem.rows(2).float(), problem.weight.float()
    assert problem.check_product((rows @ weight + bias).to(dtype), 2).wrong == 0
    rounded = (rows @ weight).to(dtype) + bias
    assert problem.check_product_of_baseline(rounded, 2).wrong == 0
    for other in (rows @ weight, rows @ weight + 2 * bias):
        assert problem.check_product(other.to(dtype), 2).wrong > 9
        assert problem.check_product_of_baseline(other.to(dtype), 2).wrong > 9


AGM, MRS, MAR = "bench all-gather-matmul", "bench matmul-reduce-scatter", "bench matmul-all-reduce"
REFUSED = [
    (f"{AGM} --order interleaved", "--order", "auto has no orders: use --algorithm push"),
    (f"{AGM} --algorithm ring --order peer", "--order", "use --algorithm push"),
    (f"{AGM} --algorithm push --order peer -n 1", "--", "use --ranks 2 or more"),
    (f"{MAR} --order peer", "--order", "No such option"),
    (f"{MRS} --return-gathered", "--return-gathered", "No such option"),
    (f"{AGM} --comm-threads 2", "--comm-threads", "use --algorithm push, pull or ring"),
    (f"{AGM} --comm-threads 2 --algorithm direct", "--comm-threads", "push, pull or ring"),
    (f"{AGM} --comm-threads 1", "--comm-threads", "use --algorithm push, pull or ring"),
    (f"{MRS} --comm-threads 2 --algorithm put", "--comm-threads", "use --algorithm push or ring"),
    (
        f"{MAR} --comm-threads 2 --algorithm two_shot",
        "--comm-threads",
        "use --algorithm push or ring",
    ),
    (f"{AGM} -n 1 --algorithm push", "--algorithm", "a single rank exchanges no rows"),
    (f"{AGM} -n 1 --chunk-rows 4 --algorithm push", "--", "a single rank exchanges no rows"),
    (f"{AGM} --link-latency-us 0", "--link-latency-us", "add --link-gbps"),
    (f"{AGM} --warmup 0", "--warmup", "expected at least 1; got 0"),
    (f"{AGM} --peers host --bias", "--bias", "has no effect with --peers host"),
    (f"{AGM} --peers host --algorithm auto", "--algorithm", "has no effect with --peers host"),
    (f"{AGM} --peers host --timeline t.svg", "--timeline", "has no effect with --peers host"),
    ("bench all-gather --comm-sms 4,8", "--comm-sms", "use --device cuda"),
    ("bench all-gather --engine interpreter --compiler gluon", "--compiler", "no interpreter"),
    ("bench all-gather --device cuda --threads 2", "--threads", "omit one of them"),
    (f"{AGM} --engine reference --trace x.json", "--trace", "no lanes over time"),
    (f"{AGM} --engine streams --link-gbps 10", "--link-gbps", "does not emulate links"),
    (f"{AGM} --engine streams --algorithm push --comm-threads 2", "--comm-threads", "has no"),
    ("bench moe --engine reference", "--engine", "No such option"),
    ("bench overlap --engine streams --link-gbps 10", "--link-gbps", "does not emulate links"),
    ("bench all-gather --op max", "--op", "No such option"),
    ("predict all-reduce --shape 8x8x8", "--shape", "has no effect with a collective"),
    ("predict all-reduce --chunk-rows 8", "--chunk-rows", "has no effect with a collective"),
    ("predict all-reduce --plot x.png", "--plot", "has no effect with a collective"),
    ("predict all-gather-matmul --bytes 8", "--bytes", "takes --shape"),
    ("predict barrier --bytes 8", "--bytes", "barrier moves no bytes"),
    ("predict mlp --link-latency-us 1", "--link-latency-us", "add --link-gbps"),
    ("predict mlp --link-gbps 0", "--link-gbps", "expected a positive number"),
    ("predict mlp --link 0", "--link", "expected a positive number; got '0'"),
    ("predict mlp --link nan", "--link", "expected a positive number; got 'nan'"),
    ("predict copy --latency-us inf", "--latency-us", "a number of at least 0; got 'inf'"),
    ("predict mlp --latency-us -1", "--latency-us", "a number of at least 0; got '-1'"),
    ("predict mlp --link-gbps 8 --link 2", "--link", "--link-gbps emulates a link in its place"),
    ("predict mlp --link-gbps 8 --latency-us 2", "--latency-us", "omit one of them"),
    ("predict all-gather-matmul --sweep link=2:4 --link-gbps 2", "--link-gbps", "sweep sets it"),
    (f"{AGM} --link-gbps 8 --link-latency-us nan", "--link-latency-us", "at least 0; got 'nan'"),
    ("predict mlp --algorithm sequential --chunk-rows 8", "--chunk-rows", "does not cut"),
    ("predict all-gather-matmul --sweep ranks=2:4 -n 2", "--ranks", "the sweep sets it"),
    ("predict all-gather-matmul --sweep link=2:4 --link 2", "--link", "the sweep sets it"),
    ("predict all-gather-matmul --sweep m=2:4 --trace x", "--trace", "no effect with --sweep"),
    ("tune all-gather-matmul --shape 8x8x8 --link-latency-us 1", "--link-latency-us", "add --link"),
    ("tune all-gather-matmul --shape 8x8x8 --link-gbps -1", "--link-gbps", "positive number"),
    ("tune matmul-all-reduce --shape 8x8x8 --staged", "--staged", "exchanges no inputs"),
    ("bench all-gather-matmul --tile 64x64", "--tile", "use --engine interpreter"),
    (
        "bench matmul-reduce-scatter --engine interpreter --own-tile 64x64",
        "--own-tile",
        "no algorithm of matmul-reduce-scatter has own rows in tiles of 64x64: omit it",
    ),
    (
        "bench all-gather-matmul --device cuda --tile 64x64",
        "--tile",
        "the engine streams does not multiply by weft's kernel: use --engine triton",
    ),
    ("bench all-gather-matmul --compute-sms 2", "--compute-sms", "weft's kernel"),
    ("bench matmul-all-reduce --engine streams --comm-sms 2", "--comm-sms", "runs no kernels"),
    (
        "bench matmul-reduce-scatter --engine interpreter --comm-sms 2 --algorithm put",
        "--comm-sms",
        "put has no copies on 2 SMs: use --algorithm push or ring",
    ),
    ("bench all-gather-matmul --links 2", "--links", "one lane for transfers"),
    ("bench all-gather-matmul --links 2 --engine streams", "--links", "use at most 1"),
    (
        "bench all-gather-matmul -n 3 --links 2 --engine streams --algorithm ring",
        "--links",
        "ring has no 2 links: use --algorithm push or sequential",
    ),
    (
        "bench matmul-all-reduce -n 3 --links 2 --engine streams --algorithm two_shot",
        "--links",
        "two_shot has no 2 links: use --algorithm push",
    ),
    ("tune all-gather-matmul --shape 8x8x8 --device cuda", "--device cuda", "finds no GPU"),
    ("tune all-gather-matmul --shape 8x8x8 --engine triton", "--engine", "none of --device cpu"),
    ("tune all-gather-matmul --shape 8x8x8 --engine reference", "--engine", "no speed to measure"),
    (
        "tune all-gather-matmul --shape 8x8x8 --engine streams --link-gbps 1",
        "--link-gbps",
        "does not emulate links",
    ),
    (
        "tune all-gather-matmul --shape 8x8x8 --engine streams --threads 1",
        "--threads",
        "has its own threads",
    ),
    ("plan show all-gather-matmul --algorithm ring --order peer", "--order", "changes nothing"),
    ("plan show all-gather-matmul --algorithm push --links 2", "--links", "nothing in push on 2"),
    ("plan show all-reduce -n 3 --links 2", "--links", "changes nothing in two_shot"),
    ("plan show barrier --symmetric", "--symmetric", "changes nothing"),
    (
        "plan show matmul-all-reduce --algorithm sequential --chunk-rows 1",
        "--chunk-rows",
        "nothing",
    ),
]


@pytest.mark.parametrize(("command", "option", "why"), REFUSED, ids=[row[0] for row in REFUSED])
def test_an_option_without_an_effect_is_refused(command, option, why, monkeypatch):
    monkeypatch.setattr(import_module("weft.launchers.launcher"), "launch", None)
    outcome, said = invoke(*command.split())
    assert outcome.exit_code == 2, said
    assert option in said
    assert why in said


def test_a_kernel_of_a_gpu_is_refused_elsewhere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kernel = ["bench", "all-gather", "--algorithm", "kernel"]
    assert "kernels run on GPUs: use --device cuda" in invoke(*kernel)[1]
    assert "torch finds no GPU here" in invoke(*kernel, "--device", "cuda")[1]


def test_plans_of_orders_and_links_are_shown():
    plan = ["plan", "show", "all-gather-matmul", "-n", 3, "--algorithm", "push"]
    peer, interleaved, links = (
        invoke(*plan, *more)[0].stdout
        for more in ([], ["--order", "interleaved"], ["--links", 2, "--order", "peer"])
    )
    assert len({peer, interleaved, links}) == 3
    assert "comm1" in links
    for shown in (peer, interleaved, links):
        assert "verified: no race, no deadlock" in shown


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["all-gather-matmul", "matmul-reduce-scatter"])
def test_tiles_sms_and_links_are_measured(operator):
    pytest.importorskip("triton", "3.6")
    words = [operator, "-n", 3, "--engine", "interpreter", "--shape", "96x16x24", "--tile"]
    words += ["64x64", "--compute-sms", 2, "--comm-sms", 1, "--links", 2]
    made, shown = measured(*(word for word in words))
    assert made["verified"]
    assert made["algorithm"] == "push"
    options = "tiles of 64x64, products on 2 SMs, copies on 1 SMs, 2 links"
    assert f"push, {options}" in shown
    assert (made["options"]["tile"], made["options"]["comm_sms"]) == ("64x64", 1)


class Started(Exception):
    """The settings have passed all checks."""


VALUES = {
    "--algorithm": ["push", "direct"],
    "--chunk-rows": ["8"],
    "--order": ["peer"],
    "--ablate": [None],
    "--ranks": ["1"],
    "--bias": [None],
    "--baseline": ["gloo"],
    "--link-gbps": ["10"],
    "--link-latency-us": ["2"],
    "--comm-threads": ["2"],
}


def test_any_two_options_are_refused_by_name_or_measured(monkeypatch):
    """What reaches the ranks can be measured: each option has an effect there."""

    def started(measure, ranks, settings, **_):
        raise Started(ranks, settings)

    monkeypatch.setattr(running, "on_ranks", started)
    given = [(name, value) for name, values in VALUES.items() for value in values]
    reached = 0
    for pair in itertools.combinations(given, 2):
        if pair[0][0] == pair[1][0]:
            continue
        words = [word for option in pair for word in option if word is not None]
        outcome, said = invoke("bench", "all-gather-matmul", *words)
        if outcome.exit_code == 2:
            assert any(name in said for name, _ in pair), (words, said)
            continue
        assert isinstance(outcome.exception, Started), (words, said)
        ranks, settings = outcome.exception.args
        reached += 1
        check_effect(ranks, settings, words)
    assert reached > 10


def check_effect(ranks, settings, words):
    """Each option of settings that ranks will measure can have an effect."""
    moves = settings.link_gbps is not None
    cuts = settings.algorithm == "push" or (settings.algorithm == "auto" and moves)
    assert ranks > 1 or not (moves or settings.algorithm != "auto" or settings.ablate), words
    assert cuts or settings.chunk_rows is None, words
    assert settings.algorithm == "push" or settings.order is None, words
    assert settings.algorithm == "push" or "--comm-threads" not in words, words
    assert not (moves and settings.algorithm == "direct"), words
    assert not (moves and settings.baseline == "gloo"), words
    assert moves or settings.link_latency_us is None, words
