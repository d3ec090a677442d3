"""The medians of results, as the one table that `benchmarks/results` has for each machine.

    python benchmarks/kept.py FILE.json… > benchmarks/results/MACHINE.csv

A line is a result, named as its file, a case of it, and the names and values of its figures, of
what `weft bench … --json`, `make vllm` and `predict_then_measure.py` write.
"""

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Figures = dict[str, float]


def cases(result: dict[str, Any]) -> Iterator[tuple[str, Figures]]:
    """The cases of a result, and the figures of each."""
    if "configurations" in result:
        rows, of = result["configurations"], _prediction
    elif result["benchmark"] == "vllm":
        rows, of = result["rows"], _serving
    elif "rows" in result:
        rows, of = result["rows"], _transfer
    else:
        rows, of = [result], _overlap
    return map(of, rows)


def _overlap(row: dict[str, Any]) -> tuple[str, Figures]:
    """Of a fused operator, or of a product beside a collective."""
    times = row["times_ms"] | row.get("ablation_ms", {})
    figures = {name: row[name] for name in ("speedup", "limit_ratio")}
    return row["benchmark"], {name: found["median"] for name, found in times.items()} | figures


def _transfer(row: dict[str, Any]) -> tuple[str, Figures]:
    """Of a collective or a one-sided copy of one size."""
    place = " in place" if row.get("in_place") else ""
    of_copies = ("algbw_gbps", "transfer_cycles", "cycles") if "cycles" in row else ()
    figures = {name: row[name] for name in of_copies if row.get(name) is not None}
    case = f"{row['operation']} {row['implementation']}{place} {row['size_bytes']}"
    return case, {"time_us": row["time_us"]["median"]} | figures


def _serving(row: dict[str, Any]) -> tuple[str, Figures]:
    """Of a model that vLLM serves."""
    figures = {f"prefill_ms {length}": time for length, time in row["prefill_ms"].items()}
    for kind, names in (("token_ms", ("median",)), ("neighbours_ms", ("median", "p99"))):
        for number, times in row.get(kind, {}).items():
            figures |= {f"{kind} {number} {name}": times[name] for name in names}
    return f"{row['model']} {row['mode']} {row['variant']}", figures


def _prediction(row: dict[str, Any]) -> tuple[str, Figures]:
    """Of a random configuration of a fused operator."""
    case, times = row["case"], [each["measured_ms"] for each in row["ways"]]
    figures = {name: row[name] for name in ("predicted_ms", "measured_ms", "median_ms")}
    figures |= {"predicted_best_ms": times[0], "best_ms": min(times)}
    return f"{case['operator']} {sum(case['rows'])}x{case['k']}x{case['n']}", figures


def load(path: Path) -> dict[str, dict[str, Figures]]:
    """The figures of a table by result and case."""
    found: dict[str, dict[str, Figures]] = {}
    with path.open() as file:
        for name, case, *cells in csv.reader(file):
            figures = dict(zip(cells[::2], map(float, cells[1::2]), strict=True))
            found.setdefault(name, {})[case] = figures
    return found


if __name__ == "__main__":
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for name in sys.argv[1:]:
        for case, figures in cases(json.loads(Path(name).read_text())):
            cells = (cell for pair in figures.items() for cell in (pair[0], f"{pair[1]:.6g}"))
            writer.writerow([Path(name).stem, case, *cells])
