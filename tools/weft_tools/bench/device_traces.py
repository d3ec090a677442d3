"""Traces of GPUs that a device's profiler has written: torch's (JSON of
`torch.profiler.profile.export_chrome_trace`) and Nsight Systems' (``nsys export --type sqlite``).

Each kernel and each copy is a span of a `Trace`, a device a rank and a stream a lane. So the part
of copying that is hidden is computed as that of weft's own traces, of any program.
"""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from weft.outside import printable
from weft.plan.trace import Span, Trace
from weft_tools.bench import tables

_HOST = "host"
_KINDS = {
    _HOST: r"memcpy.*(HtoD|DtoH)",
    "wait": r"^(wait|compare)_kernel",
    "notify": r"^(notify|raise)_kernel",
    "reduce": r"^sum_in_rank_order",
    "copy": r"^(copy_(vectors|words)_kernel|_?put_to_all)|nccl|rccl|multimem"
    r"|(all|reduce)_?(gather|reduce|scatter)(?!.*matmul)|one_shot|two_shot|memcpy"
    r"|direct_copy|CatArray|copy_device",
    "matmul": r"gemm|gemv|cutlass|nvjet|xmma|matmul|_mm_|Cijk_|splitK|dot_kernel",
}
"""Kinds of spans by the names of kernels: weft's, torch's, NCCL's, cuBLAS' and hipBLAS'. The first
that matches counts; others are computations of another kind. Copies from and to the host are
neither computations nor copies between GPUs.
"""
_PERSISTENT = r"all_gather_matmul_kernel"
"""weft's kernel that multiplies rows as they arrive: it waits for them, too."""

_MOST_BYTES = 1 << 30
"""Of a trace, unpacked."""
_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"


def kind_of(name: str) -> str:
    """The kind of a kernel's span, by its name."""
    found = (kind for kind, names in _KINDS.items() if re.search(names, name, re.IGNORECASE))
    return next(found, "other")


def read(file: Path) -> Trace | None:
    """The trace in a file; None for another file, and for one that cannot be read. Raises
    `ValueError` if it has no work of a GPU or is of another form.
    """
    try:
        found = _spans(file)
    except (OSError, EOFError, UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        return None
    if found is None:
        return None
    spans = sorted(found, key=lambda span: span.start)
    if not spans:
        raise ValueError(
            f"{file} has no work of a GPU: profile with ProfilerActivity.CUDA, or nsys --trace cuda"
        )
    return Trace(printable(file.name), tuple(spans))


def _spans(file: Path) -> Iterator[Span] | None:
    """The spans of a trace; None for another file."""
    with file.open("rb") as opened:
        begins = opened.read(16)
    if begins == b"SQLite format 3\0":
        return _of_nsight(file)
    with (gzip.open if begins.startswith(b"\x1f\x8b") else open)(file, "rb") as opened:
        content = opened.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"{file} has more than {_MOST_BYTES} bytes, the most that weft reads")
    found = json.loads(content.decode("utf-8"))
    if not isinstance(found, dict) or "deviceProperties" not in found:
        return None
    return _of_torch(found["traceEvents"])


def _of_torch(events: Sequence[dict[str, Any]]) -> Iterator[Span]:
    """Its times are microseconds."""
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in ("kernel", "gpu_memcpy"):
            continue
        name, of = event["name"], event["args"]
        start = round(1e3 * float(event["ts"]))
        stop = start + round(1e3 * float(event["dur"]))
        lane = printable(f"stream {of['stream']}")
        yield Span(int(of["device"]), lane, kind_of(name), name, 0, start, stop)


def _of_nsight(file: Path) -> Iterator[Span]:
    """Its times are nanoseconds, and names are numbers of a table of texts."""
    kernels = (
        f"SELECT deviceId, streamId, value, start, end FROM {_KERNELS} "
        "JOIN StringIds ON StringIds.id = shortName"
    )
    # CUpti_ActivityMemcpyKind
    kinds = "CASE copyKind WHEN 1 THEN 'memcpy HtoD' WHEN 2 THEN 'memcpy DtoH' ELSE 'memcpy' END"
    copies = f"SELECT deviceId, streamId, {kinds}, start, end FROM {_COPIES}"
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        present = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        for table, query in ((_KERNELS, kernels), (_COPIES, copies)):
            if table not in present:
                continue
            try:
                for device, stream, name, start, stop in database.execute(query):
                    yield Span(device, f"stream {stream}", kind_of(name), name, 0, start, stop)
            except sqlite3.Error as error:
                raise ValueError(f"{file} is no export of Nsight Systems: {error}") from None


def show(trace: Trace, console: Console) -> None:
    """Print the time of each kind of work on each stream, and the part of copying of each device
    that is hidden.
    """
    kinds = [
        kind
        for kind in ("matmul", "other", "reduce", "copy", _HOST, "wait", "notify")
        if any(span.kind == kind for span in trace.spans)
    ]
    heading = f"{trace.title}: {1e3 * trace.seconds:.3f} ms; milliseconds of each stream"
    console.print(heading, markup=False)
    made = tables.table(("device", "stream", "launches", *kinds), left=("device", "stream"))
    for device, lane in trace.lanes:
        spans = [span for span in trace.spans if (span.rank, span.lane) == (device, lane)]
        times = (sum(s.stop - s.start for s in spans if s.kind == kind) / 1e6 for kind in kinds)
        cells = (f"{time:.3f}" if time else "-" for time in times)
        made.add_row(str(device), lane.removeprefix("stream "), str(len(spans)), *cells)
    tables.print_wide(console, made)
    for device in sorted({span.rank for span in trace.spans}):
        spans = [span for span in trace.spans if span.rank == device and span.kind != _HOST]
        part = Trace(trace.title, tuple(spans)).hidden_copies()
        hidden = "nothing is copied"
        if part is not None:
            hidden = f"{100 * part:.0f} % of copying is hidden behind computations"
        console.print(f"device {device}: {hidden}")
    if any(re.search(_PERSISTENT, span.text) for span in trace.spans):
        console.print(
            "weft's kernel of products waits for rows that have not arrived: all of its time "
            "counts as computing"
        )
