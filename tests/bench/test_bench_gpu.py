"""The parts of the GPU benchmarks that need no GPU: rejections, the plan that they run, tables and
pictures.
"""

import os
from io import StringIO

import pytest
import torch
from rich.console import Console
from support.interpreter import interpreted
from support.ranks import on_ranks
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft.cli.values import Shape
from weft.engines import engine
from weft.plan.launch import Launch
from weft_tools.bench import benchmarks, plots, saved, sweep
from weft_tools.bench.gpu import products, shared, slowest
from weft_tools.bench.gpu.matmul_from_host import matmul_from_host
from weft_tools.bench.gpu.rates import product_rates
from weft_tools.bench.settings.fused import AllGatherMatmul
from weft_tools.bench.settings.sweeps import AllGather
from weft_tools.bench.threads import in_threads


def rejected(*options):
    """The reason for which a benchmark is rejected, on one line."""
    result = CliRunner().invoke(app, ["bench", *options])
    assert result.exit_code == 2
    return " ".join(result.output.replace("│", " ").split())


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
    ("options", "rejected"),
    [
        (["all-gather-matmul", "--peers", "host", "--baseline", "gloo"], "--baseline"),
        (["all-gather-matmul", "--peers", "host", "--neighbours", "1"], "--neighbours"),
    ],
)
def test_options_without_an_effect_are_refused(options, rejected):
    result = CliRunner().invoke(app, ["bench", *options], terminal_width=500)
    assert result.exit_code == 2
    assert f"{rejected}: has no effect with" in result.output


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--algorithm", "kernel"], "kernels run on GPUs: use --device cuda, or --engine"),
        (["--comm-sms", "4"], "kernels run on GPUs: use --device cuda, or --engine interpreter"),
        (["--tile", "4K", "--engine", "streams"], "kernels run on GPUs"),
        (["--warps", "4"], "kernels run on GPUs"),
        (["--engine", "interpreter", "--compiler", "gluon"], "Gluon has no interpreter: use"),
        (["--compiler", "nvcc"], "expected triton, gluon or both"),
        (["--device", "cuda", "--baseline", "torch,gloo"], "there is no baseline 'gloo' on this"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_kernels_need_a_gpu_or_the_interpreter(options, why):
    assert why in rejected("all-gather", *options)


def test_torch_is_a_baseline_of_all_gather_only():
    why = rejected("all-reduce", "--device", "cuda", "--baseline", "torch")
    assert "torch's symmetric memory is compared in all-gather" in why


def test_numbers_of_sms():
    result = CliRunner().invoke(
        app, ["bench", "all-gather", "--device", "cuda", "--comm-sms", "4,none"]
    )
    assert result.exit_code == 2
    assert "expected positive numbers" in result.output


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


def kernels(**options):
    """All-gathers of ranks that are threads, with the same code as on a GPU."""
    sweep.Sweep._sizes = lambda *_: (1, 1, 1)
    chosen = {"sizes": "1004", "dtype": "bfloat16", "warmup": 0, "iterations": 1} | options
    kernel = {"engine": "interpreter", "tile": "1K", "warps": "1", "ranks": 2}
    return in_threads(sweep.measure, AllGather(**kernel, **chosen))


def measured_by_the_interpreter(_):
    return kernels(comm_sms="1,2")


@pytest.mark.slow
def test_kernels_are_swept_and_verified(tmp_path):
    """Every combination is a line; results are verified, and drawn over SMs."""
    result = on_ranks(measured_by_the_interpreter, 1)[0]
    assert result["verified"]
    assert result["options"]["comm_sms"] == "1,2"
    names = dict.fromkeys(row["implementation"] for row in result["rows"])
    kernel = "kernel (triton, {} SMs, 1 KiB, 1 warps)".format
    assert [*names] == ["weft", "weft (plain)", kernel(1), kernel(2)]
    swept = [row for row in result["rows"] if "comm_sms" in row]
    assert len(swept) == 2 * 2  # SMs, places
    assert {(row["tile_bytes"], row["warps"], row["gluon"]) for row in swept} == {(1024, 1, False)}
    printed = StringIO()
    sweep.print_tables(result, Console(file=printed, width=200))
    assert kernel(2) in printed.getvalue()
    assert "vs" not in printed.getvalue()  # a kernel is no baseline
    assert benchmarks.shown(result).draw is plots.draw_sweep
    plots.draw_sweep(result, tmp_path / "sms.png")
    assert (tmp_path / "sms.png").stat().st_size > 1000
    [header, *lines] = saved.to_csv(result).splitlines()
    assert "comm_sms" in header
    assert len(lines) == len(result["rows"])


def nothing_is_moved(_):
    os.environ["TRITON_INTERPRET"] = "1"
    from weft.gpu.kernels.all_gather import Distances

    Distances.size = 0  # the kernel waits and notifies, but has no tiles
    return kernels(comm_sms="1")


def test_a_kernel_that_moves_nothing_is_found():
    result = on_ranks(nothing_is_moved, 1)[0]
    wrong = {row["implementation"]: row["wrong"] for row in result["rows"]}
    assert not wrong["weft"]
    assert wrong["kernel (triton, 1 SMs, 1 KiB, 1 warps)"]
    assert not result["verified"]


def test_launches_are_all_combinations():
    settings = AllGather(device="cuda", comm_sms="4,8", tile="8K,32K", warps="4")
    assert settings.launches == [
        Launch(sms, tile << 10, 4, gluon)
        for gluon in (False, True)
        for tile in (8, 32)
        for sms in (4, 8)
    ]
    assert AllGather(compiler="triton").launches == [Launch()]
    assert AllGather().launches == []


def wall(call, warmup, iterations):
    """Milliseconds of calls on a CPU."""
    from time import perf_counter

    times = []
    for _ in range(warmup + iterations):
        start = perf_counter()
        call()
        times.append(1e3 * (perf_counter() - start))
    return times[warmup:]


def rates_of_products(_, moves=True):
    """What tests/gpu/test_gpu.py asks of a GPU, with smaller shapes."""
    interpreted()
    from weft.gpu.kernels.all_gather_matmul import ProductKernel

    if not moves:
        ProductKernel.__call__ = lambda *arguments: None
    found = product_rates(
        [(24, 16, 40), (30, 8, 24)], torch.float16, 1, 2, torch.device("cpu"), wall
    )
    return found, torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


def test_rates_of_products_are_verified():
    [(rows, reduced)] = on_ranks(rates_of_products, 1)
    assert [row["wrong"] for row in rows] == [{"kernel": 0, "torch.mm": 0}] * 2
    assert rows[0]["shape"] == {"m": 24, "k": 16, "n": 40}
    for row in rows:
        times = {name: row[f"{name}_ms"]["median"] for name in ("torch_mm", "torch_mm_default")}
        assert row["ratio"] == min(times.values()) / row["kernel_ms"]["median"] > 0
    assert reduced  # as before


def test_a_product_kernel_that_stores_nothing_is_found():
    [(rows, _)] = on_ranks(rates_of_products, 1, False)
    assert [(row["wrong"]["kernel"], row["wrong"]["torch.mm"]) for row in rows] == [
        (24 * 40, 0),
        (30 * 24, 0),
    ]


def test_fused_operators_of_ranks_that_share_a_device_are_verified(monkeypatch):
    found = shared.fused(4, "torch", (16, 8, 12), torch.float32, "cpu", wall)
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
    monkeypatch.setattr(products, "versions", lambda device: {})
    times["pipelined triton"] = times["pipelined"]
    made = products.result_of(settings, times, [*checks.values()])
    shown = StringIO()
    products.print_times(made, Console(file=shown, width=120))
    assert "Verified: before and after timing" in shown.getvalue()
    monkeypatch.setattr(products, "product_on", lambda device: lambda *operands: None)
    assert {name for name, check in rows_from_host()[1].items() if check.wrong} == {
        "compute",
        "sequential",
    }
