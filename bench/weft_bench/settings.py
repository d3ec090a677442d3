"""The settings of benchmarks: a dataclass for each command, from which its options are made.

A field annotated with an `Option` is an option of the command; words in the annotation are its only
values, and where it has an effect is stated as in `weft.cli.conditions`. Commands set the other
fields. Imports neither torch nor ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from weft.cli import common
from weft.cli.common import Device, Dtype, Engine, Placed, Threads
from weft.cli.conditions import Also, Unless
from weft.cli.values import (
    SHAPE,
    Shape,
    gbps,
    of_numbers,
    of_sizes,
    option,
    parse_sizes,
    product,
)
from weft.plan.launch import Launch
from weft.schedules import all_gather, all_gather_matmul, all_reduce
from weft.schedules.device_options import TILES, DeviceOptions, tile_name, tile_of
from weft.schedules.workload import Operator, Order
from weft_bench import reasons

BASELINES = {
    "cpu": ("gloo", "openmpi", "mpich", "intel-mpi", "deepspeed"),
    "cuda": ("nccl", "torch"),
}
"""The baselines of the collectives by device; torch has its all-gather of symmetric memory."""
COMPILERS = {"cpu": ("triton",), "cuda": ("triton", "gluon")}
"""The compilers of kernels by device: Gluon has no interpreter."""
LIBRARIES = ("gloo", "nccl")
"""Those of torch.distributed."""

Op = Annotated[Literal["sum", "avg", "max", "min"], Option(help="The reduction.")]
FROM_HOST = Also({"--peers host"})
"""Modes in which few options have an effect."""
_RANKS = "Number of ranks to start; default 2, or a launcher's."
Ranks = Annotated[int | None, Option("--ranks", "-n", min=1, help=_RANKS), FROM_HOST]
Several = Annotated[int | None, Option("--ranks", "-n", min=2, help=_RANKS)]
Warmup = Annotated[int, Option(min=1, help="Rounds to run before measuring."), FROM_HOST]
Iterations = Annotated[int, Option(min=1, help="Rounds to measure."), FROM_HOST]
Seed = Annotated[int, Option(min=0, help="Seed of the random data."), FROM_HOST]
Baseline = Annotated[
    str | None, Option(help="gloo or none; default gloo without an emulated link.")
]
FUSED_BASELINES = {"cpu": ("gloo", "gloo-chunks"), "cuda": ("nccl", "nccl-chunks", "torch")}
"""The baselines of fused operators by device: a collective beside `torch.mm`, the same in chunks
beside products, and torch's own operators on symmetric memory."""
_DATA = "Save each rank's input, weight, output and expected output as rank<r>.npz, for NumPy."
_FUSED_BASELINE = (
    "gloo (and on one host one process with all cores), gloo-chunks (beside products); on GPUs "
    "nccl, nccl-chunks, torch; one or more, or none: default with a link."
)
_LINK = "Emulate a slower link; auto: communication takes as long as compute."
Gbps = Annotated[str | None, option(gbps, "GBPS|auto", _LINK), Unless(common.not_emulated)]
Json = Annotated[common.Json, FROM_HOST]
Plot = Annotated[common.Plot, FROM_HOST]
Trace = Annotated[common.Trace, Unless(reasons.over_time)]
_TIMELINE = "Draw the instructions over time."
Timeline = Annotated[
    Path | None, Option(metavar="FILE.png|svg", help=_TIMELINE), Unless(reasons.over_time)
]
CHECKING = ("reference", "interpreter")
"""Engines that are for checks: their times say nothing of the speed of a machine."""
_NEIGHBOURS = "Busy processes on each host; collectives are then timed call by call, also with 0."
Neighbours = Annotated[int | None, Option(min=0, help=_NEIGHBOURS)]
_LATENCY = "Latency of each transfer on the emulated link."
Latency = Annotated[float | None, Option(min=0, help=_LATENCY), Unless(common.no_link)]
_BIAS = "Add a bias to the result: each rank's, or one of all ranks to a sum."
_COMM_THREADS = "Threads that move rows in the background."
CommThreads = Annotated[int, Option(min=1, help=_COMM_THREADS), Unless(reasons.comm_threads)]
_TILE = "Rows x columns that a program of the product kernel computes at once."
Tile = Annotated[
    str | None, Option(help=_TILE), tuple(map(tile_name, TILES)), Unless(reasons.of_kernel)
]
_COMPUTE_SMS = "SMs of the product kernel."
ComputeSms = Annotated[int | None, Option(min=1, help=_COMPUTE_SMS), Unless(reasons.of_kernel)]
_COMM_SMS = "SMs of a kernel that copies rows between ranks; 0: the copy engine."
CommSms = Annotated[int, Option(min=0, help=_COMM_SMS), Unless(reasons.comm_sms)]
_LINKS = "Streams in which a rank sends at the same time, each to its share of the peers."
Links = Annotated[int, Option(min=1, help=_LINKS), Unless(reasons.links)]


class Compared(Placed):
    """Settings of a benchmark with baselines and the option of an emulated link."""

    baseline: str | None
    link_gbps: str | None

    @property
    def baselines(self) -> tuple[str, ...]:
        """The names of the baselines: by default the device's first one; none on an emulated link,
        which would not slow it down, or by an engine that only checks.
        """
        none = self.link_gbps or self.engine in CHECKING
        default = "none" if none else FUSED_BASELINES[self.device][0]
        text = self.baseline or default
        return () if text == "none" else tuple(text.split(","))


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


