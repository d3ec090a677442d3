"""The scripts of benchmarks/gpu without a GPU: both parts go through all their steps, and the ladder
is climbed on the CPU.
"""

import csv
import importlib
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from weft.cli import app

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "gpu"
without = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture
def script(monkeypatch):
    """Imports a script by its name."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


def climbed(log, *options):
    """The exit status of a ladder on the CPU, and the state of each rung in its log."""
    command = [sys.executable, SCRIPTS / "ladder.py", log, "--device", "cpu", "--limit", "100"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    states = {line["rung"]: line for line in map(json.loads, log.read_text().splitlines())}
    return done, {name: line["state"] for name, line in states.items()}


def test_rungs_pass_on_a_cpu(tmp_path):
    """One of each kind: copies, kernels, products by torch and by the kernel."""
    rungs = [
        "one-sided, kernel",
        "all_gather kernel, odd rows",
        "reductions",
        "all_gather_matmul push, torch",
        "matmul_reduce_scatter put, triton",
    ]
    done, states = climbed(tmp_path / "log", "--only", *rungs)
    assert done.returncode == 0, done.stdout + done.stderr
    assert states == dict.fromkeys(rungs, "ok")


@pytest.mark.slow
def test_the_ladder_goes_on_after_a_rung_that_hung(tmp_path):
    (log := tmp_path / "log").write_text('{"rung": "late: signals", "state": "begun"}\n')
    words = "--prefix", "late: ", "--only", "signals", "barriers"
    done, states = climbed(log, *words)
    assert states == {"late: signals": "begun", "late: barriers": "ok"}
    assert done.returncode == 2  # not all passed, and there is nothing to continue with


def test_a_rung_that_fails_or_hangs_is_told(script, monkeypatch, tmp_path):
    """Failures are logged with their error, and the next rung follows; status 1 asks for another
    start.
    """
    ladder = script("ladder")
    climbs = {"signals": AssertionError("run 1: 3 of 8 elements are wrong"), "barriers": None}

    def climb(rung, device):
        if error := climbs[rung.name]:
            raise error

    monkeypatch.setattr(ladder, "climb", climb)
    log = tmp_path / "log"
    monkeypatch.setattr(sys, "argv", ["ladder.py", str(log), "--only", *climbs])
    assert ladder.main() == 2
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["rung"], line["state"]) for line in lines] == [
        ("signals", "begun"),
        ("signals", "FAILED"),
        ("barriers", "begun"),
        ("barriers", "ok"),
    ]
    assert lines[1]["error"] == "AssertionError: run 1: 3 of 8 elements are wrong"


HANGS = """
import sys, threading
import ladder
ladder.climb = lambda rung, device: threading.Event().wait()
sys.argv = ["ladder.py", sys.argv[1], "--limit", "0.5", "--only", "signals"]
ladder.main()
"""


def test_a_rung_that_hangs_ends_the_ladder_with_stacks(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HANGS, tmp_path / "log"],
        env=os.environ | {"PYTHONPATH": str(SCRIPTS)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Thread" in done.stderr
    assert "in climb" in done.stderr or "in <lambda>" in done.stderr
    [line] = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert line == {"rung": "signals", "state": "begun"}


@pytest.mark.slow
def test_unknown_rungs_are_refused(tmp_path):
    (log := tmp_path / "log").touch()
    done, states = climbed(log, "--only", "all_gather magic")
    assert done.returncode == 2
    assert "there are no rungs ['all_gather magic']" in done.stderr
    assert not states


def test_rungs_of_a_gpu_are_checked(script):
    """Wrong results, and those that are not numbers, are errors."""
    rungs = script("rungs")
    exact = torch.ones(4, dtype=torch.float64)
    rungs.close(exact.bfloat16(), exact, "right")
    for wrong in (0.9 * exact, exact.clone().fill_(float("nan"))):
        with pytest.raises(AssertionError, match="run 0: the error is"):
            rungs.close(wrong, exact, "run 0")
    with pytest.raises(AssertionError, match="run 0: 1 of 4 elements are wrong"):
        rungs.equal(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5]), "run 0")
    names = [rung.name for rung in rungs.rungs(on_gpu=True)]
    assert len({*names}) == len(names)
    assert {rung.name for rung in rungs.rungs(on_gpu=False)} < {*names}


def test_tables_of_results(script, tmp_path, capsys):
    """Each file has a section; what is missing, broken or of another form is told."""
    question = {"verdict": "bad", "means": "copies are made by SMs", "answer": {}, "seconds": 0.1}
    fine = question | {"verdict": "fine", "means": "all streams run"}
    rate = {"shape": {"m": 8, "k": 4, "n": 2}, "tile": [128, 256, 64, 8, 3], "ratio": 0.91}
    rate |= {"kernel_tflops": 612.0, "torch_mm_tflops": 672.5, "wrong": {"kernel": 1}}
    times = {"times_ms": {"gather push": 1.25}, "wrong": {"gather push": 0}, "peak_gib": 9.5}
    row = {"size_bytes": 4096, "operation": "put", "implementation": "kernel", "wrong": 0}
    row |= {"comm_sms": 4, "time_us": {"median": 7.5}, "algbw_gbps": 0.5}
    contents = {
        "assumptions.json": {"machine": {"gpu": "H"}, "questions": {"q/a": fine, "q/b": question}},
        "late.json": {"unexpected": 1},
        "rates.json": {"products": [rate, {"shape": rate["shape"], "tile": None, "error": "E"}]},
        "fused.json": {
            "worlds": [
                {"ranks": 2, "products": "torch", **times},
                {"ranks": 4, "products": "triton", "error": "OutOfMemoryError"},
            ]
        },
        "bench.json": {
            "p2p": {"rows": [row], "verified": True},
            "host": {"times_ms": {"compute": {"median": 2.0}}, "limit_ratio": 1.1},
        },
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "ladder.jsonl").write_text(
        '{"rung": "signals", "state": "ok", "seconds": 0.5}\n{"rung": "graph", "state": "begun"}\n'
    )
    script("summary").main(tmp_path)
    printed = capsys.readouterr().out
    for line in (
        "# Results",
        "| q/b | bad | copies are made by SMs |",
        "cannot be read (KeyError: 'machine')",
        "1 of 2 rungs begun passed, in 0.5 s",
        "| graph | HUNG |  |  |",
        "| 8x4x2 | 128x256x64x8x3 | 612 | 672.5 |  | 0.91 | 1 |  /  /  |  |",
        "| 8x4x2 | own |  |  |  |  | 0 |  /  /  | E |",
        "| gather push | 1.25 | - |",
        "- 4 triton: OutOfMemoryError",
        "| 4096 | put | kernel |  | 4 | 7.5 | 0.5 | 0 |",
        "compute 2 ms; limit ratio 1.100; WRONG, or not complete",
    ):
        assert line in printed
    assert printed.index("q/b") < printed.index("q/a")
    (tmp_path / "rates.json").write_text('{"products": [')
    script("summary").main(tmp_path)
    assert "## rates.json\n\nno result: see all.log" in capsys.readouterr().out


def test_results_are_joined(script, tmp_path):
    collect = script("collect")
    collect.main(tmp_path, out := tmp_path.parent / "joined.json")
    assert not out.exists()
    (tmp_path / "whole.json").write_text('{"verified": true}')
    (tmp_path / "cut.json").write_text('{"verified": tr')
    collect.main(tmp_path, out)
    assert json.loads(out.read_text()) == {
        "whole": {"verified": True},
        "cut": {"error": "incomplete"},
    }


def test_commands_are_found_by_metadata(script, monkeypatch, tmp_path):
    """Where the benchmarks are copied, not installed."""
    pytest.importorskip("tomllib")
    from importlib.metadata import distributions

    monkeypatch.chdir(SCRIPTS.parents[1])
    script("metadata").main(tmp_path)
    [found] = distributions(path=[str(tmp_path)])
    assert found.name == "torch-weft-tools"
    assert {entry.name for entry in found.entry_points.select(group="weft.commands")} == {
        *("bench", "calibrate", "predict", "report", "show")
    }


STEPS = {
    "first.sh": "build, doctor, ladder, lazy, late-variables, rates, processes",
    "second.sh": "build, tests, fused, from-host, all-gather, p2p, processes-torch, rates",
}
PYTHON = """#!/bin/bash
# A Python that sees a GPU, does nothing and notes what it was to do.
case "$*" in
  *sys.executable*) echo "$0" ;;
  *device_count*) echo 1 ;;
  *) echo "$*" >>"$0.log" ;;
