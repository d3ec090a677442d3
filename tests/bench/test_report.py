"""The page of saved results as data, and the command that writes it."""

import json
import shlex

import pytest
from rich.console import Console
from typer.testing import CliRunner

from weft.cli import app
from weft.plan.trace import Span, Trace, from_perfetto, to_perfetto
from weft_tools.bench import page, repeat, saved, tables
from weft_tools.bench.benchmarks import shown
from weft_tools.bench.captured import TableGrid, Words, captured, number
from weft_tools.bench.harness import options_of
from weft_tools.bench.limit import limit_of
from weft_tools.bench.pictures.page.lanes import timeline
from weft_tools.cli import running


def weft(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], terminal_width=500)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a real run: result.json and trace.json of a fused operator, and sweep.json."""
    folder = tmp_path_factory.mktemp("run")
    short = ["--iterations", "2", "--warmup", "1", "--baseline", "none", "--threads", "1"]
    files = ["--json", folder / "result.json", "--trace", folder / "trace.json"]
    size = ["--shape", "97x64x32", "--algorithm", "push", "--chunk-rows", "16", "--seed", "7"]
    for command in (
        ["all-gather-matmul", *size, *short, *files],
        ["all-gather", "--sizes", "8,4K", *short, "--json", folder / "sweep.json"],
    ):
        outcome = weft("bench", *command)
        assert outcome.exit_code == 0, outcome.stderr
    return folder


def of(*times, **more):
    """A result with these times of compute, communicate, sequential and pipelined."""
    names = ("compute", "communicate", "sequential", "pipelined")
    medians = {name: {"median": time} for name, time in zip(names, times, strict=True)}
    return {"times_ms": medians, **more}


def texts(grid):
    return [[cell.words.text for cell in row] for group in grid.groups for row in group]


def test_a_section_has_what_the_terminal_shows(run):
    result = saved.load(run / "result.json")
    traces = saved.load_traces(run / "trace.json")
    made = page.section(result, "result.json", traces)
    console = Console(width=200)
    with console.capture() as printed:
        shown(result).print(result, console)
    lines = [" ".join(line.split()) for line in printed.get().splitlines()]
    rows = [" ".join(" ".join(row).split()) for grid in made.grids for row in texts(grid)]
    assert len(rows) > 10
    assert [line for line in lines if line in rows] == rows
    assert made.name == "all-gather-matmul"
    assert made.about.startswith("2 ranks, 97x64x32, float32, push")
    assert (
        made.figures[0].value in (f"{result['speedup']:.2f}x", tables.NOISE, tables.BUSY_MACHINE)
        or result["speedup"] < 0.995
    )
    assert made.verified
    assert made.verdict.text.startswith("Verified on every rank")
    assert ("wrong elements", f"0 of {', '.join(result['wrong'])}") in made.facts
    assert [trace["title"] for trace in made.timeline["traces"]] == ["sequential", "pipelined"]
    assert made.timeline["traces"][1]["hidden"] == result["hidden_percent"]["pipelined"]


def test_a_section_without_a_trace_or_a_limit_leaves_them_out(run):
    fused = page.section(saved.load(run / "result.json"), "result.json")
    assert fused.timeline is None
    assert "--trace" not in "".join(fused.commands)
    swept = page.section(saved.load(run / "sweep.json"), "sweep.json")
    assert (swept.timeline, swept.limit) == (None, None)
    assert swept.picture.startswith("data:image/svg+xml;base64,")


def test_rows_that_continue_others_repeat_their_first_cells():
    def printed(result, console):
        table = page.tables.table(("size", "", "us", "vs gloo"))
        table.add_row("4K", "weft", "1.50", "2.00x")
        table.add_row("", "gloo", "3.00", "")
        table.add_section()
        table.add_row("64M", "weft", "1,024.00", "0.50x SLOWER")
        console.print("a title", style="bold")
        console.print(table, "")

    title, grid = captured(printed, {})
    assert title == Words("a title", "bold")
    assert isinstance(grid, TableGrid)
    assert texts(grid)[1] == ["4K", "gloo", "3.00", ""]
    first, second = grid.groups
    assert [cell.repeated for cell in first[1]] == [True, False, False, False]
    assert [cell.number for cell in second[0]] == [64 << 20, None, 1024, 0.5]


@pytest.mark.parametrize(
    ("text", "value"),
    [("-1,024", -1024), ("3 %", 3), ("1e-05", 1e-5), ("4K", 4096), ("0.95x SLOWER", 0.95)]
    + [(words, None) for words in ("float32", "", "-", "512x1024", "Kx")],
)
def test_numbers_of_cells(text, value):
    assert number(text) == value


def test_the_parts_above_the_limit():
    limit = limit_of(of(10.0, 12.0, 22.0, 15.0, chunking_ms=0.5, exposed_ms=4.5))
    parts = {part.name: part.milliseconds for part in limit.bars[-1].parts}
    assert parts == {"limit": 12.0, "cutting": 0.5, "waiting": 2.5}
    assert sum(parts.values()) == 15.0
    assert limit.percent == pytest.approx(100 * 12 / 22)
    assert "12.000 ms, the time of communicate" in limit.sentences[0]
    assert "3.000 ms above it" in limit.sentences[0]


def test_the_times_of_independent_overlap_have_a_limit():
    times = {"compute": 10.0, "communicate": 8.0, "sequential": 18.0, "overlapped": 11.0}
    result = {"times_ms": {name: {"median": time} for name, time in times.items()}}
    limit = limit_of(result)
    assert limit.own == "overlapped"
    assert "Overlapped takes 11.000 ms, 1.000 ms above it" in limit.sentences[0]


def test_no_gain_is_stated_where_nothing_overlaps():
    times = {
        name: {"median": 2.0} for name in ("compute", "communicate", "sequential", "pipelined")
    }
    result = {"benchmark": "all-gather-matmul", "times_ms": times}
    result |= {"speedup": 1.0, "limit_ratio": 1.0, "overlap_percent": 100.0}
    names = [found.name for found in page.figures(result | {"algorithm": "push"})]
    assert names == ["speedup", "limit ratio", "overlap"]
    assert [*page.figures(result | {"algorithm": "sequential"})] == []


def test_weft_is_compared_with_those_that_do_the_same():
    def row(name, operation, size, time):
        case = {"operation": operation, "size_bytes": size, "implementation": name}
        return case | {"time_us": {"median": time}}

    rows = [
        row("weft", "put", 8, 2.0),
        row("weft", "put", 64, 4.0),
        row("gloo", "put", 8, 3.0),
        row("gloo", "put", 64, 2.0),
        row("memcpy", "local", 8, 1.0),
    ]
    [found] = page.figures({"rows": rows})
    assert (found.name, found.value) == ("weft vs gloo", "0.50x to 1.50x")


def test_the_limit_without_parts():
    noisy = of(10.0, 8.0, 18.0, 9.5, chunking_ms=-0.5, exposed_ms=0.0)
    assert [part.name for part in limit_of(noisy).bars[-1].parts] == ["pipelined"]
    assert "0.500 ms below it, which is noise" in limit_of(noisy).sentences[0]
    in_place = of(8.0, 10.0, 18.0, 9.5)
    assert "0.500 ms below it, as communicate copies more rows" in limit_of(in_place).sentences[0]
    streamed = of(10.0, 8.0, 18.0, 17.0, chunking_ms=1.0, exposed_ms=2.0)
    streamed["streamed_ms"] = {"direct": {"median": 20.0}}
    assert len(limit_of(streamed).sentences) == 1
    assert limit_of({"times_ms": {}}) is None


def test_a_result_names_the_command_that_repeats_it(run, monkeypatch):
    asked = []
    monkeypatch.setattr(running, "run_benchmark", lambda settings, *_, **__: asked.append(settings))
    for name in ("result", "sweep"):
        result = saved.load(run / f"{name}.json")
        program, bench, benchmark, *words = shlex.split(repeat.command(result))
        assert (program, bench, benchmark) == ("weft", "bench", result["benchmark"])
        assert weft("bench", benchmark, *words).exit_code == 0
        assert options_of(asked.pop()) == result["options"]
    assert repeat.command({"benchmark": "all-gather", "options": {"of the past": 1}}) is None
    assert repeat.command({"benchmark": "no such", "options": {"ranks": 2}}) is None


def span(rank, lane, kind, text, start, stop, rows=0):
    return Span(rank, lane, kind, text, rows, start, stop)


TRACE = Trace(
    "pipelined",
    (
        span(0, "comm", "copy", "copy   a@0[0:4] -> b@1[0:4]", 100, 350, 4),
        span(1, "compute", "wait", "wait   arrived 2<0 >= 1", 150, 402),
        span(0, "comm", "notify", "notify arrived 2<0 on 1", 350, 401),
        span(1, "compute", "matmul", "matmul b@1[0:4] -> out@1[0:4]", 410, 900, 4),
    ),
)


def test_traces_come_back_from_their_files():
    files = json.loads(json.dumps(to_perfetto(TRACE, Trace("second: rank 3", TRACE.spans[:1]))))
    first, second = from_perfetto(files)
    assert first.title == "pipelined"
    moved = [each._replace(start=each.start - 100, stop=each.stop - 100) for each in TRACE.spans]
    assert [*first.spans] == moved
    assert second.title == "second: rank 3"


@pytest.mark.parametrize(
    "file",
    [
        [],
        {},
        {"traceEvents": []},
        {"traceEvents": [{"ph": "X", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 1}]},
        {"traceEvents": [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "x"}}]},
    ],
)
def test_traces_of_other_programs_are_refused(file):
    with pytest.raises(ValueError, match=r"instructions"):
        from_perfetto(file)


def test_the_timeline_has_every_span_and_its_arrows():
    made = timeline([TRACE])
    [trace] = made["traces"]
    assert [(lane["rank"], lane["name"]) for lane in trace["lanes"]] == [
        (0, "comm"),
        (1, "compute"),
    ]
    text, kind, *numbers = trace["lanes"][0]["spans"][0]
    assert made["texts"][text] == "copy a@0[0:4] -> b@1[0:4]"
    assert made["kinds"][kind] == "copy"
    assert numbers == [4, 0, 250]
    assert trace["arrows"] == [[0, 1, 1, 0]]
    assert trace["ms"] == pytest.approx(800e-6)


def test_names_in_a_result_cannot_become_part_of_the_page(run):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    result = json.loads((run / "result.json").read_text())
    result["machine"]["cpu"] = result["reason"] = result["algorithm"] = evil
    traces = json.loads((run / "trace.json").read_text())
    for event in traces["traceEvents"]:
        if event["ph"] == "X":
            event["args"]["instruction"] = evil
    (run / "evil.json").write_text(json.dumps(result))
    (run / "evil-trace.json").write_text(json.dumps(traces))
    out = run / "evil.html"
    outcome = weft("report", run / "evil.json", "--trace", run / "evil-trace.json", "-o", out)
    assert outcome.exit_code == 0, outcome.stderr
    text = out.read_text()
    assert "alert(1)" in text
    assert "<script>alert" not in text
    assert "<img" not in text


def test_the_command_writes_one_page_of_all_results(run, monkeypatch):
    monkeypatch.chdir(run)
    outcome = weft("report", "sweep.json", "result.json", "--trace", "trace.json")
    assert (outcome.exit_code, outcome.stdout) == (0, "Open report.html in a browser.\n")
    text = (run / "report.html").read_text()
    assert text.count("<article") == 2
    assert text.count('class="timeline"') == 1
    assert text.index('class="timeline"') > text.index('id="result-2"'), "of the fused operator"


def test_the_command_refuses_what_it_cannot_use(run, tmp_path):
    result, other = run / "result.json", tmp_path / "other.json"
    out = ["-o", tmp_path / "page.html"]
    for text, why in (
        ("{", "is not JSON"),
        ("[]", "is no result of weft bench"),
        ('{"benchmark": "x"}', "has no benchmark 'x'"),
        ('{"benchmark": "all-gather-matmul"}', "another version of weft has written it"),
        ('{"benchmark": "all-gather", "machine": 3}', "another version of weft has written it"),
    ):
        other.write_text(text)
        rejected = weft("report", result, other, *out)
        assert (rejected.exit_code, why in rejected.stderr) == (2, True), rejected.stderr
        assert len(rejected.stderr.splitlines()) == 1
    other.write_text(json.dumps(to_perfetto(TRACE)))
    for file, why in (
        (result, "is no trace of weft bench --trace"),
        (other, "was not written together with any of these results"),
        (tmp_path / "missing.json", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        rejected = weft("report", result, "--trace", file, *out)
        assert (rejected.exit_code, why in rejected.stderr) == (2, True), rejected.stderr
    for words, why in (
        ([result, "-o", tmp_path / "missing" / "page.html"], "does not exist; make it first"),
        ([result, "-o", result], "is an input"),
        ([tmp_path / "missing.json", *out], "missing.json cannot be read: No such file"),
        ([result, "-o", tmp_path], "cannot be written: Is a directory"),
    ):
        rejected = weft("report", *words)
        said = " ".join(rejected.stderr.replace("│", " ").split())
        assert (rejected.exit_code, why in said) == (2, True), said
    assert not (tmp_path / "page.html").exists()
