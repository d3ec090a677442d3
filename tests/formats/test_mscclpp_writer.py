"""Plans as execution plans of MSCCL++: what goes out comes in again as an equal plan."""

from __future__ import annotations

import json
import os
import random
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from weft.cli import app
from weft.plan.binding import bind
from weft.plan.proof import problems
from weft.schedules.operators import PLANNERS
from weft.schedules.workload import Request
from weft_tools.formats.mscclpp.exported import exported
from weft_tools.formats.mscclpp.reader import read
from weft_tools.formats.mscclpp.writer import crossed, write
from weft_tools.formats.ordinary import ordinary
from weft_tools.laboratory.imported import differs_in_orders
from weft_tools.laboratory.mutants import edited, places
from weft_tools.laboratory.random_plans import Choices, random_plan

EXPORTED = [
    ("all_gather", "push", 4, 2),
    ("all_gather", "ring", 8, 1),
    ("all_gather", "eager", 3, 1),
    ("all_reduce", "ring", 3, 1),
    ("all_reduce", "one_shot", 4, 1),
    ("all_reduce", "two_shot", 3, 2),
    ("all_to_all", "eager", 4, 1),
    ("reduce_scatter", "push", 4, 1),
    ("reduce_scatter", "eager", 3, 1),
]


def planned(operator, algorithm, ranks, pieces):
    plan = PLANNERS[operator].plan(Request(ranks, pieces, algorithm))
    return exported(bind(plan, plan.pieces))


@pytest.mark.parametrize("which", EXPORTED, ids=str)
def test_a_collective_comes_in_again_as_an_equal_plan_that_computes_it(which):
    plan = planned(*which)
    again = read(json.loads(json.dumps(write(plan))))
    assert again.plan == plan
    assert again.defects == []
    assert problems(plan) == []
    assert differs_in_orders(ordinary(plan)) == ""


def random_plans(dice):
    """Right plans at random that an execution plan has words and room for, and their files."""
    while True:
        hosts = (0,) * dice.randint(1, 4)
        plan = random_plan(dice, Choices(hosts, moves=dice.randint(1, 8), averages=False))
        if plan.pieces:
            plan = bind(plan, [dice.randint(1, 3) * plan.pieces[0]])
        try:
            made = exported(plan)
            file = write(made)
        except ValueError:
            continue
        yield made, json.loads(json.dumps(file))


def test_random_plans_come_in_again_as_equal_plans():
    for plan, file in islice(random_plans(random.Random(5)), 150):
        again = read(file, result=plan.result)
        assert again.plan == plan
        assert again.defects == []
        assert write(again.plan) == file
        assert problems(plan) == []


def test_what_a_plan_lacks_its_file_lacks():
    plan = planned("all_gather", "push", 3, 1)
    for place, _ in places(plan):
        less = edited(plan, place)
        try:
            again = read(write(less))
        except (AssertionError, IndexError, ValueError):
            continue  # a wait of a number that no notify has
        assert [*again.defects, *problems(again.plan)], place


def run(*arguments):
    done = CliRunner().invoke(app, ["plan", "export", *map(str, arguments)], terminal_width=300)
    return done.exit_code, done.output


def test_the_command_writes_a_file_that_the_other_reads(tmp_path):
    file = tmp_path / "gather.json"
    assert run("all-gather", "-n", 8, "--algorithm", "ring", file) == (0, "")
    code, said = run("all-gather", "--ranks", 8, "--algorithm", "ring")
    assert code == 0
    assert json.loads(said) == json.loads(file.read_text())
    done = CliRunner().invoke(app, ["plan", "import", str(file)])
    assert "allgather on 8 ranks, at most 1 thread blocks each" in done.output
    assert "verified" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("all-gather --algorithm pull", "gets rows from another offset"),
        ("all-gather --algorithm two_shot", "is planned with pull"),
        ("broadcast --algorithm push", "mscclpp has no broadcast"),
        ("all-gather-matmul", "mscclpp is for collectives"),
        ("all-gather --shape 8x8x8", "has an effect with --format pto only"),
        ("all-reduce --format pto out", "pto is for all-gather, all-gather-matmul"),
        ("all-reduce -n 8 --algorithm ring", "the executor has room for 64"),
        ("barrier", "has one input and one output"),
    ],
)
def test_what_the_executor_cannot_do_is_refused(arguments, words):
    code, said = run(*arguments.split())
    assert code == 2
    assert words in " ".join(said.replace("│", " ").split())


def test_crossed_gets_are_named():
    assert next(crossed(write(planned("all_gather", "pull", 2, 1)))).startswith("rank 0, thread")


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """MSCCL++'s own classes of operations, of the clone that MSCCLPP names."""
    if "MSCCLPP" not in os.environ:
        pytest.skip("MSCCLPP names no clone of MSCCL++")
    package = tmp_path / "mscclpp"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "language").symlink_to(Path(os.environ["MSCCLPP"]) / "python/mscclpp/language")
    monkeypatch.syspath_prepend(str(tmp_path))
    from mscclpp.language.internal import operations, types

    yield SimpleNamespace(**{**vars(types), **vars(operations)})
    for name in [name for name in sys.modules if name.partition(".")[0] == "mscclpp"]:
        del sys.modules[name]


@pytest.mark.parametrize("which", EXPORTED, ids=str)
def test_their_classes_write_the_same_operations(theirs, which):
    def chunks(operation, key):
        return [
            theirs.RemoteChunk(None, each["index"], each["size"], each["buffer_id"])
            if "buffer_id" in each
            else theirs.LocalChunk(theirs.BufferType(each["type"]), each["index"], each["size"])
            for each in operation[key]
        ]

    def made(operation):
        name, memory = operation["name"], theirs.ChannelType.memory
        match name:
            case "nop":
                return theirs.SyncOperation()
            case "signal" | "rlxsignal":
                return theirs.SignalOperation(
                    operation["channel_ids"], memory, relaxed=name == "rlxsignal"
                )
            case "wait" | "rlxwait":
                return theirs.WaitOperation(
                    operation["channel_ids"], memory, relaxed=name == "rlxwait"
                )
            case "sem_acquire":
                return theirs.SemaphoreAcquireOperation(operation["semaphore_ids"])
            case "sem_release":
                return theirs.SemaphoreReleaseOperation(operation["semaphore_ids"])
        sources, targets = chunks(operation, "src_buff"), chunks(operation, "dst_buff")
        match name:
            case "copy":
                return theirs.CopyOperation(sources, targets)
            case "put":
                return theirs.PutOperation(sources, targets, [0], memory)
            case "re":
                return theirs.ReduceOperation(sources, targets)
            case "rre":
                return theirs.ReduceOperation(
                    sources[:1], targets, remote_src_buff=sources[1:], channel_type=memory
                )
        return theirs.GetOperation(sources, targets, [0], memory)

    for gpu in write(planned(*which))["gpus"]:
        for block in gpu["threadblocks"]:
            for operation in block["ops"]:
                again = made(operation).to_dict()
                if "channel_ids" in again and "channel_ids" in operation:  # theirs is a set
                    assert sorted(again["channel_ids"]) == sorted(operation["channel_ids"])
                again.pop("channel_ids", None)
                assert again == {k: v for k, v in operation.items() if k != "channel_ids"}
