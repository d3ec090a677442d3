"""Write the tables of docs/five-systems.md from results of `five_systems.sh`: the published figures
of five systems, and weft's. Of several directories the first that has a result counts.

    python benchmarks/five_systems.py DIRECTORY…
"""

import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, str]
_GATHERS = "weft", "weft (plain)", "gloo"
PUBLISHED = Path(__file__).parent / "published_results.csv"
PAGE = Path(__file__).parents[1] / "docs/five-systems.md"
GIB = 1.073741824
"""GB of a GiB."""


def published(system: str) -> list[Row]:
    """The published figures of a system."""
    with PUBLISHED.open() as file:
        return [row for row in csv.DictReader(file) if row["system"] == system]


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""

    def line(cells: Sequence[object]) -> str:
        return f"| {' | '.join(map(str, cells))} |"

    return "\n".join([line(heads), "|---" * len(heads) + "|", *map(line, rows)])


def median(result: dict[str, Any], name: str, kind: str = "times_ms") -> float:
    found: float = result[kind][name]["median"]
    return found


def overlapped(result: dict[str, Any]) -> list[str]:
    """The times and figures of a fused operator."""
    times = [f"{median(result, name):.2f}" for name in ("compute", "sequential", "pipelined")]
    return [*times, f"{result['speedup']:.2f}x", f"{result['limit_ratio']:.2f}"]


OVERLAPPED = "compute", "sequential", "pipelined", "speedup", "limit ratio"


def streaming(load: Callable[[str], Any]) -> list[str]:
    rows = []
    for row in published("allgather_gemm"):
        m, k, n = (int(row[name]) for name in "mkn")
        flops = 2 * m * k * n
        ranks = row["ranks"]
        theirs = f"{float(row['value']):.3f} ms", f"{flops / float(row['value']) / 1e9:.0f}"
        ours = load(f"streaming-{ranks}-{m // 2}x{k // 2}x{n // 2}")
        rows.append((ranks, f"{m}x{k}x{n}", *theirs, *overlapped(ours)))
    theirs_heads = "ranks", "M x K x N", "910B1", "TFLOP/s"
    every = [(ranks, load(f"ranks-{ranks}")) for ranks in (2, 4, 8, 16)]
    cuts = [(chunks, load(f"chunks-{chunks}")) for chunks in (4, 16, 64, 128)]
    return [
        table((*theirs_heads, *(f"half: {OVERLAPPED[0]}", *OVERLAPPED[1:])), rows),
        table(("ranks", *OVERLAPPED), ((ranks, *overlapped(found)) for ranks, found in every)),
        table(
            ("chunks of each source", *OVERLAPPED),
            ((chunks, *overlapped(found)) for chunks, found in cuts),
        ),
    ]


def steps(load: Callable[[str], Any]) -> list[str]:
    theirs = [float(row["value"]) for row in published("all_gather_matmul_v2")]
    ours = {ranks: load(f"steps-{ranks}")["ablation_ms"] for ranks in (2, 4)}
    names = [*ours[2]]

    def cells(times: Sequence[float], unit: str, at: int) -> list[str]:
        return [f"{times[at]:.{0 if unit == 'us' else 2}f} {unit}", f"{times[0] / times[at]:.2f}x"]

    medians = {ranks: [found[name]["median"] for name in names] for ranks, found in ours.items()}
    rows = [
        (
            name,
            *cells(theirs, "us", at),
            *cells(medians[2], "ms", at),
            *cells(medians[4], "ms", at),
        )
        for at, name in enumerate(names)
    ]
    return [table(("step", "Ascend 950, 4 ranks", "", "2 ranks", "", "4 ranks", ""), rows)]


