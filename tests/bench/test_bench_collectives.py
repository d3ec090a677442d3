"""The benchmarks of collectives and of overlap: their figures and data, and the detection of wrong
results. No test asserts a time.
"""

from __future__ import annotations

import functools
import json
import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from support.ranks import beside_gloo, on_ranks
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft.cli.values import Shape, parse_sizes
from weft.measure.timing import Times, per_call
from weft_tools.bench import collective_baselines as baselines
from weft_tools.bench import collectives, deepspeed, gathers, mpi, overlap, plots, sweep, views
from weft_tools.bench.collectives import COLLECTIVES, Data, bandwidths, count_of, limit_of
from weft_tools.bench.settings.overlap import OverlapSettings
from weft_tools.bench.settings.sweeps import SweepSettings
from weft_tools.bench.sweep import Local, Sweep

SHORT = ["--sizes", "8,4K", "--warmup", "1", "--iterations", "2", "--threads", "1"]
MPIS = [name for name in mpi.MPIS if (Path(__file__).parents[2] / mpi.environment(name)).exists()]
SCHEMA = {
    "benchmark": str,
    "ranks": int,
    "hosts": int,
    "dtype": str,
    "op": str,
    "algorithm": str,
    "size_bytes_of": str,
    "neighbours": type(None),
    "rows": list,
    "verified": bool,
    "options": dict,
    "date": str,
    "machine": dict,
    "versions": dict,
}
ROW = {
    "size_bytes": int,
    "count": int,
    "dtype": str,
    "operation": str,
    "implementation": str,
    "in_place": bool,
    "time_us": dict,
    "algbw_gbps": float,
    "busbw_gbps": float,
    "wrong": int,
    "batches": int,
    "calls": int,
}


def bench(*arguments):
    """The outcome of ``weft bench`` on ranks from the server of the tests."""
    outcome = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    assert outcome.exit_code == 0, outcome.stderr
    return outcome


def kinds(value):
    return {key: type(inner) for key, inner in value.items()}


def row(implementation="weft", in_place=False, median=10.0, wrong=0, size=4096):
    time = {"median": median, "min": median - 1, "p99": median + 1}
    made = {
        "size_bytes": size,
        "count": size // 4,
        "dtype": "float32",
        "operation": "all_gather",
        "implementation": implementation,
    }
    return made | {
        "in_place": in_place,
        "time_us": time,
        "algbw_gbps": 1.0,
        "busbw_gbps": 0.5,
        "wrong": wrong,
        "batches": 3,
        "calls": 9,
    }


def test_a_time_bounds_the_batches():
    for seconds in 0, 600:
        found = json.loads(
            bench(
                *("all-reduce", *SHORT, "--iterations", "30", "--baseline", "none"),
                *("--seconds", seconds, "--json", "-"),
            ).stdout
        )
        assert found["options"]["seconds"] == seconds
        assert {row["batches"] for row in found["rows"]} == {30 if seconds else 3}


def result(*rows):
    return {
        "benchmark": "all-gather",
        "ranks": 2,
        "dtype": "float32",
        "op": None,
        "algorithm": "auto",
        "neighbours": None,
        "rows": [*rows],
        "date": "2026-11-25 12:00:00 UTC",
        "verified": not any(row["wrong"] for row in rows),
        "machine": {"cpu": "a processor", "cores": 2, "threads_per_rank": 1},
        "versions": {"weft": "0"},
    }


def text_of(result):
    console = Console(width=80)
    with console.capture() as captured:
        sweep.print_tables(result, console)
    return captured.get()


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8", [8]),
        ("4K:64K:4", [4096, 16384, 65536]),
        ("1M:3M", [1 << 20, 2 << 20]),
        ("8,1k:2k,8", [8, 1024, 2048]),
        ("1G", [1 << 30]),
    ],
)
def test_sizes_are_parsed(text, sizes):
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    "text", ["", "x", "0", "-4", "4K:1K", "1:8:1", "1:8:x", "1:2:3:4", "K", "1.5M"]
)
def test_invalid_sizes_are_refused(text):
    with pytest.raises(ValueError, match=r"expected|before"):
        parse_sizes(text)


