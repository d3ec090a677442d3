"""The flight recorder: a failure leaves files from which `weft doctor --flight` names the rank and
the call.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from support.ranks import die, group, on_ranks, start, stream_world
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft.doctor import flight as doctor
from weft.doctor.causes import difference, explanation
from weft.doctor.recording import FlightRecording, Rank, RecordedCall, read
from weft.world import flight


def fail(world, folder, how):
    """Rank 1 differs from the others after three calls."""
    os.environ[flight.VARIABLE] = str(folder)
    for _ in range(3):
        weft.all_reduce(torch.ones(4))
    late = 0.5 if how == "late" else None
    if world.rank == 1:
        if how == "die":
            die()
        if how == "raise":
            while not all(world.executor.peer_call(peer, 4) for peer in (0, 2)):
                pass  # until they wait for it in call 4
            raise KeyError("lost my keys")
        if how == "operator":
            weft.barrier()
        if how == "late":
            world.mesh.receive(0, 30.0)  # until the others give up
            os._exit(0)
    rows = 5 if how == "shape" and world.rank == 1 else 4
    weft.all_reduce(torch.ones(rows), timeout=late)


@pytest.mark.parametrize(
    ("how", "cause", "advice"),
    [
        ("die", "rank 1 (pid {pid}) died before call 4, all_reduce((4,) float32", "dmesg"),
        (
            "raise",
            "rank 1 (pid {pid}) failed with KeyError: 'lost my keys' before call 4, all_reduce((4,)",
            "its own output says why",
        ),
        (
            "operator",
            "as call 4 ranks 0, 2 made all_reduce((4,) float32, op=sum); rank 1 made barrier()",
            "a branch, a loop or a shape",
        ),
        (
            "shape",
            "ranks 0, 2 made all_reduce((4,) float32, op=sum); rank 1 made all_reduce((5,) float32",
            "a branch, a loop or a shape",
        ),
        (
            "late",
            "rank 1 has not made call 4, all_reduce((4,) float32, op=sum), for which ranks 0, 2 "
            "waited ",
            "py-spy dump --pid {pid}",
        ),
    ],
)
def test_the_rank_and_the_call_are_named(tmp_path, how, cause, advice):
    outcomes = start(fail, 3, tmp_path, how)
    [found] = read([tmp_path])
    pid = found.ranks[1].pid
    why, what = explanation(found, difference(found))
    assert cause.format(pid=pid) in why
    assert advice.format(pid=pid) in what
    for rank in (0, 2):
        error = outcomes[rank].error
        assert isinstance(error, weft.WeftError)
        [file] = tmp_path.glob(f"*-rank{rank}.json")
        assert f"weft doctor --flight {file} shows the calls of all ranks" in str(error)
    # one file stands for those of all ranks beside it
    assert read([file]) == [found]
    printed = StringIO()
    # wide enough for a column of each rank, as on a busy machine, where one begins a call later
    doctor.diagnose([tmp_path], Console(file=printed, width=300, soft_wrap=True))
    assert re.search(r"│ 3 +│ all_reduce\(\(4,\) float32, op=sum\) │ .* ended ", printed.getvalue())
    if how in ("die", "late"):
        assert re.search(r"│ 4 .* for rank 1 +│ not made +│", printed.getvalue())
        assert "rank 1: wrote no file" in printed.getvalue()


def fail_in_group(world, folder):
    os.environ[flight.VARIABLE] = str(folder)
    pair = dist.new_group([0, 1], backend="weft", group_desc="the [pair]")
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(2)]
    for work in works:
        work.wait()
    if dist.get_rank() == 1:
        die()
    dist.broadcast(torch.ones(6), 0, group=pair)


def test_calls_through_torch_distributed_have_their_groups_name(tmp_path):
    outcomes = start(fail_in_group, 3, tmp_path, context=group)
    assert outcomes[1] is None
    found = {each.group.partition(" ")[2]: each for each in read([tmp_path])}
    pair = found["the [pair]"]
    why, _ = explanation(pair, difference(pair))
    assert f"rank 1 (pid {pair.ranks[1].pid}) died before call" in why
    assert "broadcast((6,) float32, source=0)" in why
    printed = StringIO()
    doctor.diagnose([tmp_path], Console(file=printed, width=300, soft_wrap=True))
    assert "the [pair], failed at" in printed.getvalue()
    if "default_pg" in found:  # rank 2 may only learn of the death when it leaves
        made = [call.call for call in found["default_pg"].ranks[1].calls.values()]
        assert "all_reduce((4,) float32, op=sum)" in made


def ended(world):
    """Whether each call of this rank has ended: of programs, allocations and asynchronous ones."""
    world.empty(4)
    weft.all_gather_matmul(torch.ones(4, 4), torch.ones(4, 4))
    weft.all_reduce_async(torch.ones(4)).wait()
    weft.all_reduce(torch.ones(4))
    return [(number, end) for number, _, end, _ in world.executor.made_calls(world.rank)]


@pytest.mark.parametrize("context", [None, stream_world], ids=["host", "streams"])
def test_calls_are_recorded_with_their_ends(context):
    for found in on_ranks(ended, 2, **({"context": context} if context else {})):
        assert [number for number, _ in found] == [*range(1, len(found) + 1)]
        assert len(found) > 3
        assert all(end for _, end in found), found


def divide():
    return weft.all_reduce(torch.ones(4)).numel() // 0


def fail_alone(_, folder, variable):
    os.environ["WEFT_CACHE"] = str(folder)
    if variable is not None:
        os.environ[flight.VARIABLE] = variable
    messages = []
    for _ in range(10):
        with weft.local_world(2) as local:
            with contextlib.suppress(ZeroDivisionError):
                local.run(divide)
            messages += [str(world.failure.recorded) for world in local.worlds]
    return messages


def test_the_cache_directory_has_the_newest_worlds_alone(tmp_path):
    [messages] = on_ranks(fail_alone, 1, tmp_path, None)
    files = [*(tmp_path / "flight").iterdir()]
    assert len({flight.world_of(file) for file in files}) == 8
    assert messages[-1] in map(str, files)


def test_1_is_as_without_the_variable(tmp_path):
    [messages] = on_ranks(fail_alone, 1, tmp_path, "1")
    assert messages[-1].startswith(str(tmp_path / "flight"))


def test_a_file_that_cannot_be_written_is_logged(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv(flight.VARIABLE, str(tmp_path / "file"))
    with weft.local_world(2) as local, pytest.raises(ZeroDivisionError):
        local.run(divide)
    assert "the flight recorder cannot write the latest calls" in caplog.text


def test_nothing_is_written_when_it_is_off(tmp_path):
    [messages] = on_ranks(fail_alone, 1, tmp_path, "0")
    assert {*messages} == {"None"}
    assert not (tmp_path / "flight").exists()


@contextlib.contextmanager
def recorded_world():
    """A world made where the variable names a folder."""
    os.environ[flight.VARIABLE] = os.environ["WEFT_CACHE"] + "/sigterm"
    with weft.init(timeout=20) as made:
        yield made


def end_by_sigterm(world):
    weft.all_reduce(torch.ones(4))
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    weft.all_reduce(torch.ones(4))


def test_sigterm_writes_a_file_and_ends_the_rank(tmp_path, monkeypatch):
    outcomes = start(end_by_sigterm, 2, context=recorded_world)
    assert outcomes[1] is None
    message = str(outcomes[0].error)
    assert message.startswith("rank 1 (pid")
    file = re.search(r"--flight (\S+)", message)[1]
    own = json.loads(Path(file.replace("rank0", "rank1")).read_text())
    assert own["error"] == f"SystemExit: {flight.STOPPED}"


def recording(*ranks):
    return FlightRecording("w", "", [*ranks])


def rank(number, calls, error="PeerTimeout: …", lost="", written=10_000_000_000):
    made = {each.number: each for each in calls}
    return Rank(number, number, 100 + number, "", made, error, written, lost)


def call(number, text="all_reduce((4,) float32)", ended=True):
    return RecordedCall(number, text, "plan", number * 1_000_000, ended)


@pytest.mark.parametrize(
    ("ranks", "number", "why"),
    [
        # of ranks on other hosts it is unknown whether a call has ended
        (
            [
                rank(0, [call(6), call(7), call(8, ended=False)]),
                rank(1, [call(6, ended=None), call(7, ended=None)], error="", written=0),
            ],
            8,
            "rank 1 has not made call 8",
        ),
        # what Ctrl-C ends is no cause: rank 1 was missing
        (
            [
                rank(0, [call(1), call(2, ended=False)], error="KeyboardInterrupt: "),
                rank(1, [call(1)], error="KeyboardInterrupt: "),
            ],
            2,
            "rank 1 has not made call 2, all_reduce",
        ),
        (
            [rank(0, [call(7, ended=False)]), rank(1, [], error="", written=0)],
            7,
            "it has made no call",
        ),
        (
            [rank(0, [call(7, ended=False)]), rank(1, [call(7)])],
            7,
            "all ranks have made call 7, all_reduce((4,) float32), and rank 0 did not end it",
        ),
        (
            [rank(0, [call(7)]), rank(1, [call(7)], error="OSError: disk full")],
            0,
            "rank 1 (pid 101) failed with OSError: disk full before its next call",
        ),
        ([rank(0, [call(7)]), rank(1, [call(7)])], 0, "it failed outside of them"),
        (
            [
                rank(0, [call(7, "x", ended=False)]),
                rank(1, [call(7, "y", ended=False)]),
                rank(2, [call(6)]),
            ],
            7,
            "as call 7 rank 0 made x; rank 1 made y",
        ),
        # ranks that have ended a call have made the same, each in the words of its own rows
        (
            [
                rank(0, [call(7, "x of 3 rows"), call(8, ended=False)]),
                rank(1, [call(7, "x of 4 rows")]),
            ],
            8,
            "rank 1 has not made call 8",
        ),
        (
            [
                rank(0, [call(7, ended=False)]),
                rank(1, [call(7)], error="KeyError: 'lost my keys'"),
            ],
            7,
            "rank 1 (pid 101) failed with KeyError: 'lost my keys' after call 7, all_reduce",
        ),
    ],
)
def test_causes(ranks, number, why):
    world = recording(*ranks)
    found = difference(world)
    assert found.number == number
    assert why in explanation(world, found)[0]


def test_the_command_refuses_other_files(tmp_path):
    wrong = tmp_path / "notes.json"
    wrong.write_text("[]")
    foreign = tmp_path / "foreign.json"
    foreign.write_text("{}")
    view = {"pid": 1, "host": 0, "global_rank": 0}
    made = {"number": 1, "call": "x", "plan": "", "began": "soon", "ended": True}
    of_world = {"world": "w", "rank": 0, "group": "", "written": 1, "host": "", "error": ""}
    forms = {
        "flight recorder: it has no 'ranks'": {},
        "are of none of its ranks": {"ranks": []},
        "flight recorder: it has no 'calls'": {"ranks": [view]},
        "flight recorder: 'soon' is not of type int": {"ranks": [view | {"calls": [made]}]},
    }
    for at, (reason, part) in enumerate(forms.items()):
        file = tmp_path / f"form{at}-rank0.json"
        file.write_text(json.dumps(of_world | {"world": f"form{at}", "lost": None} | part))
        refused = CliRunner().invoke(app, ["doctor", "--flight", str(file)], env={"COLUMNS": "300"})
        assert refused.exit_code == 2
        assert reason in refused.output
        file.unlink()
    for words, reason in (
        (["--flight", str(wrong)], "is no file of the"),
        (["--flight", str(foreign)], "it has no world and rank"),
        (["--flight", str(tmp_path)], "no failure is recorded in"),
        ([str(wrong)], "they belong to --flight"),
    ):
        refused = CliRunner().invoke(app, ["doctor", *words], env={"COLUMNS": "300"})
        assert refused.exit_code == 2
        assert reason in " ".join(refused.output.split())


def fails_while_it_is_made(_, folder):
    """A rank that has no memory for its counters when its world is made."""
    os.environ[flight.VARIABLE] = str(folder)
    with (
        mock.patch("weft.world.world.control_segment", side_effect=MemoryError("no memory")),
        pytest.raises(MemoryError),
    ):
        weft.init()


def test_a_world_that_fails_while_it_is_made_writes_nothing(tmp_path, caplog):
    on_ranks(fails_while_it_is_made, 1, tmp_path)
    assert not [*tmp_path.iterdir()]
    assert not caplog.text
