"""The settings of the benchmarks of collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from typer import Option

from weft.cli.conditions import Unless
from weft.cli.values import of_numbers, of_sizes, option, parse_sizes
from weft.plan.launch import Launch
from weft.schedules import all_gather, all_reduce
from weft_tools.bench import systems
from weft_tools.bench.settings.shared import (
    CHECKING,
    Element,
    Graph,
    OnDevice,
    Seed,
    Several,
    chosen,
)

COMPILERS = {"cpu": ("triton",), "cuda": ("triton", "gluon")}
"""The compilers of kernels by device: Gluon has no interpreter."""

Op = Annotated[Literal["sum", "avg", "max", "min"], Option(help="The reduction.")]
_SIZES = "Bytes of each rank's input; K, M, G are binary."
_BATCHES = "Rounds of batches to measure."
_SECONDS = "Time of the measurement, about: slow calls get fewer batches."
_WARMUP = "Rounds of batches to run before measuring."
_OTHERS = (
    f"One or more of {', '.join(systems.of_collectives('cpu'))}, on GPUs nccl and torch, or none. "
    "`make baselines` installs those but gloo."
)


@dataclass(frozen=True)
class SweepSettings(OnDevice):
    """A collective over message size."""

    operation: str
    op: str = "sum"
    algorithm: str = "auto"
    ranks: Several = None
    sizes: Annotated[str, of_sizes(_SIZES)] = "4K:64M:4"
    dtype: Annotated[Element, Option(help="Dtype of the elements.")] = "float32"
    warmup: Annotated[int, Option(min=0, help=_WARMUP)] = 2
    iterations: Annotated[int, Option(min=1, help=_BATCHES)] = 20
    seconds: Annotated[float, Option(min=0, help=_SECONDS)] = 600.0
    seed: Seed = 0
    baseline: Annotated[str | None, Option(help=_OTHERS)] = None
    graph: Graph = False

    @property
    def baselines(self) -> tuple[str, ...]:
        """The names of the baselines; by default gloo, which has no averages."""
        return chosen(self, self.op != "avg" and self.engine not in CHECKING)

    @property
    def launches(self) -> list[Launch]:
        """The launches of kernels that are measured as well."""
        return []


_GATHER = "auto", *all_gather.ALGORITHMS
_REDUCE = "auto", *all_reduce.ALGORITHMS


def _on_cpu(settings: SweepSettings) -> str:
    """Why no kernel runs."""
    if settings.device == "cuda" or settings.engine == "interpreter":
        return ""
    return "kernels run on GPUs: use --device cuda, or --engine interpreter"


def _movement(settings: SweepSettings) -> str:
    return _on_cpu(settings) if settings.algorithm in all_gather.COLLECTIVE.launched else ""


def _compiler(settings: AllGather) -> str:
    if "gluon" in (settings.compiler or "") and settings.device == "cpu":
        return "Gluon has no interpreter: use --compiler triton"
    return _on_cpu(settings)


def _compilers(text: str) -> None:
    """Check names of compilers such as ``triton,gluon``."""
    if not {*text.split(",")} <= {*COMPILERS["cuda"]}:
        raise ValueError(f"expected triton, gluon or both, as triton,gluon; got {text!r}")


_SMS = "Measure the kernel on these numbers of SMs, with each tile and number of warps."
_TILES = of_sizes("Bytes of the kernel's tiles; default 32K.", "BYTES,…")
_WARPS = of_numbers("Warps of the kernel's programs; default 8.")
_NAMES = "Compilers of the kernel, of triton and gluon; default both, or triton on a CPU."
_COMPILERS = option(_compilers, "NAME,…", _NAMES)
_MOVES = Option(help="The movement of the rows.")


@dataclass(frozen=True)
class AllGather(SweepSettings):
    """All-gather over message size, out of place and in place."""

    operation: str = "all_gather"
    algorithm: Annotated[str, _MOVES, _GATHER, Unless(_movement)] = "auto"
    comm_sms: Annotated[str | None, of_numbers(_SMS), Unless(_on_cpu)] = None
    tile: Annotated[str | None, _TILES, Unless(_on_cpu)] = None
    warps: Annotated[str | None, _WARPS, Unless(_on_cpu)] = None
    compiler: Annotated[str | None, _COMPILERS, Unless(_compiler)] = None

    @property
    def launches(self) -> list[Launch]:
        """The launches with every combination of the options; none if none is given."""
        if not (self.comm_sms or self.tile or self.warps or self.compiler):
            return []
        default, compilers = Launch(), ",".join(COMPILERS[self.device])
        return [
            Launch(int(sms), tile, int(warps), compiler == "gluon")
            for compiler in (self.compiler or compilers).split(",")
            for tile in parse_sizes(self.tile or str(default.tile_bytes))
            for warps in (self.warps or str(default.warps)).split(",")
            for sms in (self.comm_sms or str(default.comm_sms)).split(",")
        ]


@dataclass(frozen=True)
class ReduceScatter(SweepSettings):
    """Reduce-scatter over message size, out of place and in place."""

    operation: str = "reduce_scatter"
    op: Op = "sum"


@dataclass(frozen=True)
class AllReduce(SweepSettings):
    """All-reduce over message size, out of place and in place."""

    operation: str = "all_reduce"
    op: Op = "sum"
    algorithm: Annotated[str, Option(help="The division of the work."), _REDUCE] = "auto"


@dataclass(frozen=True)
class Broadcast(SweepSettings):
    """Broadcast from rank 0 over message size, in place."""

    operation: str = "broadcast"


@dataclass(frozen=True)
class AllToAll(SweepSettings):
    """All-to-all of equal parts over message size, out of place."""

    operation: str = "all_to_all"


def sweeps() -> dict[str, type[SweepSettings]]:
    """The settings of the benchmarks of collectives, by the name of the operation."""
    return {getattr(kind, "operation", ""): kind for kind in SweepSettings.__subclasses__()}
