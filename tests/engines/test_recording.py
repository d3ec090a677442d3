"""Traces: the instructions that ran on all ranks with their times, and the formats of their export."""

from __future__ import annotations

import itertools
import json
import time

import matplotlib
import pytest
import torch
from support.ranks import on_ranks

import weft
from weft.engines.recording import clock_offsets, record
from weft.plan.binding import bind
from weft.plan.trace import KINDS, Span, Trace, joined, lane_of, of_program, to_perfetto
from weft_tools.bench.pictures.timeline import draw


def made_trace():
    """Two ranks; rank 0 copies for 4 us, and multiplies during 3 of them in two pieces."""
    spans = [
        Span(0, "compute", "matmul", "matmul a -> out", 4, 1000, 3000),
        Span(0, "compute", "matmul", "matmul b -> out", 2, 4000, 6000),
        Span(0, "comm", "copy", "copy a -> b", 4, 2000, 6000),
        Span(0, "comm", "notify", "notify x", 0, 6000, 6010),
        Span(1, "compute", "wait", "wait x", 0, 1500, 6500),
        Span(1, "compute", "reduce", "reduce", 1, 6500, 9000),
    ]
    return Trace("made up", tuple(sorted(spans, key=lambda span: span.start)))


def test_the_figures_of_a_trace():
    trace = made_trace()
    assert trace.lanes == [(0, "compute"), (0, "comm"), (1, "compute")]
    assert trace.start == 1000
    assert trace.seconds == pytest.approx(8e-6)
    assert trace.hidden_copies() == pytest.approx(3 / 4)
    assert Trace("no copies", trace.spans[:1]).hidden_copies() is None
    assert Trace("empty", ()).seconds == 0


