"""Write the tables of docs/comparison.md, the published figures of five systems and weft's, from
tables that `kept.py` has made of results of `five_systems.sh`.

    python benchmarks/five_systems.py TABLE.csv…
"""

import csv
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import kept

Row = dict[str, str]
Result = dict[str, kept.Figures]
_GATHERS = "weft", "weft (plain)", "gloo"
PUBLISHED = Path(__file__).parent / "published_results.csv"
PAGE = Path(__file__).parents[1] / "docs/comparison.md"
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


def overlapped(result: Result) -> list[str]:
    """The times and figures of a fused operator."""
    [figures] = result.values()
    times = [f"{figures[name]:.2f}" for name in ("compute", "sequential", "pipelined")]
    return [*times, f"{figures['speedup']:.2f}x", f"{figures['limit_ratio']:.2f}"]


OVERLAPPED = "compute", "sequential", "pipelined", "speedup", "limit ratio"


def streaming(load: Callable[[str], Result]) -> list[str]:
    rows = []
    for row in published("allgather_gemm"):
        m, k, n = (int(row[name]) for name in "mkn")
        flops = 2 * m * k * n
        ranks = row["ranks"]
        theirs = f"{float(row['value']):.3f} ms", f"{flops / float(row['value']) / 1e9:.0f}"
        ours = load(f"streaming-{ranks}-{m // 2}x{k // 2}x{n // 2}")
        rows.append((ranks, f"{m}x{k}x{n}", *theirs, *overlapped(ours)))
    theirs_heads = "ranks", "M x K x N", "910B1", "TFLOP/s"
    return [table((*theirs_heads, *(f"half: {OVERLAPPED[0]}", *OVERLAPPED[1:])), rows)]


def steps(load: Callable[[str], Result]) -> list[str]:
    theirs = [float(row["value"]) for row in published("all_gather_matmul_v2")]
    ours = {ranks: load(f"steps-{ranks}")["all-gather-matmul"] for ranks in (2, 4)}
    names = ["cascade", "overlapped", "+ own rows first", "+ arrivals joined"]

    def cells(times: Sequence[float], unit: str, at: int) -> list[str]:
        return [f"{times[at]:.{0 if unit == 'us' else 2}f} {unit}", f"{times[0] / times[at]:.2f}x"]

    medians = {ranks: [found[name] for name in names] for ranks, found in ours.items()}
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


def copies(load: Callable[[str], Result]) -> list[str]:
    found = load("copies")
    gbs, cycles = (
        {(int(row["bytes"]), row["variant"]): float(row["value"]) for row in published(system)}
        for system in ("tget_bandwidth", "tget_cycles")
    )
    ways = "weft (staged)", "weft", "weft (async)"
    rows = []
    for size in sorted({size for size, _ in gbs}):
        theirs = [(gbs[size, v], cycles[size, v]) for v in ("TGET", "TGET_ASYNC")]
        ours = [found[f"get {way} {size}"] for way in ways]
        rows.append(
            (
                f"{size >> 10} KiB",
                ", ".join(f"{one:.2f}" for one, _ in theirs),
                ", ".join(f"{ticks:,.0f}" for _, ticks in theirs),
                ", ".join(f"{row['algbw_gbps']:.1f}" for row in ours),
                ", ".join(_thousands(row.get("transfer_cycles")) for row in ours),
                ", ".join(_thousands(row["cycles"]) for row in ours),
            )
        )
    heads = "GET, ASYNC: GB/s", "ticks", "staged, get, async: GB/s", "kcycles", "of the caller"
    return [table(("size", *heads), rows)]


def _thousands(cycles: float | None) -> str:
    return "-" if cycles is None else f"{cycles / 1e3:,.0f}"


def linear(load: Callable[[str], Result]) -> list[str]:
    cut = [(str(chunks), load(f"linear-{chunks}")) for chunks in (1, 2, 4)]
    cut.append(("2, symmetric result", load("linear-symmetric")))
    theirs = [float(row["value"]) for row in published("bench_overlapped_matmul_allgather")]
    ours = load("beside")["overlap"]
    medians = [ours[name] for name in ("sequential", "overlapped")]
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


def gather(load: Callable[[str], Result]) -> list[str]:
    found = load("gather")
    of_weft = {int(case.split()[-1]) for case in found}

    def bandwidth(size: int, row: kept.Figures | None) -> str:
        return f"{size / row['time_us'] / 1e3:.1f}" if row else "-"

    theirs: dict[int, list[str]] = {}
    for row in published("iris_all_gather"):
        assert row["unit"] == "GiB/s"
        theirs.setdefault(int(row["bytes"]), []).append(f"{GIB * float(row['value']):.0f}")
    sizes = sorted({*theirs, *of_weft})
    rows = [
        (
            f"{size >> 20} MiB",
            ", ".join(theirs.get(size, ["-"])),
            *(bandwidth(size, found.get(f"all_gather {name} {size}")) for name in _GATHERS),
        )
        for size in sizes
    ]
    heads = "of each rank", "RCCL, Triton, Gluon", "weft", "weft (plain)", "gloo"
    return [table(heads, rows)]


def tables(files: Sequence[Path]) -> list[list[str]]:
    """The tables of each of the page's numbered sections."""
    results = {name: result for file in files for name, result in kept.load(file).items()}

    def load(name: str) -> Result:
        if name not in results:
            raise SystemExit(
                f"no result {name} in {', '.join(map(str, files)) or 'no table'}: name the tables "
                "with all results of five_systems.sh"
            )
        return results[name]

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
