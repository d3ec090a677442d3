"""What became slower since another commit: ``make speed BASE=COMMIT``.

The commit is built in ``build/speed``, beside this one; both run the same calls (`calls.py`)
alternately, in several rounds, and a table has the medians and their ratio. ``--keep`` writes it to
``benchmarks/results/speed``, a file for each kind of processor.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer
from calls import GROUPS
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

import weft.cache as cache
from weft.measure.versions import versions
from weft_tools.bench import tables
from weft_tools.bench.harness import host, utc

HERE = Path(__file__).parent
ROOT = HERE.parent
KEPT = HERE / "results" / "speed"
TOLERATED = 1.05
"""Times the base's time: a call above it, in the median of all rounds and in most of them, became
slower; on a machine that is not idle medians differ by some percent.
"""


class Row(NamedTuple):
    """A call: its group, its name, and its microseconds in each round, of the base and now."""

    group: str
    name: str
    base: list[float]
    now: list[float]

    @property
    def ratio(self) -> float:
        """The time of the base, relative to that of now: above 1 it became faster."""
        return median(self.base) / median(self.now)

    @property
    def slower(self) -> bool:
        rounds = [now > TOLERATED * base for base, now in zip(self.base, self.now, strict=True)]
        return 1 / self.ratio > TOLERATED and 2 * sum(rounds) > len(rounds)


def built(commit: str) -> tuple[str, Path]:
    """The full name of a commit, and the folder in which it is built."""
    name = _output("git", "rev-parse", "--verify", f"{commit}^{{commit}}")
    folder = ROOT / "build" / "speed" / name[:12]
    if not folder.exists():
        _output("git", "worktree", "prune")
        _output("git", "worktree", "add", "--detach", str(folder), name)
    subprocess.run(["make", "-C", str(folder), ".venv/command"], check=True, stdout=sys.stderr)
    return name, folder


def _output(*words: str) -> str:
    return subprocess.run(
        words, check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()


def times(folder: Path, group: str, ranks: int) -> dict[str, float]:
    """The microseconds of the calls of a group, by the weft that is built in a folder; none if it
    cannot run them.
    """
    command = [str(folder / ".venv/bin/weft"), "run", "-n", str(ranks), str(HERE / "calls.py")]
    done = subprocess.run([*command, group], capture_output=True, text=True, cwd=folder)
    if done.returncode:
        print(f"{folder.name}, {group}: {done.stderr.strip()[-400:]}", file=sys.stderr)
        return {}
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(base: Path, groups: list[str], rounds: int, ranks: int, console: Console) -> list[Row]:
    """The rows of all groups, of which both commits run each in every round, in turn first."""
    rows = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=2 * rounds * len(groups))
        for group in groups:
            for number in range(rounds):
                found = {}
                for folder in (base, ROOT) if number % 2 else (ROOT, base):
                    progress.update(task, description=f"{group}, round {number + 1} of {rounds}")
                    found[folder] = times(folder, group, ranks)
                    progress.advance(task)
                for name in filter(found[base].__contains__, found[ROOT]):
                    row = rows.setdefault((group, name), Row(group, name, [], []))
                    row.base.append(found[base][name])
                    row.now.append(found[ROOT][name])
    return [*rows.values()]


def table(rows: list[Row], base: str) -> Table:
    """The rows, those that became slower in red."""
    made = Table(box=None, pad_edge=False)
    made.add_column("", no_wrap=True)
    for header in (f"{base[:9]} us", "now us", "ratio"):
        made.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        style = "bold red" if row.slower else ""
        words = Text(f"{row.ratio:.2f}" + (" SLOWER" if row.slower else ""), style)
        made.add_row(
            f"{row.group}: {row.name}",
            f"{median(row.base):.2f}",
            f"{median(row.now):.2f}",
            words,
        )
    return made


def kept(rows: list[Row], about: dict[str, Any]) -> Path:
    """The file in which the table of this kind of processor is written, in Markdown."""
    machine = about["machine"]
    words = re.findall(r"[a-z0-9]+", f"{cache.processor()} {machine['cores']} cores".lower())
    commit = about["commit"][:9] + (" with changes" if about["changed"] else "")
    lines = [
        f"# {machine['cpu']}, {machine['cores']} cores",
        "",
        f"`make speed BASE={about['base'][:9]}` at {commit}, {about['ranks']} ranks, "
        f"{about['date']}, {', '.join(' '.join(each) for each in about['versions'].items())}.",
        "Medians in microseconds; a ratio above 1: it became faster.",
        "",
        "| | base | now | ratio |",
        "|---|---|---|---|",
    ]
    for row in rows:
        ratio = f"**{row.ratio:.2f}**" if row.slower else f"{row.ratio:.2f}"
        cells = f"{row.group}: {row.name}", f"{median(row.base):.2f}", f"{median(row.now):.2f}"
        lines.append(f"| {' | '.join((*cells, ratio))} |")
    KEPT.mkdir(exist_ok=True)
    file = KEPT / f"{'-'.join(words)}.md"
    file.write_text("\n".join([*lines, ""]))
    return file


def main(
    base: Annotated[str, typer.Argument(help="The commit to compare with.")],
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each commit.")] = 3,
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    only: Annotated[list[str] | None, typer.Option(help=f"Groups: {', '.join(GROUPS)}.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all times.")] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the table for this processor.")
    ] = False,
) -> None:
    """Compare this commit with an earlier one, interleaved, and list what became slower."""
    console = Console()
    if unknown := {*(only or GROUPS)} - {*GROUPS}:
        raise typer.BadParameter(f"no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    name, folder = built(base)
    rows = compare(folder, [*(only or GROUPS)], rounds, ranks, console)
    tables.print_wide(console, table(rows, name))
    slower = [row for row in rows if row.slower]
    console.print(
        f"{len(slower)} of {len(rows)} calls take more than {TOLERATED:g} times as long as at "
        f"{name[:9]}, in the median of {rounds} rounds and in most of them."
    )
    about = {
        "benchmark": "speed",
        "base": name,
        "commit": _output("git", "rev-parse", "HEAD"),
        "changed": bool(_output("git", "status", "--porcelain", "--untracked-files=no")),
        "ranks": ranks,
        "date": utc(),
        "machine": host(len(os.sched_getaffinity(0)), 1),
        "versions": versions(),
    }
    if keep:
        console.print(f"Kept in {kept(rows, about)}.")
    if json_file is not None:
        json_file.write_text(json.dumps(about | {"rows": [r._asdict() for r in rows]}, indent=1))


if __name__ == "__main__":
    typer.run(main)