def test_perfetto_structure():
    trace = made_trace()
    exported = json.loads(json.dumps(to_perfetto(trace, trace)))
    events = exported["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 2 * len(trace.spans)
    assert {event["pid"] for event in spans} == {0, 1, 2, 3}
    assert min(event["ts"] for event in spans) == 0
    [copy] = [event for event in spans if event["cat"] == "copy" and event["pid"] == 0]
    assert (copy["name"], copy["ts"], copy["dur"]) == ("copy 4 rows", 1.0, 4.0)
    assert copy["args"] == {"instruction": "copy a -> b", "rows": 4}
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert names[copy["pid"], copy["tid"]] == "comm"
    processes = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    assert processes[1] == "made up: rank 1"


def test_arrows_lead_from_notifies_to_the_waits_that_they_end():
    spans = [
        Span(0, "comm", "notify", "notify ready<0 on 1", 0, 100, 110),
        Span(0, "comm", "notify", "notify ready<0 on 1", 0, 300, 310),
        Span(0, "comm", "notify", "notify ready<0 on 2", 0, 320, 330),
        Span(1, "compute", "wait", "wait   ready<0 >= 2", 0, 50, 320),
        Span(1, "compute", "wait", "wait   free<0 >= 0", 0, 400, 410),
    ]
    assert [*Trace("once", tuple(spans)).arrows()] == [(1, 3)]
    assert [*Trace("twice", (*spans, *spans)).arrows()] == []
    exported = to_perfetto(Trace("once", tuple(spans)), about="on a machine")
    begin, end = [event for event in exported["traceEvents"] if event["ph"] in "sf"]
    assert (begin["ph"], end["ph"], begin["id"] == end["id"]) == ("s", "f", True)
    assert (begin["pid"], end["pid"], end["bp"]) == (0, 1, "e")
    assert 0.25 == begin["ts"] < end["ts"] <= 0.27
    assert exported["otherData"]["about"] == "on a machine"
    assert exported["otherData"]["version"] == f"weft {weft.__version__}"


def test_a_timeline_states_the_speedup_over_sequential_and_the_run(tmp_path):
    whole = made_trace()
    half = Trace(
        "pipelined", tuple(s._replace(start=s.start // 2, stop=s.stop // 2) for s in whole.spans)
    )
    path = tmp_path / "timeline.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw([Trace("sequential", whole.spans), half], path, "a title", "on a machine")
        drawn = path.read_text()
        draw([whole, half], path, "a title")
    assert "2.00x in this run" in drawn
    assert "on a machine" in drawn
    assert "in this run" not in path.read_text(), "of other operators, there is none"


def test_programs_of_a_kernel_have_lanes_of_their_own_but_in_timelines(tmp_path):
    lane = of_program("compute", 7)
    tile = Span(0, lane, "matmul", "matmul a -> out", 0, 1500, 2500)
    trace = Trace("traced", (*made_trace().spans, tile))
    assert trace.without_programs() == Trace("traced", made_trace().spans)
    assert lane_of(lane) == lane_of("compute") == "compute"
    events = to_perfetto(trace)["traceEvents"]
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert threads == ["compute", "compute, program 007", "comm", "compute"]
    draw([trace], tmp_path / "timeline.svg", "a title")
    assert "program" not in (tmp_path / "timeline.svg").read_text()


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_timeline_is_drawn(tmp_path, suffix):
    path = tmp_path / f"timeline.{suffix}"
    draw([made_trace(), made_trace()], path, "a title")
    start = {"png": b"\x89PNG", "svg": b"<?xml"}[suffix]
    assert path.read_bytes().startswith(start)


def traced(world):
    a = world.empty(24, 8)
    a.fill_(world.rank)
    b = torch.eye(8)
    weft.all_gather_matmul(a, b, algorithm="push", chunk_rows=5)
    with record(world) as recording:
        for _ in range(2):
            weft.all_gather_matmul(a, b, algorithm="push", chunk_rows=5)
    weft.all_gather_matmul(a, b, algorithm="push", chunk_rows=5)
    plans = [bind(plan, rows) for plan, rows, _ in recording.executions]
    return plans, recording.gather("push")


def test_recording_all_ranks():
    (plans, trace), (others_plans, nothing) = on_ranks(traced, 2)
    assert nothing is None
    assert len(plans) == len(others_plans) == 2
    for rank in range(2):
        for lane, instructions in plans[0].lanes[rank].items():
            spans = [span for span in trace.spans if (span.rank, span.lane) == (rank, lane)]
            assert [span.text for span in spans] == [*map(str, instructions)] * 2
            assert {span.kind for span in spans} <= {*KINDS, "matmul"}
            assert all(0 < span.start <= span.stop for span in spans)
            assert all(one.stop <= other.start for one, other in itertools.pairwise(spans)), (
                "one after the other"
            )
    assert sum(span.rows for span in trace.spans if span.kind == "matmul") == 2 * 2 * 48


def test_recording_ends():
    with weft.init() as world:
        with record(world) as recording:
            weft.all_gather_matmul(torch.ones(3, 2), torch.ones(2, 2))
        weft.all_gather_matmul(torch.ones(3, 2), torch.ones(2, 2))
        assert world.recorder is None
        trace = recording.gather("alone")
    assert {span.kind for span in trace.spans} == {"matmul"}
    assert len(recording.executions) == 1


def test_recordings_of_a_local_world():
    def traced():
        with record(weft.init()) as recording:
            weft.all_gather_matmul(torch.ones(3, 2), torch.ones(2, 2), algorithm="push")
        return recording.own("push"), recording.gather("push")

    with weft.local_world(2) as local:
        own, (trace, nothing) = zip(*local.run(traced), strict=True)
    assert (trace, nothing) == (joined("push", own), None)
    assert {rank for rank, _ in trace.lanes} == {0, 1}
    assert [*trace.spans] == sorted(trace.spans, key=lambda span: span.start)


def test_clocks_of_hosts_are_compared():
    hour = 3600 * 10**9

    def compared():
        world = weft.init()
        ahead = hour * world.hosts[world.rank]
        return clock_offsets(world, now=lambda: time.monotonic_ns() + ahead)

    with weft.local_world(4, hosts=[0, 0, 1, 2]) as local:
        offsets, *others = local.run(compared)
    assert others == [[0] * 4] * 3
    assert [round(offset / hour, 1) for offset in offsets] == [0, 0, 1, 2]


def test_a_recording_without_calls_is_told_of_layers(caplog):
    with weft.init() as world:
        with record(world) as recording:
            pass
        recording.own("nothing")
    assert "record(layer.world)" in caplog.text