def test_bandwidths_are_those_of_nccl_tests():
    # 1 MB per rank in 1 ms on 4 ranks
    expected = {
        "all_gather": (4.0, 3.0),
        "reduce_scatter": (1.0, 0.75),
        "all_reduce": (1.0, 1.5),
        "broadcast": (1.0, 1.0),
        "all_to_all": (1.0, 0.75),
    }
    for name in COLLECTIVES:
        assert bandwidths(name, 10**6, 4, 1000.0) == pytest.approx(expected[name])


def test_statistics_are_in_microseconds_per_call():
    assert per_call([0.004, 0.002, 0.012], calls=2) == pytest.approx(
        Times(2000.0, 3000.0, 1000.0, 6000.0)
    )
    assert per_call([float(i) for i in range(1, 201)], calls=1).p99 == 198e6


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "int8", "int32", "int64"]
)
def test_sums_are_exact(dtype):
    world = SimpleNamespace(ranks=3, rank=1, device=torch.device("cpu"))
    data = Data(world, SweepSettings("all_reduce", dtype=dtype), 300)
    sources = [stream[5:305] for stream in data.streams]
    exact = functools.reduce(torch.add, [source.to(torch.int64) for source in sources])
    assert torch.equal(data.expected(5, 300).to(torch.int64), exact)
    assert 3 * limit_of(dtype, 3) <= 2 ** collectives._DIGITS[dtype]
    assert not any(
        torch.equal(one, other)
        for one, other in [(sources[0], sources[1]), (data.own(5, 300), data.own(6, 300))]
    )


def test_counts_are_rounded_up_to_whole_parts():
    assert count_of(10, SweepSettings("all_gather"), 4) == 3
    assert count_of(8, SweepSettings("reduce_scatter"), 4) == 4
    assert [
        COLLECTIVES[name].outputs(8, 4) for name in ("all_gather", "reduce_scatter", "all_reduce")
    ] == [32, 2, 8]


def verify_all(world, cases):
    """For each ``(dtype, op, spoil)`` the number of elements that the benchmark finds wrong after
    `spoil` was applied to every output.
    """
    return [verify_one(world, *case) for case in cases]


def verify_one(world, dtype, op, spoil):
    """The wrong elements by operation, implementation and place."""
    found = {}
    for operation in COLLECTIVES:
        settings = SweepSettings(operation, op, sizes="60", dtype=dtype)
        contenders = Sweep(settings, world).contenders(count_of(60, settings, world.ranks))
        for run, contender in enumerate(contenders):
            if spoil:
                call = contender.call
                contender.call = lambda call=call, out=contender.out: (
                    call(),
                    SPOILS[spoil](world, out),
                )
            found[operation, contender.implementation, contender.in_place] = contender.verify(
                run
            ).wrong
    return found


SPOILS = {
    "last element of rank 1": lambda world, out: out[-1:].add_(1) if world.rank == 1 else None,
    "not a number": lambda world, out: out[:1].fill_(torch.nan),
}


@pytest.mark.data
def test_right_results_are_accepted():
    [found, _, _] = on_ranks(
        verify_all,
        3,
        [("float32", "sum", None), ("bfloat16", "avg", None), ("int8", "max", None)],
        context=beside_gloo,
    )
    for of_case in found:
        assert {operation for operation, _, _ in of_case} == {*COLLECTIVES}
        assert not any(of_case.values())


def test_wrong_results_are_counted_on_every_rank():
    for found in on_ranks(
        verify_all,
        2,
        [("float32", "sum", spoil) for spoil in ("last element of rank 1", "not a number")],
        context=beside_gloo,
    ):
        assert [set(of_case.values()) for of_case in found] == [{1}, {2}]


def verify_nothing(world):
    found = {}
    for operation, collective in COLLECTIVES.items():
        settings = SweepSettings(operation, sizes="60")
        bench = Sweep(settings, world)
        for in_place in collective.places:
            tensors = bench.tensors("weft (plain)", in_place, count_of(60, settings, world.ranks))
            collectives.weft_collective(
                settings, *tensors, world
            )()  # keeps a result of earlier data
            found[operation, in_place] = (
                Local("idle", in_place, lambda: None, tensors, bench).verify(1).wrong
            )
    return found


def test_an_operation_that_does_nothing_is_detected():
    [found, _] = on_ranks(verify_nothing, 2, context=beside_gloo)
    assert all(found.values())


