"""The parts of the GPU benchmarks that need no GPU: refusals, the plan that they run, tables and
pictures.
"""

import os
import subprocess
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner
from weft_benchmarks.gpu import gathers, products, shared, slowest
from weft_benchmarks.gpu.matmul_from_host import matmul_from_host

import weft
from weft.bench.settings import AllGatherMatmul, Shape
from weft.cli import app
from weft.engines import engine

without = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@without
@pytest.mark.parametrize(
    "options",
    [["all-gather", "--device", "cuda"], ["all-gather-matmul", "--peers", "host"]],
    ids=" ".join,
)
def test_a_missing_gpu_is_reported_first(options):
    result = CliRunner().invoke(app, ["bench", *options])
    assert result.exit_code == 2
    assert "torch finds no GPU here" in result.output


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (["all-gather", "--device", "cuda", "--comm-sms", "4", "--baseline", "none"], "--baseline"),
        (
            ["all-gather", "--device", "cuda", "--comm-sms", "4", "--neighbours", "1"],
            "--neighbours",
        ),
        (["all-gather-matmul", "--peers", "host", "--baseline", "gloo"], "--baseline"),
        (["all-gather-matmul", "--peers", "host", "--neighbours", "1"], "--neighbours"),
    ],
)
def test_options_without_an_effect_are_refused(options, refused):
    result = CliRunner().invoke(app, ["bench", *options], terminal_width=500)
    assert result.exit_code == 2
    assert f"{refused}: has no effect with" in result.output


def test_the_kernel_is_refused_on_a_cpu():
    result = CliRunner().invoke(app, ["bench", "all-gather", "--algorithm", "kernel"])
    assert result.exit_code == 2
    assert "kernel runs on GPUs: add --device cuda" in result.output


def test_numbers_of_sms():
    result = CliRunner().invoke(
        app, ["bench", "all-gather", "--device", "cuda", "--comm-sms", "4,none"]
    )
    assert result.exit_code == 2
    assert "expected positive numbers" in result.output


@without
@pytest.mark.slow
def test_the_script_reports_a_missing_gpu(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "gpu" / "check.sh"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    import sys

    done = subprocess.run(
        [script, tmp_path],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert "finds no GPU here; nothing was run" in done.stderr


@pytest.mark.parametrize(("own", "away", "pieces"), [(8, 24, 5), (0, 7, 1), (6, 0, 2)])
def test_rows_from_another_memory(own, away, pieces):
    plan = matmul_from_host(pieces)
    weft.verify(plan)
    rows, weight = torch.randn(own + away, 6), torch.randn(6, 4)

    def multiply():
        out = torch.full((own + away, 4), float("nan"))
        tensors = {"a": rows[:own], "away": rows[own:], "out": out}
        engine(weft.init()).execute(plan, tensors, {"out": weight}, rows=(own, away))
        return out

    for streams in (False, True):
        with weft.local_world(1, streams=streams) as local:
            torch.testing.assert_close(local.run(multiply)[0], rows @ weight)


def test_results_are_shown(tmp_path):
    def row(kind, sms, gbps):
        time = {"median": 10.0, "min": 9.0, "p99": 12.0}
        return {
            "size_bytes": 1 << 20,
            "implementation": kind,
            "comm_sms": sms,
            "time_us": time,
            "algbw_gbps": gbps,
            "wrong": 0,
        }

    rows = [
        row("triton", 4, 50.0),
        row("triton", 8, 90.0),
        row("gluon", 4, 55.0),
        row("plain copy", None, 200.0),
    ]
    result = {"ranks": 2, "machine": {"gpu": "a GPU"}, "rows": rows}
    shown = StringIO()
    gathers.print_table(result, Console(file=shown, width=100))
    assert [
        line.replace("│", " ").split() for line in shown.getvalue().splitlines() if "gluon" in line
    ] == [["1,048,576", "gluon", "4", "10.0", "55.0", "0"]]
    gathers.draw(result, tmp_path / "sms.png")
    assert (tmp_path / "sms.png").stat().st_size > 1000


def wall(call, warmup, iterations):
    """Milliseconds of calls on a CPU."""
    from time import perf_counter

    times = []
    for _ in range(warmup + iterations):
        start = perf_counter()
        call()
        times.append(1e3 * (perf_counter() - start))
    return times[warmup:]


def test_fused_operators_of_ranks_that_share_a_device_are_verified(monkeypatch):
    found = shared.fused(2, "torch", (16, 8, 12), torch.float32, "cpu", wall)
    assert not any(found["wrong"].values())
    assert [*found["times_ms"]] == [*found["wrong"]]
    assert len(found["wrong"]) == len(shared.GATHERS) + len(shared.SCATTERS) + 4
    monkeypatch.setattr(shared, "matmul_reduce_scatter", lambda *arguments, **options: None)
    spoiled = shared.fused(2, "torch", (16, 8, 12), torch.float32, "cpu", wall)["wrong"]
    assert {name for name, count in spoiled.items() if count} == {
        f"scatter {name}" for name in shared.SCATTERS
    }


def test_rows_from_the_host_are_verified(monkeypatch):
    settings = AllGatherMatmul(shape=Shape(16, 8, 4), ranks=2, warmup=1, iterations=2)

    def rows_from_host():
        with weft.local_world(1, streams=True) as local:
            return slowest(local.run(products._measured, settings, wall))

    times, checks = rows_from_host()
    assert not any(check.wrong for check in checks.values())
    monkeypatch.setattr(products, "hardware", lambda: {"gpu": "a GPU", "gpus": 1, "sms": 1})
    monkeypatch.setattr(products, "versions", dict)
    times["pipelined triton"] = times["pipelined"]
    made = products.result_of(settings, times, [*checks.values()])
    shown = StringIO()
    products.print_times(made, Console(file=shown, width=120))
    assert "Verified: before and after timing" in shown.getvalue()
    monkeypatch.setattr(products, "multiply", lambda *operands: None)
    assert {name for name, check in rows_from_host()[1].items() if check.wrong} == {
        "compute",
        "sequential",
    }
