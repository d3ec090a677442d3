"""Operators as programs of PTO: their kernels are the plan, statement by statement, and on PTO's
simulator they compute what weft computes.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft.errors import PlanError
from weft.plan import Compute, Copy, Notify, Wait
from weft.plan.binding import bind
from weft.plan.proof import verify
from weft.schedules.operators import PLANNERS
from weft.schedules.workload import Request
from weft_tools.formats.pto.cores import by_cores
from weft_tools.formats.pto.writer import Sizes, write
from weft_tools.laboratory.mutants import deleted, places

KERNELS = {
    "comm": "communication_kernel.cpp",
    "comm1": "vector_kernel.cpp",
    "compute": "compute_kernel.cpp",
}
SIZES = Sizes(64, 64, 32)
PROGRAMS = [
    ("all_gather_matmul", "push"),
    ("all_gather_matmul", "ring"),
    ("all_gather_matmul", "pull"),
    ("matmul_reduce_scatter", "push"),
    ("matmul_reduce_scatter", "put"),
    ("matmul_reduce_scatter", "ring"),
    ("matmul_all_reduce", "two_shot"),
    ("all_gather", "pull"),
]


def planned(ranks, operator="all_gather_matmul", algorithm="push", pieces=2):
    plan = PLANNERS[operator].plan(Request(ranks, pieces, algorithm))
    return bind(plan, [SIZES.rows] * ranks)


def statements(files, lane):
    """The comments of a kernel's statements, and the statements, in order."""
    lines = [line.strip() for line in files[KERNELS[lane]].splitlines()]
    start = lines.index("switch (memory.rank) {")
    body = [line for line in lines[start + 1 :] if line.endswith(";") or line.startswith("//")]
    body = [line for line in body if line != "break;"]
    return body[::2], body[1::2]


@pytest.mark.parametrize(("operator", "algorithm"), PROGRAMS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_instruction_is_a_statement(ranks, operator, algorithm):
    plan = planned(ranks, operator, algorithm)
    split = by_cores(plan)
    verify(split)
    files = write(plan, SIZES)
    for lane, kernel in KERNELS.items():
        every = [(rank, i) for rank in range(ranks) for i in split.lanes[rank].get(lane, ())]
        assert bool(every) == (kernel in files)
        if not every:
            continue
        comments, made = statements(files, lane)
        assert comments == [f"// {instruction}" for _, instruction in every]
        calls = {
            "Wait": "wait(",
            "Notify": "notify(",
            "Compute": "product<",
            "Reduce": "sum<",
        }
        for (rank, instruction), statement in zip(every, made, strict=True):
            if isinstance(instruction, Copy):
                word = "put<" if instruction.src.rank == rank else "get<"
            else:
                word = calls[type(instruction).__name__]
            assert statement.startswith(word)
    if (operator, algorithm, ranks) == ("all_gather_matmul", "push", 2):  # the second of 2 pieces
        assert "wait(memory, ARRIVED_SIGNAL, 1, 2, 2, execution);" in files["compute_kernel.cpp"]


@pytest.mark.parametrize(("operator", "algorithm"), PROGRAMS)
def test_cube_cores_only_multiply(operator, algorithm):
    plan = planned(3, operator, algorithm, 3)
    split = by_cores(plan)
    for before, after in zip(plan.lanes, split.lanes, strict=True):
        kinds = {type(i) for i in after.get("compute", ())}
        assert kinds <= {Compute, Wait, Notify}
        assert not any(isinstance(i, Compute) for i in after.get("comm1", ()))
        assert after.get("comm") == before.get("comm")
        added = Counter(i for lane in after.values() for i in lane)
        added -= Counter(i for lane in before.values() for i in lane)
        assert all(isinstance(i, Wait | Notify) for i in added)


def test_an_order_that_is_left_out_between_cores_is_found():
    split = by_cores(planned(2, "matmul_reduce_scatter"))
    added = [
        mutant.plan
        for (_, instruction), mutant in zip(places(split), deleted(split), strict=True)
        if getattr(instruction, "signal", None) is not None
        and instruction.signal.name == "multiplied"
    ]
    assert added
    for plan in added:
        with pytest.raises(PlanError):
            verify(plan)


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
            (other,) = {"comm", "compute"} - {lane}
            assert files[KERNELS[other]] == whole[KERNELS[other]]


def run(*arguments, operator="all-gather-matmul"):
    words = ["plan", "export", operator, "--format", "pto", *map(str, arguments)]
    done = CliRunner().invoke(app, words, terminal_width=300)
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--algorithm push --shape 64x40x32", "tiles are multiples of 16"),
        ("--algorithm push --shape 65x64x32", "65 rows do not divide among 2 ranks"),
        ("--algorithm push --data missing", "has no a and b"),
    ],
)
def test_what_the_program_cannot_do_is_refused(arguments, words, tmp_path):
    code, said = run(tmp_path / "program", *arguments.split())
    assert code == 2
    assert words in said


def test_operators_without_a_program_are_refused(tmp_path):
    code, said = run(tmp_path / "program", operator="all-reduce")
    assert code == 2
    assert "pto is for all-gather, all-gather-matmul, matmul-reduce-scatter" in said


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
@pytest.mark.parametrize(("operator", "algorithm"), PROGRAMS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_program_computes_what_weft_computes(ranks, operator, algorithm, tmp_path):
    """CXX: a compiler of C++20 that PTO's headers need, g++ from 13 on or clang from 15 on."""
    rows, k, n = 64, 64, 32
    shape = f"{ranks * rows}x{k}x{n}"
    folder = tmp_path / "program"
    arguments = ("--algorithm", algorithm, "--pieces", 2, "--shape", shape, "--ranks", ranks)
    assert run(folder, *arguments, operator=operator.replace("_", "-")) == (0, "")
    done = subprocess.run(
        ["./run.sh", "-r", "sim"], cwd=folder, capture_output=True, text=True, timeout=350
    )
    assert done.returncode == 0, done.stderr
    multiplies = "matmul" in operator
    assert done.stdout.count("#wrong 0") == (5 if multiplies else 4)

    def read(name, dtype, columns):
        array = np.fromfile(folder / "data" / f"{name}.bin", dtype).reshape(-1, columns)
        return torch.from_numpy(array)

    def work():
        rank = weft.init().rank
        a = read(f"a{rank}", np.float16, k)
        if not multiplies:
            return weft.all_gather(a)
        return getattr(weft, operator)(a, read(f"b{rank}", np.float16, n), out_dtype=torch.float32)

    with weft.local_world(ranks) as world:
        for rank, wanted in enumerate(world.run(work)):
            dtype, columns = (np.float32, n) if multiplies else (np.float16, k)
            assert torch.equal(read(f"out{rank}", dtype, columns), wanted)


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
