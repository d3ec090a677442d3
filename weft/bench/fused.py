"""The benchmark of a fused operator: its parts alone, one after the other, and overlapped, on the same data in one run.

What is particular to an operator is its `Case`; measuring, verifying and tracing are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from weft.bench import environment
from weft.bench.progress import progress
from weft.bench.timing import Statistics, Stopwatch, largest
from weft.bench.verification import Check
from weft.engines.recording import record
from weft.ops.choice import Choice
from weft.plan import Copy, Plan
from weft.plan.trace import Trace
from weft.world import World, init

VIEWS = ("compute", "communicate", "sequential", "pipelined")
_TRACED = 5  # runs of a view, of which the one with the median time is shown
_TIMEOUT = 600.0  # seconds; a baseline may keep one rank longer than another


class Link(NamedTuple):
    """An emulated link: bandwidth in 1e9 bits per second, or None for one on which communicate takes as long as compute."""

    gbps: float | None
    latency_us: float


@dataclass(frozen=True)
class Settings:
    """What to measure. `m` counts the gathered rows, which are shared out over the ranks as evenly as it goes."""

    benchmark: str
    m: int
    k: int
    n: int
    dtype: str = "float32"
    out_dtype: str = "float32"
    algorithm: str = "auto"
    chunk_rows: int | None = None
    warmup: int = 3
    iterations: int = 20
    seed: int = 0
    baselines: tuple[str, ...] = ()
    link: Link | None = None
    ablate: bool = False
    traced: bool = False
    save_outputs: Path | None = None
    threads: int = 1


@dataclass(frozen=True)
class Result:
    """What was measured.

    `times` has the four views, `baselines` and `ablation` what they are compared with. `checks` holds the worst that verification
    found for each of these before and after timing on any rank. `algorithm`, `chunk_rows` and `link` are those that were used, and
    `why` says why the algorithm was; `notes` are what else one must know to read the times.
    """

    settings: Settings
    ranks: int
    algorithm: str
    chunk_rows: int
    why: str
    link: Link | None
    times: dict[str, Statistics]
    baselines: dict[str, Statistics]
    ablation: dict[str, Statistics]
    checks: dict[str, Check]
    machine: dict[str, Any]
    versions: dict[str, str]
    traces: list[Trace]
    notes: tuple[str, ...] = ()
    hosts: int = 1

    @property
    def verified(self) -> bool:
        """Whether every element of every result was right on every rank."""
        return not any(check.wrong for check in self.checks.values())


class View(NamedTuple):
    """Something to measure: a call that all ranks make, the tensor it writes, and a check of that tensor in a given run."""

    call: Callable[[], object]
    output: Tensor
    check: Callable[[Tensor, int], Check]


class Case(Protocol):
    """An operator to measure, on one rank: its views by name (`VIEWS`, baselines, steps) and which of them make up the ablation."""

    views: dict[str, View]
    ablation: dict[str, str]
    choice: Choice
    notes: tuple[str, ...]

    def renew(self, run: int) -> None:
        """Fill the inputs with those of this run."""


def measure(make_case: Callable[[Settings, World, Stopwatch], Case], settings: Settings) -> Result:
    """Measure on this rank, collectively. Traces are on rank 0 only."""
    torch.set_num_threads(settings.threads)
    with init(timeout=_TIMEOUT) as world, torch.no_grad():
        stopwatch = Stopwatch(world)
        case = make_case(settings, world, stopwatch)
        checks = verify(case, world, 0)
        with progress("measuring", settings.iterations + max(settings.warmup, 1) - 1, shown=world.rank == 0) as advance:
            calls = {name: view.call for name, view in case.views.items()}
            times = stopwatch.interleave(calls, settings.warmup, settings.iterations, advance)
        traces = [trace(case, world, stopwatch, name) for name in ("sequential", "pipelined")] if settings.traced else []
        for name, check in verify(case, world, len(case.views)).items():
            checks[name] = check.worse(checks[name])
        if settings.save_outputs:
            torch.save(case.views["pipelined"].output, settings.save_outputs / f"rank{world.rank}.pt")
        return Result(
            settings,
            world.ranks,
            case.choice.algorithm,
            case.choice.chunk_rows,
            case.choice.why,
            Link(*world.link) if world.link else None,
            {name: times[name] for name in VIEWS},
            {name: times[name] for name in settings.baselines},
            {step: times[name] for step, name in case.ablation.items()},
            checks,
            environment.machine(world),
            environment.versions(),
            [trace for trace in traces if trace],
            case.notes,
            len(set(world.hosts)),
        )


def verify(case: Case, world: World, run: int) -> dict[str, Check]:
    """Run every view on inputs of its own, `run` and following, into a poisoned output; the worst check of any rank.

    ``pipelined`` comes last, so its output stays.
    """
    checks = {}
    for name in sorted(case.views, key="pipelined".__eq__):
        view = case.views[name]
        case.renew(run)
        view.output.fill_(torch.nan)
        view.call()
        wrong, max_error, bound = largest(world, view.check(view.output, run))
        checks[name] = Check(int(wrong), max_error, bound)
        run += 1
    return checks


def trace(case: Case, world: World, stopwatch: Stopwatch, name: str) -> Trace | None:
    """The trace of a view's run with the median time, on rank 0."""
    traces = []
    for _ in range(_TRACED):
        stopwatch.time(lambda: None)
        with record(world) as recording:
            case.views[name].call()
        traces.append(recording.gather(name))
    return sorted((t for t in traces if t), key=lambda t: t.seconds)[_TRACED // 2] if world.rank == 0 else None


def balanced_gbps(gather: Plan, row_bytes: int, compute: float, latency_us: float) -> float:
    """The bandwidth, in Gbit/s, at which the busiest rank's copies of rows to and from peers take `compute` seconds."""
    bits = 0.0
    for lanes in gather.lanes:
        moved = [i.src.rows for lane in lanes.values() for i in lane if isinstance(i, Copy) and i.src.rank != i.dst.rank]
        left = compute - len(moved) * latency_us * 1e-6
        if left <= 0:
            raise ValueError(
                f"{len(moved)} transfers of {latency_us:g} us each take longer than the product ({1e3 * compute:.3f} ms): "
                "choose a lower latency or larger chunks, or give the bandwidth"
            )
        bits = max(bits, sum(moved) * row_bytes * 8 / left)
    return float(f"{bits / 1e9:.4g}")
