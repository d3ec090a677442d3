"""The settings of the benchmarks of fused operators."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from weft.cli import common
from weft.cli.common import Device, Dtype, Engine, Threads
from weft.cli.conditions import Unless
from weft.cli.values import SHAPE, Shape, not_negative, option, product
from weft.schedules import all_gather_matmul
from weft.schedules.device_options import TILES, DeviceOptions, tile_name, tile_of
from weft.schedules.workload import Operator, Order
from weft_tools.bench import reasons
from weft_tools.bench.settings.shared import (
    FROM_HOST,
    RANKS,
    Compared,
    Gbps,
    Graph,
    Iterations,
    Json,
    Neighbours,
    Plot,
    Seed,
    Warmup,
)

Ranks = Annotated[int | None, Option("--ranks", "-n", min=1, help=RANKS), FROM_HOST]
_DATA = "Save each rank's input, weight, output and expected output as rank<r>.npz, for NumPy."
_FUSED_BASELINE = (
    "gloo (and on one host one process with all cores), gloo-chunks (beside products); on GPUs "
    "nccl, nccl-chunks, nccl-registered, torch; one or more, or none: default with a link."
)
Trace = Annotated[common.Trace, Unless(reasons.over_time)]
_TIMELINE = "Draw the instructions over time."
Timeline = Annotated[
    Path | None, Option(metavar="FILE.png|svg", help=_TIMELINE), Unless(reasons.over_time)
]
_LATENCY = "Latency of each transfer on the emulated link."
Latency = Annotated[
    float | None, option(not_negative, "US", _LATENCY, keep=False), Unless(common.no_link)
]
_BIAS = "Add a bias to the result: each rank's, or one of all ranks to a sum."
_COMM_THREADS = "Threads that move rows in the background."
CommThreads = Annotated[int, Option(min=1, help=_COMM_THREADS), Unless(reasons.comm_threads)]
_SYMMETRIC_OUT = "The result is in symmetric memory, where peers put their sums."
SymmetricOut = Annotated[
    bool, Option("--symmetric-out", help=_SYMMETRIC_OUT), Unless(reasons.symmetric_out)
]
_TILE = "Rows x columns that a program of the product kernel computes at once."
Tile = Annotated[
    str | None, Option(help=_TILE), tuple(map(tile_name, TILES)), Unless(reasons.of_kernel)
]
_OWN_TILE = "The same of products of own rows, where gathered rows are multiplied after them."
OwnTile = Annotated[
    str | None, Option(help=_OWN_TILE), tuple(map(tile_name, TILES)), Unless(reasons.own_tile)
]
_COMPUTE_SMS = "SMs of the product kernel."
ComputeSms = Annotated[int | None, Option(min=1, help=_COMPUTE_SMS), Unless(reasons.of_kernel)]
_COMM_SMS = "SMs of a kernel that copies rows between ranks; 0: the copy engine."
CommSms = Annotated[int, Option(min=0, help=_COMM_SMS), Unless(reasons.comm_sms)]
_SECONDS = "Time of the measurement, about: slow calls get fewer iterations."
Seconds = Annotated[float, Option(min=0, help=_SECONDS)]
_LINKS = "Streams in which a rank sends at the same time, each to its share of the peers."
Links = Annotated[int, Option(min=1, help=_LINKS), Unless(reasons.links)]


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
    symmetric_out: SymmetricOut = False
    warmup: Warmup = 3
    iterations: Iterations = 20
    seconds: Seconds = 60.0
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
    own_tile: OwnTile = None
    compute_sms: ComputeSms = None
    comm_sms: CommSms = 0
    links: Links = 1
    graph: Graph = False
    neighbours: Neighbours = None

    @property
    def device_options(self) -> DeviceOptions:
        """The options of the world that is measured."""
        tile, own = (None if name is None else tile_of(name) for name in (self.tile, self.own_tile))
        return DeviceOptions(tile, self.compute_sms, self.comm_sms, self.links, own)

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
    made.__doc__ = f"""Products and communication: each alone, one after the other, overlapped.

    For example: weft bench {operator.name.replace("_", "-")} --dtype bfloat16 --json result.json
    """
    return made