@dataclass(frozen=True)
class FusedSettings(Compared):
    """A fused operator, its parts, and the baseline. `shape` has the rows of all ranks together,
    which are divided as evenly as possible.
    """

    operator: str
    shape: Shape = SHAPE
    algorithm: str = "auto"
    chunk_rows: int | None = None
    order: str | None = None
    return_gathered: bool = False
    ablate: bool = False
    peers: str = "ranks"
    ranks: Ranks = None
    dtype: Annotated[Dtype, Option(help="Dtype of the inputs."), FROM_HOST] = "float32"
    out_dtype: Annotated[
        Dtype | None, Option(help="Dtype of the output: the inputs' or float32.")
    ] = None
    bias: Annotated[bool, Option("--bias", help=_BIAS)] = False
    symmetric_out: Annotated[
        bool, Option("--symmetric-out", help="The results are in symmetric memory.")
    ] = False
    warmup: Warmup = 3
    iterations: Iterations = 20
    seed: Seed = 0
    baseline: Annotated[str | None, Option(help=_FUSED_BASELINE)] = None
    link_gbps: Annotated[Gbps, Unless(reasons.link_gbps)] = None
    link_latency_us: Latency = None
    device: Device = "cpu"
    engine: Engine = None
    json_file: Json = None
    plot: Plot = None
    trace: Trace = None
    timeline: Timeline = None
    save_outputs: Annotated[
        Path | None, Option(metavar="DIR", help="Save each rank's output as rank<r>.pt.")
    ] = None
    save_data: Annotated[Path | None, Option(metavar="DIR", help=_DATA)] = None
    threads: Threads = None
    comm_threads: CommThreads = 1
    tile: Tile = None
    compute_sms: ComputeSms = None
    comm_sms: CommSms = 0
    links: Links = 1
    neighbours: Neighbours = None

    @property
    def device_options(self) -> DeviceOptions:
        """The options of the world that is measured."""
        tile = None if self.tile is None else tile_of(self.tile)
        return DeviceOptions(tile, self.compute_sms, self.comm_sms, self.links)

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that the user has chosen, as in `weft.cli.conditions`."""
        return tuple(FROM_HOST) if self.peers == "host" else ()

    @property
    def result_dtype(self) -> str:
        return self.out_dtype or self.dtype


_PEERS = "host: one rank, on a GPU, with its peers' rows in pinned host memory."
_GATHERED = "The calls return the gathered rows too, which are verified bit for bit."
_ABLATE = "Also measure, and trace, the steps from a sequential cascade to the operator."


@dataclass(frozen=True)
class AllGatherMatmul(FusedSettings):
    """The benchmark of all-gather + matmul, which has further options."""

    operator: str = all_gather_matmul.OPERATOR.name
    return_gathered: Annotated[bool, Option("--return-gathered", help=_GATHERED)] = False
    ablate: Annotated[bool, Option("--ablate", help=_ABLATE), Unless(reasons.ablate)] = False
    peers: Annotated[Literal["ranks", "host"], Option(help=_PEERS), FROM_HOST] = "ranks"


def fused(operator: Operator) -> type[FusedSettings]:
    """The settings of a fused operator's benchmark, with its algorithms as options."""
    special = {getattr(kind, "operator", ""): kind for kind in FusedSettings.__subclasses__()}
    rows = "gathered rows" if operator.exchanges == "a" else "rows"
    divided = [name for name in operator.algorithms if name not in operator.uncut]
    moves, names = Option(help="The movement of the rows."), ("auto", *operator.algorithms)
    chunk = Option(min=1, help=f"Rows per transfer, or sum, of {', '.join(divided)}.")
    options: list[tuple[str, Any, Any]] = [
        ("operator", str, operator.name),
        (
            "shape",
            Annotated[Shape, product(f"M {rows}, any number, times a (K, N) weight."), FROM_HOST],
            SHAPE,
        ),
        ("algorithm", Annotated[str, moves, names, Unless(reasons.algorithm)], "auto"),
        ("chunk_rows", Annotated[int | None, chunk, Unless(reasons.chunk_rows)], None),
    ]
    if operator.ordered:
        sends = f"The pieces that {reasons.either(operator.ordered)} sends first; default peer."
        order = Annotated[Order | None, Option(help=sends), Unless(reasons.order)]
        options.append(("order", order, None))
    base = special.get(operator.name, FusedSettings)
    made = make_dataclass(operator.name, options, bases=(base,), frozen=True)
    gathers = operator.exchanges == "a"
    what = (
        "Rows of all ranks times a weight" if gathers else "Products, and their sum over all ranks"
    )
    made.__doc__ = f"""{what}: each alone, one after the other, overlapped.

    For example: weft bench {operator.name.replace("_", "-")} --dtype bfloat16 --json result.json
    """
    return made


Element = Literal["float16", "bfloat16", "float32", "float64", "int8", "int32", "int64"]
_SIZES = "Bytes of each rank's input; K, M, G are binary."
_BATCHES = "Rounds of batches to measure."
_WARMUP = "Rounds of batches to run before measuring."
_OTHERS = (
    f"One or more of {', '.join(BASELINES['cpu'])}, on GPUs nccl and torch, or none. `make "
    "baselines` installs those but gloo."
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
    seed: Seed = 0
    baseline: Annotated[str | None, Option(help=_OTHERS)] = None

    @property
    def baselines(self) -> tuple[str, ...]:
        """The names of the baselines; by default gloo, which has no averages."""
        none = self.op == "avg" or self.engine in CHECKING
        default = "none" if none else BASELINES[self.device][0]
        text = self.baseline or default
        return () if text == "none" else tuple(text.split(","))

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
_TILES = of_sizes("Bytes of the kernel's tiles; default 16K.", "BYTES,…")
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