esac
"""


@pytest.fixture
def walked(tmp_path):
    """Runs a script where every program succeeds at once; the names of its steps, and the arguments
    of Python.
    """

    def walk(name):
        (python := tmp_path / "python").write_text(PYTHON)
        python.chmod(0o755)
        (tmp_path / "tmp").mkdir()
        places = {"OUT": f"{tmp_path / 'out'}", "TMPDIR": f"{tmp_path / 'tmp'}"}
        environment = os.environ | places | {"PYTHON": str(python)}
        done = subprocess.run([SCRIPTS / name], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SKIPPED" not in done.stdout
        calls = [line.split() for line in (tmp_path / "python.log").read_text().splitlines()]
        return re.findall(r"^== (.*) \(at", done.stdout, re.MULTILINE), calls

    return walk


class Reached(Exception):
    """A benchmark would begin."""


def reached(*arguments, **options):
    raise Reached


@pytest.mark.parametrize("part", ["first.sh", "second.sh", "five_systems.sh"])
def test_every_step_is_a_command_that_exists(part, walked, monkeypatch):
    """With a GPU all steps are reached, and the options of each benchmark are accepted, up to where
    it would begin.
    """
    steps, calls = walked(part)
    assert ", ".join(steps).startswith(STEPS.get(part, "build, 1-streaming"))
    assert len({*steps}) == len(steps)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for begin in (
        "weft_tools.bench.threads.in_threads",
        "weft_tools.bench.fused.measure",
        "weft_tools.bench.gpu.products.from_host",
        "weft_tools.cli.running.on_ranks",
    ):
        monkeypatch.setattr(begin, reached)
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    launched |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    benches = [call for call in calls if "bench" in call and "weft" in call]
    assert len(benches) >= (1 if part == "first.sh" else 4)
    for call in benches:
        words = call[call.index("bench") :]
        environment = launched if "torch.distributed.run" in call else {}
        with monkeypatch.context() as given:
            given.setattr("weft.cli.options.failing", lambda *names: nullcontext())
            for name, value in environment.items():
                given.setenv(name, value)
            found = CliRunner().invoke(app, words)
        assert isinstance(found.exception, Reached), (words, found.output)
    for script in {word for call in calls for word in call if word.endswith(".py")}:
        assert Path(script).exists()


@without
@pytest.mark.slow
@pytest.mark.timeout(290)
@pytest.mark.parametrize("part", STEPS)
def test_a_part_goes_through_all_steps_without_a_gpu(part, tmp_path):
    """Steps fail or check themselves on the CPU; the table is printed, and the status says that
    nothing was measured.
    """
    (tmp_path / "tmp").mkdir()
    out = tmp_path / "out"
    places = {"OUT": str(out), "TMPDIR": str(tmp_path / "tmp"), "PYTHON": sys.executable}
    done = subprocess.run([SCRIPTS / part], env=os.environ | places, capture_output=True, text=True)
    assert done.returncode == 1
    assert not done.stderr
    assert "finds no GPU here" in done.stdout
    assert "Traceback" not in done.stdout
    begun = re.findall(r"^== (.*) \(at", done.stdout, re.MULTILINE)
    assert ", ".join(begun) == STEPS[part]
    assert "SKIPPED" not in done.stdout
    assert "# Results" in done.stdout
    assert "FAILED (12" not in done.stdout  # a command that is not found, or beyond its limit
    files = {file.name for file in out.rglob("*")}
    assert "all.log" in files
    assert len(files) <= 8
    if part == "first.sh":
        assert "   ladder: done" in done.stdout
    assert int(re.findall(r"kernels: (\d+) compiled", done.stdout)[0]) > 0


def test_the_shape_of_the_linear_layer_is_the_published_one_of_each_rank():
    """The published K is that of all ranks, and the benchmark's that of each."""
    with open(SCRIPTS.parent / "published_results.csv") as file:
        [row, *_] = [
            each for each in csv.DictReader(file) if each["operation"] == "matmul_all_reduce"
        ]
    m, k, n, ranks = (int(row[name]) for name in ("m", "k", "n", "ranks"))
    [line] = re.findall(r"matmul-all-reduce .*", (SCRIPTS / "five_systems.sh").read_text())
    assert f"-n {ranks} --shape {m}x{k // ranks}x{n} " in line
