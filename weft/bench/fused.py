"""The benchmark of a fused operator: its parts alone, one after the other, and overlapped, on the same data in one run.

What is particular to an operator is its `Subject`; measuring, verifying and tracing are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from weft.bench.harness import Statistics, Stopwatch, poison, session, verified, where, worst
from weft.bench.progress import progress
from weft.bench.verification import Check
from weft.engines.recording import record
from weft.ops.call import Decision
from weft.plan import Copy, Plan
from weft.plan.trace import Trace
from weft.world import World

VIEWS = ("compute", "communicate", "sequential", "pipelined")
Times = TypeVar("Times")
_TRACED = 5  # runs of a view, of which the one with the median time is shown


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


class Rounds(Protocol):
    """How often to measure: rounds that warm up, and rounds that count."""

    @property
    def warmup(self) -> int: ...
    @property
    def iterations(self) -> int: ...


class View(NamedTuple):
    """Something to measure: a call that all ranks make, the tensors it writes, and a check of these in a given run."""

    call: Callable[[], object]
    outputs: tuple[Tensor, ...]
    check: Callable[[int], Check]


class Views(Protocol):
    """What one rank measures, by name, all on the same inputs."""

    views: dict[str, View]

    def renew(self, run: int) -> None:
        """Fill the inputs with those of this run."""


class Subject(Views, Protocol):
    """An operator to measure: its views are `VIEWS`, baselines and steps; `ablation` names the steps, in order."""

    ablation: dict[str, str]
    choice: Decision
    notes: tuple[str, ...]


def measure(make_subject: Callable[[Settings, World, Stopwatch], Subject], settings: Settings) -> Result:
    """Measure on this rank, collectively. Traces are on rank 0 only."""
    with session(settings.threads) as world:
        stopwatch = Stopwatch(world)
        subject, traces = make_subject(settings, world, stopwatch), list[Trace | None]()

        def race() -> dict[str, Statistics]:
            times = interleave(subject, stopwatch, settings)
            traces.extend(trace(subject, world, stopwatch, name) for name in ("sequential", "pipelined") if settings.traced)
            return times

        times, checks = verify(subject, world, race)
        if settings.save_outputs:
            torch.save(subject.views["pipelined"].outputs[0], settings.save_outputs / f"rank{world.rank}.pt")
        return Result(
            settings,
            world.ranks,
            subject.choice.algorithm,
            subject.choice.chunk_rows,
            subject.choice.why,
            Link(*world.emulated_link) if world.emulated_link else None,
            times={name: times[name] for name in VIEWS},
            baselines={name: times[name] for name in settings.baselines},
            ablation={step: times[name] for step, name in subject.ablation.items()},
            checks=checks,
            traces=[trace for trace in traces if trace],
            notes=subject.notes,
            hosts=len(set(world.hosts)),
            **where(world),
        )


def verify(subject: Views, world: World, race: Callable[[], Times]) -> tuple[Times, dict[str, Check]]:
    """What `race` finds, and of every view the worst check of any rank, before and after it.

    Each is run on inputs of its own, into poisoned outputs; ``pipelined`` comes last, so its output stays.
    """

    def check(name: str, run: int) -> Check:
        view = subject.views[name]
        subject.renew(run)
        poison(*view.outputs)
        view.call()
        return worst(world, view.check(run))

    names = sorted(subject.views, key="pipelined".__eq__)
    times, checks = verified(names, check, race)
    return times, dict(zip(names, checks, strict=True))


def interleave(subject: Views, stopwatch: Stopwatch, rounds: Rounds) -> dict[str, Statistics]:
    """Time all views in turn, behind a progress bar of rank 0."""
    with progress("measuring", rounds.iterations + max(rounds.warmup, 1) - 1, shown=stopwatch.world.rank == 0) as advance:
        calls = {name: view.call for name, view in subject.views.items()}
        return stopwatch.interleave(calls, rounds.warmup, rounds.iterations, advance)


def trace(subject: Views, world: World, stopwatch: Stopwatch, name: str) -> Trace | None:
    """The trace of a view's run with the median time, on rank 0."""
    traces = []
    for _ in range(_TRACED):
        stopwatch.time(lambda: None)
        with record(world) as recording:
            subject.views[name].call()
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
