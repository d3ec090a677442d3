"""The options that several benchmarks have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from typer import Option

from weft.cli import common
from weft.cli.common import Device, Engine, Placed, Threads
from weft.cli.conditions import Also, Unless
from weft.cli.values import gbps, option
from weft_tools.bench import systems

FROM_HOST = Also({"--peers host"})
"""Modes in which few options have an effect."""
RANKS = "Number of ranks to start; default 2, or a launcher's."
Several = Annotated[int | None, Option("--ranks", "-n", min=2, help=RANKS)]
Warmup = Annotated[int, Option(min=1, help="Rounds to run before measuring."), FROM_HOST]
Iterations = Annotated[int, Option(min=1, help="Rounds to measure."), FROM_HOST]
Seed = Annotated[int, Option(min=0, help="Seed of the random data."), FROM_HOST]
Baseline = Annotated[
    str | None, Option(help="gloo or none; default gloo without an emulated link.")
]
_LINK = "Emulate a slower link; auto: communication takes as long as compute."
Gbps = Annotated[str | None, option(gbps, "GBPS|auto", _LINK), Unless(common.not_emulated)]
Json = Annotated[common.Json, FROM_HOST]
Plot = Annotated[common.Plot, FROM_HOST]
CHECKING = ("reference", "interpreter")
"""Engines that are for checks: their times say nothing of the speed of a machine."""
_NEIGHBOURS = "Busy processes on each host; collectives are then timed call by call, also with 0."
Neighbours = Annotated[int | None, Option(min=0, help=_NEIGHBOURS)]
Element = Literal["float16", "bfloat16", "float32", "float64", "int8", "int32", "int64"]


_GRAPH = "On a GPU: time replays of calls that a CUDA graph has captured."


def _without_graphs(settings: Any) -> str:
    """Why no calls are captured."""
    if settings.device == "cpu":
        return "graphs are of GPUs: use --device cuda"
    if getattr(settings, "trace", None) or getattr(settings, "timeline", None):
        return "what a graph replays is not recorded: omit --trace and --timeline"
    if getattr(settings, "return_gathered", False):
        return "a replay does not return the gathered rows anew: omit --return-gathered"
    return ""


Graph = Annotated[bool, Option("--graph", help=_GRAPH), Unless(_without_graphs)]


def chosen(settings: Any, by_default: bool) -> tuple[str, ...]:
    """The names of the baselines that the user has chosen: by default the device's first one if
    there is one `by_default`, or none.
    """
    default = systems.of_collectives(settings.device)[0] if by_default else "none"
    text = settings.baseline or default
    return () if text == "none" else tuple(text.split(","))


class Compared(Placed):
    """Settings of a benchmark with baselines and the option of an emulated link."""

    baseline: str | None
    link_gbps: str | None

    @property
    def baselines(self) -> tuple[str, ...]:
        """The names of the baselines: by default the device's first one; none on an emulated link,
        which would not slow it down, or by an engine that only checks.
        """
        return chosen(self, not self.link_gbps and self.engine not in CHECKING)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The files of the result, the threads and the neighbours: the last options of a command."""

    json_file: Json = None
    plot: Plot = None
    threads: Threads = None
    neighbours: Neighbours = None


@dataclass(frozen=True, kw_only=True)
class OnDevice(Placed, Shown):
    """The same with the device and the engine, of benchmarks that honour them."""

    device: Device = "cpu"
    engine: Engine = None
