"""The results of `first.sh` and `second.sh` in a folder as tables; results that are missing or
broken are told.

    python benchmarks/gpu/summary.py FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Rows = Iterable[Sequence[object]]


def load(file: Path) -> Any:
    """The content of a file of JSON, or of a line each; None without a readable one."""
    try:
        text = file.read_text()
        if file.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines()]
        return json.loads(text)
    except (OSError, ValueError):
        return None


def table(header: Sequence[str], rows: Rows) -> None:
    """Print a table of Markdown; numbers with four digits."""

    def line(cells: Sequence[object]) -> str:
        shown = (f"{each:.4g}" if isinstance(each, float) else str(each) for each in cells)
        return f"| {' | '.join(shown)} |"

    print("", line(header), line(["---"] * len(header)), *map(line, rows), sep="\n")


def assumptions(found: dict[str, Any]) -> None:
    """What `weft doctor --gpu` was told, those first that are not fine."""
    print(json.dumps(found["machine"], default=str))
    every = found["questions"]
    order = sorted(every, key=lambda name: every[name]["verdict"] == "fine")
    table(("question", "", "means"), [(n, every[n]["verdict"], every[n]["means"]) for n in order])


def ladder(lines: Sequence[dict[str, Any]]) -> None:
    last = {line["rung"]: line for line in lines}
    bad = [line for line in last.values() if line["state"] != "ok"]
    seconds = sum(line.get("seconds", 0.0) for line in last.values())
    print(f"{len(last) - len(bad)} of {len(last)} rungs begun passed, in {seconds:.1f} s")
    if bad:
        table(
            ("rung", "state", "s", "error"),
            [
                (
                    line["rung"],
                    "HUNG" if line["state"] == "begun" else line["state"],
                    line.get("seconds", ""),
                    line.get("error", "")[:200],
                )
                for line in bad
            ],
        )


def rates(found: dict[str, Any]) -> None:
    header = "m x k x n", "tile", "kernel TFLOP/s", "torch.mm", "by default", "ratio", "wrong"
    table(
        (*header, "registers / spills / shared", "error"),
        [
            (
                "x".join(map(str, row["shape"].values())),
                "x".join(map(str, row["tile"] or ["own"])),
                *(
                    row.get(f"{name}_tflops", "")
                    for name in ("kernel", "torch_mm", "torch_mm_default")
                ),
                row.get("ratio", ""),
                sum(row.get("wrong", {}).values()),
                " / ".join(str(row.get(name, "")) for name in ("registers", "spills", "shared")),
                row.get("error", ""),
            )
            for row in found["products"]
        ],
    )


def fused(found: dict[str, Any]) -> None:
    """A column for each world, milliseconds."""
    worlds = found["worlds"]
    names = [f"{world['ranks']} {world['products']}" for world in worlds]
    times = [world.get("times_ms", {}) for world in worlds]
    views = dict.fromkeys(view for world in times for view in world)
    rows = [(view, *(world.get(view, "-") for world in times)) for view in views]
    rows.append(("wrong", *(sum(world.get("wrong", {}).values()) for world in worlds)))
    rows.append(("peak GiB", *(world.get("peak_gib", "-") for world in worlds)))
    table(("ms", *names), rows)
    for name, world in zip(names, worlds, strict=True):
        if "error" in world:
            print(f"- {name}: {world['error']}")


def benchmark(found: dict[str, Any]) -> None:
    """A result of `weft bench`."""
    right = "verified" if found.get("verified") else "WRONG, or not complete"
    if "rows" not in found:
        times = found.get("times_ms", {}) | found.get("baselines_ms", {})
        medians = ", ".join(f"{name} {each['median']:.4g}" for name, each in times.items())
        ratio = found.get("limit_ratio")
        limit = f"; limit ratio {ratio:.3f}" if ratio is not None else ""
        print(f"{medians} ms{limit}; {right}")
        return
    print(right)
    table(
        ("bytes", "operation", "implementation", "in place", "SMs", "us", "GB/s", "wrong"),
        [
            (
                row["size_bytes"],
                row["operation"],
                row["implementation"],
                row.get("in_place", ""),
                row.get("comm_sms") or "-",
                row["time_us"]["median"],
                row["algbw_gbps"],
                row["wrong"],
            )
            for row in found["rows"]
        ],
    )


SECTIONS: dict[str, Callable[[Any], None]] = {
    "assumptions.json": assumptions,
    "late.json": assumptions,
    "ladder.jsonl": ladder,
    "rates.json": rates,
    "fused.json": fused,
}


def section(title: str, show: Callable[[Any], None], content: Any) -> None:
    print(f"\n## {title}\n")
    if content is None:
        print("no result: see all.log")
        return
    try:
        show(content)
    except (AttributeError, KeyError, TypeError) as error:
        print(f"cannot be read ({type(error).__name__}: {error}): {json.dumps(content)[:300]}")


def main(folder: Path) -> None:
    print("# Results")
    for name, show in SECTIONS.items():
        if (folder / name).exists():
            section(name, show, load(folder / name))
    for name, content in (load(folder / "bench.json") or {}).items():
        section(name, benchmark, content)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
