"""Texts of others, of which each is in turn what a forger writes: none looks like a line of weft's
own or moves the cursor, and none is expanded beyond its bounds.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from support.execution_plans import NOP, local, op, over, plan, remote
from typer.testing import CliRunner

from weft import cache, outside
from weft.cli import app
from weft_tools.formats.mscclpp import collectives, operations
from weft_tools.formats.mscclpp.reader import read
from weft_tools.predict import machine

FORGED = (
    "x\nverified: FORGED\r\x1b]0;FORGED\x07\x9b2J\u202e\u2028Likely cause: FORGED[bold red]y[/]"
)
RESULTS = Path(__file__).parents[1] / "fixtures/results"


def variants(value):
    """The value with one text, or one name of an object, in turn replaced."""
    if isinstance(value, str):
        yield FORGED
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield from ([*value[:at], other, *value[at + 1 :]] for other in variants(each))
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from (value | {name: other} for other in variants(each))
            yield {FORGED if key == name else key: of for key, of in value.items()}


def check(*command):
    done = CliRunner().invoke(app, [*map(str, command)], terminal_width=300, env={"COLUMNS": "300"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    for line in done.output.split("\n"):
        assert line.isprintable(), repr(line)
        assert not re.match(r"\W*(verified|Likely cause): FORGED", line), line
    if "FORGED" in done.output:
        assert "[bold red]" in done.output, "markup"
    return done


def of_puts():
    def block(rank):
        put = op("put", local("o", rank), remote("o", rank), channel_type="memory")
        return [over("rlxsignal"), over("rlxwait"), NOP, put, NOP, over("signal"), over("wait")]

    return plan([block(0)], [block(1)])


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_plans(every, tmp_path):
    file, seen = tmp_path / "plan.json", 0
    for each in [*variants(of_puts())][::every]:
        file.write_text(json.dumps(each))
        seen += "FORGED" in check("plan", "import", file, "--show").output
    assert seen


RANK = {
    "global_rank": 0,
    "pid": 1,
    "calls": [{"number": 1, "call": "c", "plan": "p", "began": 10**18, "ended": False}],
}
RECORDING = {
    "world": "w",
    "rank": 0,
    "group": "g",
    "host": "h",
    "error": "e",
    "written": 10**18 + 1,
    "lost": {"rank": 1, "how": "died"},
    "ranks": [RANK, copy.deepcopy(RANK)],
}


def test_recordings(tmp_path):
    file, seen = tmp_path / "w-rank0.json", 0
    file.write_text(json.dumps(RECORDING))
    assert check("doctor", "--flight", file).exit_code == 0
    for each in variants(RECORDING):
        file.write_text(json.dumps(each))
        seen += "FORGED" in check("doctor", "--flight", file).output
    assert seen > 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["overlap-earlier", "p2p-earlier", "linear", "vllm", "beside", "gather", "streaming"],
)
def test_every_text_of_results(name, tmp_path):
    results(f"{name}.json", tmp_path, every=1)


def test_results(tmp_path):
    results("gather.json", tmp_path, every=20)


def results(name, folder, every):
    pytest.importorskip("weft_tools.bench")
    file, seen = folder / "result.json", 0
    result = json.loads((RESULTS / name).read_text())
    if "rows" in result:
        result["rows"] = result["rows"][:3]
    for each in [*variants(result)][::every]:
        file.write_text(json.dumps(each))
        seen += "FORGED" in check("show", file).output
    assert seen


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("a ü … → text", "a ü … → text"),
        ("a\nb\t\x1b[31m", r"a\nb\t\x1b[31m"),
        ("\x9b \u202e\u2028 \ud800", r"\x9b \u202e\u2028 \ud800"),
    ],
)
def test_printable(given, made):
    assert outside.printable(given) == made


NESTED = "[" * 100_000 + "]" * 100_000


def test_files_are_bounded_in_bytes_and_depth(tmp_path, monkeypatch):
    file = tmp_path / "x.json"
    deep = f"it has more than {outside.DEEPEST} objects and lists in each other"
    for text in (
        NESTED,
        NESTED.replace("]", ""),
        "[" * 101 + "]" * 101,
        '{"a":' * 101 + "0" + "}" * 101,
    ):
        file.write_text(text)
        for command in (["plan", "import"], ["doctor", "--flight"], ["show"]):
            done = check(*command, file)
            assert done.exit_code
            if text.startswith("[" * 101 + "]") or text is NESTED:
                assert deep in " ".join(done.output.split()), done.output
    file.write_text("[" * 100 + "]" * 100)
    assert outside.read_json(file)
    (tmp_path / "deep.toml").write_text(f"a = {NESTED}")
    with pytest.raises(ValueError, match="objects and lists in each other"):
        machine._read(tmp_path / "deep.toml")
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    cache.file("c").write_text(NESTED)
    assert cache.stored("c", lambda value: True) is None
    with pytest.raises(ValueError, match="has more than 10 bytes, the most that weft reads"):
        outside.read_text(file, 10)
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        outside.read_text(Path("/dev/zero"), 1000)


def gathered(ranks=2, chunks=1, scratch=0, ops=(), **more):
    blocks = [{"id": 0, "ops": [*ops], "channels": [], "remote_buffer_refs": []}]
    gpu = {
        "input_chunks": chunks,
        "output_chunks": ranks * chunks,
        "scratch_chunks": scratch,
        "threadblocks": blocks,
        "channels": [],
        "remote_buffers": [],
        "semaphores": [],
    }
    gpus = [{"id": rank, **gpu, **more} for rank in range(ranks)]
    return {"name": "x", "collective": "allgather", "inplace": False, "gpus": gpus}


COPY = op("copy", local("i", 0), local("o", 0))


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (gathered(chunks=10**9), "6000000000 .* at most 4194304"),
        (gathered(scratch=10**9), "and weft reads at most 4194304"),
        (gathered(ops=[COPY | {"tbg_info": {"tb_id": 0, "tbg_size": 10**9}}]), "at most 4194304"),
        (gathered(ranks=257), "it has 257 ranks, and weft reads at most 256"),
        (gathered(ops=[NOP] * 50_001), "it has 100002 operations, .* at most 100000"),
        (gathered(ops=[COPY] * 100), "defects, and weft reads at most 1000"),
        (
            gathered(chunks=60, ops=[op("copy", local("i", n), local("o", n)) for n in range(60)]),
            r"it has 51 operations together \(rank 0, thread block 0, operation 51",
        ),
        (
            gathered(channels=[{"channel_type": "memory", "connected_to": [1] * 6000}]),
            "it has 5001 channels of rank 0, and weft reads at most 5000",
        ),
    ],
    ids=["chunks", "scratch", "parts", "ranks", "operations", "defects", "together", "channels"],
)
def test_plans_are_bounded_before_they_are_expanded(file, words, monkeypatch):
    monkeypatch.setattr(operations, "MOST_TOGETHER", 50)
    with pytest.raises(ValueError, match=words):
        read(file)


def test_the_bounds_leave_room_for_real_plans():
    """A plan of 64 ranks, each with a chunk for each and 8 parts of them, three times."""
    assert collectives.MOST_ROWS > 64 * 64 * 8 * 3 * 4