def copies(load: Callable[[str], Any]) -> list[str]:
    found = {
        (row["size_bytes"], row["implementation"]): row
        for row in load("copies")["rows"]
        if row["operation"] == "get"
    }
    gbs, cycles = (
        {(int(row["bytes"]), row["variant"]): float(row["value"]) for row in published(system)}
        for system in ("tget_bandwidth", "tget_cycles")
    )
    ways = "weft (staged)", "weft", "weft (async)"
    rows = []
    for size in sorted({size for size, _ in gbs}):
        theirs = [(gbs[size, v], cycles[size, v]) for v in ("TGET", "TGET_ASYNC")]
        ours = [found[size, way] for way in ways]
        rows.append(
            (
                f"{size >> 10} KiB",
                ", ".join(f"{one:.2f}" for one, _ in theirs),
                ", ".join(f"{ticks:,.0f}" for _, ticks in theirs),
                ", ".join(f"{row['algbw_gbps']:.1f}" for row in ours),
                ", ".join(_thousands(row["transfer_cycles"]) for row in ours),
                ", ".join(_thousands(row["cycles"]) for row in ours),
            )
        )
    heads = "GET, ASYNC: GB/s", "ticks", "staged, get, async: GB/s", "kcycles", "of the caller"
    return [table(("size", *heads), rows)]


def _thousands(cycles: float | None) -> str:
    return "-" if cycles is None else f"{cycles / 1e3:,.0f}"


def linear(load: Callable[[str], Any]) -> list[str]:
    cut = [(str(chunks), load(f"linear-{chunks}")) for chunks in (1, 2, 4)]
    cut.append(("2, symmetric result", load("linear-symmetric")))
    theirs = [float(row["value"]) for row in published("bench_overlapped_matmul_allgather")]
    ours = load("beside")
    medians = [median(ours, name) for name in ("sequential", "overlapped")]
    rows = [
        ("sequential", theirs[0], "1.00x", f"{medians[0]:.2f}", "1.00x", ""),
        (
            "overlapped",
            theirs[1],
            f"{theirs[0] / theirs[1]:.2f}x",
            f"{medians[1]:.2f}",
            f"{medians[0] / medians[1]:.2f}x",
            f"{ours['limit_ratio']:.2f}",
        ),
        ("by copy engines", theirs[2], f"{theirs[0] / theirs[2]:.2f}x", "", "", ""),
    ]
    return [
        table(
            ("chunks of a rank's rows", *OVERLAPPED),
            ((chunks, *overlapped(found)) for chunks, found in cut),
        ),
        table(("", "8 x H100, ms", "", "2 ranks, ms", "", "limit ratio"), rows),
    ]


def gather(load: Callable[[str], Any]) -> list[str]:
    found = {
        (row["size_bytes"], row["implementation"]): row["busbw_gbps"]
        for row in load("gather")["rows"]
        if not row["in_place"]
    }
    theirs: dict[int, list[str]] = {}
    for row in published("iris_all_gather"):
        assert row["unit"] == "GiB/s"
        theirs.setdefault(int(row["bytes"]), []).append(f"{GIB * float(row['value']):.0f}")
    sizes = sorted({*theirs, *(size for size, _ in found)})
    rows = [
        (
            f"{size >> 20} MiB",
            ", ".join(theirs.get(size, ["-"])),
            *(f"{found[size, name]:.1f}" if (size, name) in found else "-" for name in _GATHERS),
        )
        for size in sizes
    ]
    heads = "of each rank", "RCCL, Triton, Gluon", "weft", "weft (plain)", "gloo"
    return [table(heads, rows)]


def tables(directories: Sequence[Path]) -> list[list[str]]:
    """The tables of each of the page's numbered sections."""

    def load(name: str) -> Any:
        files = (directory / f"{name}.json" for directory in directories)
        for file in files:
            if file.exists():
                return json.loads(file.read_text())
        raise SystemExit(
            f"no {name}.json in {', '.join(map(str, directories)) or 'no directory'}: name the "
            "directories with all results of five_systems.sh"
        )

    return [part(load) for part in (streaming, steps, copies, linear, gather)]


def with_tables(page: str, sections: Sequence[Sequence[str]]) -> str:
    """A page whose numbered sections have these tables, in their order, in place of others."""
    first, *parts = re.split(r"(?=^### \d)", page, flags=re.MULTILINE)
    made = [first]
    for part, own in zip(parts, sections, strict=True):
        others = re.findall(r"(?:^\|.*\n)+", part, flags=re.MULTILINE)
        for other, new in zip(others, own, strict=True):
            part = part.replace(other, new + "\n")
        made.append(part)
    return "".join(made)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(), tables([*map(Path, sys.argv[1:])])))