def test_tables_mark_slower_and_wrong_rows():
    text = text_of(
        result(row(), row("openmpi", median=20.0), row(in_place=True), row("openmpi", True))
    )
    assert "2.00x" in text
    assert "SLOWER" not in text
    assert "Verified" in text
    assert "0.50x SLOWER" in text_of(result(row(), row("openmpi", median=5.0)))
    assert "NOT VERIFIED" in text_of(result(row(wrong=3)))
    assert text_of(result(row(), row("gloo", True))), "an implementation may lack a place"


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_sweeps_are_drawn(tmp_path, suffix):
    path = tmp_path / f"sweep.{suffix}"
    plots.draw_sweep(
        result(*[row(name, size=size) for name in ("weft", "mpich") for size in (8, 4096, 65536)]),
        path,
    )
    assert path.stat().st_size > 1000


def test_names_of_sizes():
    assert [plots.size_name(size) for size in (12, 4096, 3 << 20, 1 << 30)] == [
        "12",
        "4K",
        "3M",
        "1G",
    ]


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["all-gather", "--sizes", "4K:1K"], "before the first"),
        (["all-gather", "--baseline", "nccl"], "gloo, openmpi, mpich"),
        (["all-gather", "-n", "1"], "--ranks"),
        (["all-gather", "--plot", "sweep.pdf"], ".png or .svg"),
        (["all-reduce", "--op", "avg", "--baseline", "gloo"], "--baseline none"),
        (["all-reduce", "--op", "avg", "--dtype", "int32"], "floating"),
        (["all-reduce", "--dtype", "bfloat16", "--baseline", "mpich"], "another --dtype"),
        (["broadcast", "--baseline", "openmpi"], "make baselines"),
        (["all-reduce", "--baseline", "deepspeed"], "make baselines"),
        (["all-gather", "--baseline", "deepspeed"], "only sums"),
        (["overlap", "--size", "1K,2K"], "one size"),
        (["overlap", "--link-gbps", "slow"], "positive"),
        (["overlap", "--link-gbps", "10", "--baseline", "gloo"], "none"),
        (["overlap", "--shape", "2x2"], "MxKxN"),
    ],
)
def test_invalid_options_are_refused(arguments, advice, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(app, ["bench", *arguments], terminal_width=500)
    assert outcome.exit_code == 2
    assert advice in " ".join(outcome.stderr.replace("│", " ").split())


@pytest.mark.data
def test_a_sweep_on_two_ranks(tmp_path):
    outcome = bench("all-reduce", *SHORT, "--json", "-", "--plot", tmp_path / "sweep.svg")
    made = json.loads(outcome.stdout)
    assert kinds(made) == SCHEMA
    assert made["verified"]
    assert all(
        kinds(row) == ROW and [*row["time_us"]] == ["median", "mean", "min", "p99"]
        for row in made["rows"]
    )
    found = {(row["size_bytes"], row["implementation"], row["in_place"]) for row in made["rows"]}
    assert found == {
        (size, name, place)
        for size in (8, 4096)
        for name in ("weft", "weft (plain)", "gloo")
        for place in (False, True)
    }
    assert "#wrong" in outcome.stderr
    assert "<svg" in (tmp_path / "sweep.svg").read_text()


@pytest.mark.data
@pytest.mark.skipif(not MPIS, reason="run `make baselines` first")
def test_mpi_is_a_baseline(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    made = json.loads(
        bench("all-reduce", *SHORT, "--baseline", ",".join(MPIS), "--json", "-").stdout
    )
    assert made["verified"]
    assert {*MPIS} < {row["implementation"] for row in made["rows"]}
    assert {*MPIS} < {*made["versions"]}


@pytest.mark.data
@pytest.mark.parametrize("dtype", deepspeed.DTYPES)
def test_deepspeed_is_a_baseline(dtype, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    if why := deepspeed.missing():
        pytest.skip(why)
    made = json.loads(
        bench(
            "all-reduce", *SHORT, "--dtype", dtype, "--baseline", "deepspeed", "--json", "-"
        ).stdout
    )
    assert made["verified"]
    assert [row["in_place"] for row in made["rows"] if row["implementation"] == "deepspeed"] == [
        True,
        True,
    ]
    assert not [*Path("/dev/shm").glob("deepspeed*")]


def measure_mpi(world, directory):
    """The rows of all operations compared with MPI, by one set of MPI's processes."""
    os.chdir(directory)
    with ExitStack() as stack:
        others = [stack.enter_context(baselines.opened(name, world)) for name in MPIS]
        rows = []
        for operation in COLLECTIVES:
            settings = SweepSettings(
                operation, sizes="8,4K", baseline="none", warmup=0, iterations=1
            )
            of_operation = Sweep(settings, world, others)
            for size in parse_sizes(settings.sizes):
                rows += of_operation.rows(size, lambda: None)
        return [
            (row["operation"], row["implementation"], row["in_place"], row["wrong"]) for row in rows
        ]


@pytest.mark.data
@pytest.mark.skipif(not MPIS, reason="run `make baselines` first")
@pytest.mark.slow
def test_every_operation_of_mpi_is_verified():
    [rows, _] = on_ranks(measure_mpi, 2, Path(__file__).parents[2], context=beside_gloo)
    for operation, collective in COLLECTIVES.items():
        right = {(operation, name, place, 0) for name in MPIS for place in collective.places}
        assert right <= {*rows}
    assert not any(wrong for *_, wrong in rows)


def test_an_mpi_that_does_not_start_is_an_error(monkeypatch, tmp_path):
    programs = tmp_path / ".baselines" / "mpich" / "bin"
    programs.mkdir(parents=True)
    (programs / "mpiexec").write_text("#!/bin/sh\necho no such luck >&2\nexit 3\n")
    (programs / "mpiexec").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="did not start: no such luck"):
        mpi.MpiRanks("mpich", [frozenset({0})] * 2)


@pytest.mark.data
@pytest.mark.parametrize("link", [[], ["--link-gbps", "auto"]])
def test_overlap_of_a_product_and_an_all_gather(link, tmp_path):
    small = [
        "--shape",
        "64x64x32",
        "--size",
        "64K",
        "--warmup",
        "1",
        "--iterations",
        "2",
        "--threads",
        "1",
    ]
    made = json.loads(
        bench("overlap", *small, *link, "--json", "-", "--plot", tmp_path / "overlap.svg").stdout
    )
    assert made["verified"]
    assert [*made["times_ms"]] == ["compute", "communicate", "sequential", "overlapped"]
    assert [*made["baselines_ms"]] == ([] if link else ["gloo sequential", "gloo overlapped"])
    assert bool(made["link"]) == bool(link) == bool(made["copies_ms"])
    assert "<svg" in (tmp_path / "overlap.svg").read_text()


@pytest.mark.data
@pytest.mark.parametrize("plain", [[], ["--plain-out"]], ids=["symmetric", "plain"])
def test_ways_to_gather_beside_a_product(plain):
    pytest.importorskip("triton", "3.6")
    small = ["--shape", "16x16x16", "--size", "256", "--warmup", "1", "--iterations", "1"]
    ways = ["--engine", "interpreter", "--gather", "kernel,copy-engine", "--comm-sms", "1,2"]
    made = json.loads(bench("overlap", *small, *ways, *plain, "--json", "-").stdout)
    assert made["verified"]
    found = [(way["gather"], way["comm_sms"], way["symmetric_out"]) for way in made["gathers"]]
    names = [("kernel on 1 SM", 1), ("kernel on 2 SMs", 2), ("copy-engine", 0)]
    assert found == [(*name, not plain) for name in names]
    assert "overlapped (kernel on 2 SMs)" in made["times_ms"]


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--gather", "kernel"], "or --engine interpreter"),
        (["--gather", "multicast"], "use --device cuda"),
        (["--gather", "fast"], "there is no gather 'fast'"),
        (["--comm-sms", "3"], "add --gather kernel"),
        (["--device", "cuda", "--gather", "multicast", "--plain-out"], "its own memory"),
    ],
)
def test_ways_that_a_device_lacks_are_refused(options, advice):
    rejected = CliRunner().invoke(app, ["bench", "overlap", *options], terminal_width=500)
    assert rejected.exit_code == 2
    assert advice in " ".join(rejected.output.replace("│", " ").split())


def test_an_overlap_that_gathers_nothing_fails(monkeypatch):
    class Idle:
        def wait(self):
            pass

    monkeypatch.setattr(gathers, "all_gather_async", lambda *arguments, **more: Idle())
    with weft.init() as world:
        _, checks = views.verify(
            overlap.Overlap(
                OverlapSettings(shape=Shape(8, 8, 4), size="64", baseline="none"), world
            ),
            world,
            lambda: None,
        )
    assert {name for name, check in checks.items() if check.wrong} == {"overlapped"}
