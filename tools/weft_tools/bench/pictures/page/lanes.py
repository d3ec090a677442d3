"""Traces as data for the timeline of a page, which its program draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.plan.trace import Trace


def timeline(traces: Sequence[Trace]) -> dict[str, Any]:
    """The traces as a JSON object: the lanes of each, the spans of a lane in order of their start,
    and the arrows from each notify to the wait that it ended.

    A span is ``[text, kind, rows, start, nanoseconds]``, with `text` and `kind` as numbers in the
    lists of texts and kinds, and the start in nanoseconds from that of the trace. An arrow is two
    spans, each as its lane and its number in it.
    """
    texts, kinds = dict[str, int](), dict[str, int]()
    return {
        "traces": [_trace(trace.without_programs(), texts, kinds) for trace in traces],
        "texts": [*texts],
        "kinds": [*kinds],
    }


def _trace(trace: Trace, texts: dict[str, int], kinds: dict[str, int]) -> dict[str, Any]:
    lanes = {lane: list[Any]() for lane in trace.lanes}
    numbers = {lane: number for number, lane in enumerate(lanes)}
    places = []
    begin = trace.start
    for span in trace.spans:
        spans = lanes[span.rank, span.lane]
        places.append((numbers[span.rank, span.lane], len(spans)))
        text = texts.setdefault(" ".join(span.text.split()), len(texts))
        kind = kinds.setdefault(span.kind, len(kinds))
        spans.append([text, kind, span.rows, span.start - begin, span.stop - span.start])
    hidden = trace.hidden_copies()
    return {
        "title": trace.title,
        "ms": 1e3 * trace.seconds,
        "hidden": None if hidden is None else 100 * hidden,
        "lanes": [
            {"rank": rank, "name": name, "spans": spans} for (rank, name), spans in lanes.items()
        ],
        "arrows": [[*places[notify], *places[wait]] for notify, wait in trace.arrows()],
    }
