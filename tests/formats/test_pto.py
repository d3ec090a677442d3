"""All-gather + matmul as a program of PTO: its kernels are the plan, statement by statement, and on
PTO's simulator it computes what weft computes.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft.formats.pto.writer import Sizes, write
from weft.plan import Wait
from weft.plan.binding import bind
from weft.plan.mutants import deleted, places
from weft.predict.planners import PLANNERS
from weft.schedules.workload import Request

KERNELS = {"comm": "communication_kernel.cpp", "compute": "compute_kernel.cpp"}
SIZES = Sizes(64, 64, 32)


def planned(ranks, algorithm="push", pieces=2):
    plan = PLANNERS["all_gather_matmul"].plan(Request(ranks, pieces, algorithm))
    return bind(plan, [SIZES.rows] * ranks)


def statements(files, lane):
    """The comments of a kernel's statements, and the statements, in order."""
    lines = [line.strip() for line in files[KERNELS[lane]].splitlines()]
    start = lines.index("switch (memory.rank) {")
    body = [line for line in lines[start + 1 :] if line.endswith(";") or line.startswith("//")]
    body = [line for line in body if line != "break;"]
    return body[::2], body[1::2]


@pytest.mark.parametrize("algorithm", ["push", "ring"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_instruction_is_a_statement(ranks, algorithm):
    plan = planned(ranks, algorithm)
    files = write(plan, SIZES)
    for lane in KERNELS:
        comments, made = statements(files, lane)
        every = [(rank, i) for rank in range(ranks) for i in plan.lanes[rank][lane]]
        assert comments == [f"// {instruction}" for _, instruction in every]
        calls = {"Wait": "wait(", "Notify": "notify(", "Copy": "put<", "Compute": "product<"}
        for (_, instruction), statement in zip(every, made, strict=True):
            assert statement.startswith(calls[type(instruction).__name__])
    if (algorithm, ranks) == ("push", 2):  # the second of 2 pieces
        assert "wait(memory, ARRIVED, 1, 2, 2, execution);" in files["compute_kernel.cpp"]


def test_what_is_deleted_from_the_plan_is_missing_in_the_kernel():
    plan = planned(2)
    whole = write(plan, SIZES)
    for (place, instruction), mutant in zip(places(plan), deleted(plan), strict=True):
        files = write(mutant.plan, SIZES)
        lane = place[1]
        before, after = (statements(each, lane) for each in (whole, files))
        assert len(after[0]) == len(before[0]) - 1
        assert [*before[0]].count(f"// {instruction}") == after[0].count(f"// {instruction}") + 1
        if isinstance(instruction, Wait):
            other = KERNELS[({*KERNELS} - {lane}).pop()]
            assert files[other] == whole[other]


def run(*arguments):
    words = ["plan", "export", "all-gather-matmul", "--format", "pto", *map(str, arguments)]
    done = CliRunner().invoke(app, words, terminal_width=300)
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--algorithm direct", "a program of PTO has no words for"),
        ("--algorithm push --shape 64x40x32", "tiles are multiples of 16"),
        ("--algorithm push --shape 65x64x32", "65 rows do not divide among 2 ranks"),
        ("--algorithm push --data missing", "has no a and b"),
    ],
)
def test_what_the_program_cannot_do_is_refused(arguments, words, tmp_path):
    code, said = run(tmp_path / "program", *arguments.split())
    assert code == 2
    assert words in said


def test_a_folder_is_asked_for():
    assert run("--algorithm", "push")[0] == 2


def test_saved_data_is_taken(tmp_path):
    rows = np.arange(64 * 32).reshape(64, 32) % 7
    for rank in range(2):
        half = rows.astype(np.float16) + rank
        np.savez(tmp_path / f"rank{rank}.npz", a=half, b=half[:32, :16])
    folder = tmp_path / "program"
    arguments = ("--algorithm", "push", "--shape", "128x32x16", "--data", tmp_path)
    assert run(folder, *arguments) == (0, "")
    found = np.fromfile(folder / "data/a1.bin", np.float16).reshape(64, 32)
    assert (found == rows + 1).all()
    assert "float16 (32, 32)" in run(folder, *arguments[:3], "64x32x16", *arguments[4:])[1]


@pytest.mark.skipif("PTO_ISA" not in os.environ, reason="PTO_ISA names no clone of pto-isa")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_program_computes_what_weft_computes(ranks, tmp_path):
    """CXX: a compiler of C++20 that PTO's headers need, g++ from 13 on or clang."""
    rows, k, n = 64, 64, 32
    shape = f"{ranks * rows}x{k}x{n}"
    folder = tmp_path / "program"
    arguments = ("--algorithm", "push", "--pieces", 2, "--shape", shape, "--ranks", ranks)
    assert run(folder, *arguments) == (0, "")
    done = subprocess.run(
        ["./run.sh", "-r", "sim"], cwd=folder, capture_output=True, text=True, timeout=350
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("#wrong 0") == 5

    def read(name, dtype, *size):
        return np.fromfile(folder / "data" / f"{name}.bin", dtype).reshape(size)

    def work():
        rank = weft.init().rank
        a = torch.from_numpy(read(f"a{rank}", np.float16, rows, k).copy())
        b = torch.from_numpy(read(f"b{rank}", np.float16, k, n).copy())
        return weft.all_gather_matmul(a, b, out_dtype=torch.float32)

    with weft.local_world(ranks) as world:
        for rank, wanted in enumerate(world.run(work)):
            made = read(f"out{rank}", np.float32, ranks * rows, n)
            assert (torch.from_numpy(made.copy()) == wanted).all()


def test_the_script_asks_for_what_it_lacks(tmp_path):
    assert run(tmp_path, "--algorithm", "push") == (0, "")
    environment = {key: value for key, value in os.environ.items() if key != "PTO_ISA"}
    for mode, words in (("npu", "no program that starts them"), ("sim", "names no clone")):
        done = subprocess.run(
            ["./run.sh", "-r", mode],
            cwd=Path(tmp_path),
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode != 0
        assert words in done.stderr
