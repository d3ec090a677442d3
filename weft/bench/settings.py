"""What benchmarks are asked for: the settings of each are what its command takes.

A field annotated with an option is one, with the words that it may be where these are all; the
other fields are set by commands. Loads neither torch nor ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from weft.schedules import all_gather, all_gather_matmul, all_reduce
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Operator

POWERS = {"": 0, "K": 10, "M": 20, "G": 30}


@dataclass(frozen=True)
class Shape:
    """A product (m, k) @ (k, n)."""

    m: int
    k: int
    n: int

    def __iter__(self) -> Iterator[int]:
        return iter((self.m, self.k, self.n))

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


SHAPE = Shape(2048, 2048, 1024)


def parse_shape(text: str) -> Shape:
    """``MxKxN``; `ValueError` if it is not."""
    sizes = text.lower().split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(
            f"expected three positive numbers MxKxN such as 2048x2048x1024; got {text!r}"
        )
    return Shape(*map(int, sizes))


def parse_sizes(text: str) -> list[int]:
    """Bytes from ``8,4K:64M:4``: single sizes, and ranges of first, last and factor (2 unless
    given); K, M and G are binary.

    Raises `ValueError` that says what is wrong.
    """
    sizes: list[int] = []
    for part in text.split(","):
        fields = part.split(":")
        if len(fields) > 3 or (
            len(fields) == 3 and not (fields[2].isdecimal() and int(fields[2]) > 1)
        ):
            raise ValueError(
                "expected sizes such as 8,4K:64M:4 (first, last, factor of at least 2); got "
                f"{part!r}"
            )
        first, last = _bytes(fields[0]), _bytes(fields[min(1, len(fields) - 1)])
        if last < first:
            raise ValueError(f"the last size comes before the first in {part!r}")
        while first <= last:
            sizes.append(first)
            first *= int(fields[2]) if len(fields) == 3 else 2
    return sorted(set(sizes))


def _bytes(text: str) -> int:
    found = re.fullmatch(r"0*([1-9][0-9]*)([KMG]?)", text, re.IGNORECASE)
    if not found:
        raise ValueError(
            f"expected a positive number of bytes such as 8, 4K, 64M or 1G; got {text!r}"
        )
    return int(found[1]) << POWERS[found[2].upper()]


def _gbps(text: str) -> None:
    """The bandwidth of an emulated link in 1e9 bits per second, or ``auto``."""
    with suppress(ValueError):
        if text == "auto" or 0 < float(text) < float("inf"):
            return
    raise ValueError(f"expected a positive number of Gbit/s, or auto; got {text!r}")


def _numbers(text: str) -> None:
    """Positive numbers such as ``4,8,16``."""
    if not all(part.strip().isdecimal() and int(part) for part in text.split(",")):
        raise ValueError(f"expected positive numbers such as 4,8,16; got {text!r}")


def _option(parse: Callable[[str], Any], metavar: str, what: str, *, kept: bool = True) -> Any:
    """An option whose text, or default, is parsed, and `kept` as it is or taken for what it says;
    what is wrong is its fault.
    """

    def parser(text: object) -> Any:
        try:
            found = parse(str(text))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        return str(text) if kept else found

    return typer.Option(parser=parser, metavar=metavar, help=what)


def product(what: str) -> Any:
    """An option that takes a shape."""
    return _option(parse_shape, "MxKxN", what, kept=False)


def of_sizes(what: str, metavar: str = "FIRST:LAST:FACTOR,…") -> Any:
    return _option(parse_sizes, metavar, what)


BASELINES = ("gloo", "openmpi", "mpich", "intel-mpi", "deepspeed")
"""Of the collectives; all but gloo come with the repository."""

Dtype = Literal["float16", "bfloat16", "float32", "float64"]
Op = Annotated[Literal["sum", "avg", "max", "min"], typer.Option(help="The reduction.")]
FUSED = tuple(name.replace("_", "-") for name in OPERATORS)
"""The fused operators, as commands call them."""
Ranks = Annotated[
    int | None,
    typer.Option("--ranks", "-n", min=1, help="Ranks to start; 2 unless a launcher did."),
]
Several = Annotated[
    int | None,
    typer.Option("--ranks", "-n", min=2, help="Ranks to start; 2 unless a launcher did."),
]
Warmup = Annotated[int, typer.Option(min=0, help="Rounds before the measured ones.")]
Iterations = Annotated[int, typer.Option(min=1, help="Rounds measured.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the random data.")]
Baseline = Annotated[
    str | None, typer.Option(help="gloo, or none; by default gloo, and none on an emulated link.")
]
Gbps = Annotated[
    str | None,
    _option(
        _gbps, "GBPS|auto", "Emulate a slower link; auto: communicate takes as long as compute."
    ),
]
Json = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write the result as JSON; -: stdout."),
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png|svg", help="Draw the result.")]
Trace = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a trace for https://ui.perfetto.dev.")
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Compute threads per rank; by default the cores are shared out."),
]


class Compared:
    """What may be compared with gloo, and may be measured on an emulated link."""

    baseline: str | None
    link_gbps: str | None

    @property
    def gloo(self) -> bool:
        """Whether gloo is measured too: a baseline does not pass an emulated link."""
        return self.baseline != "none" and self.link_gbps is None


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Where results go, and with how many threads they are measured; as options these come last."""

    json_file: Json = None
    plot: Plot = None
    threads: Threads = None


@dataclass(frozen=True)
class FusedSettings(Compared):
    """A fused operator, its parts, and the baseline. `shape` counts the rows of all ranks, shared
    out as evenly as it goes.
    """

    operator: str
    shape: Shape = SHAPE
    algorithm: str = "auto"
    chunk_rows: int | None = None
    ablate: bool = False
    peers: str = "ranks"
    ranks: Ranks = None
    dtype: Annotated[Dtype, typer.Option(help="Of the inputs.")] = "float32"
    out_dtype: Annotated[
        Dtype | None, typer.Option(help="Of the output: the inputs' or float32.")
    ] = None
    warmup: Warmup = 3
    iterations: Iterations = 20
    seed: Seed = 0
    baseline: Baseline = None
    link_gbps: Gbps = None
    link_latency_us: Annotated[
        float | None, typer.Option(min=0, help="Latency of each transfer on the emulated link.")
    ] = None
    json_file: Json = None
    plot: Plot = None
    trace: Trace = None
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE.png|svg", help="Draw what ran when.")
    ] = None
    save_outputs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Save each rank's output as rank<r>.pt.")
    ] = None
    threads: Threads = None

    @property
    def result_dtype(self) -> str:
        return self.out_dtype or self.dtype


@dataclass(frozen=True)
class AllGatherMatmul(FusedSettings):
    """The benchmark of all-gather + matmul, which has more options."""

    operator: str = all_gather_matmul.OPERATOR.name
    ablate: Annotated[
        bool,
        typer.Option("--ablate", help="Also measure each step from the cascade to the operator."),
    ] = False
    peers: Annotated[
        Literal["ranks", "host"],
        typer.Option(help="host: on one GPU, with the other ranks' rows in pinned host memory."),
    ] = "ranks"


def fused(operator: Operator) -> type[FusedSettings]:
    """The settings of a fused operator's benchmark, as its command takes them."""
    own = {getattr(kind, "operator", ""): kind for kind in FusedSettings.__subclasses__()}
    whole = "gathered rows" if operator.exchanges == "a" else "rows"
    takers = [name for name in operator.algorithms if name not in operator.uncut]
    chunk = typer.Option(min=1, help=f"Rows per transfer, or sum, of {', '.join(takers)}.")
    options: list[tuple[str, Any, Any]] = [
        ("operator", str, operator.name),
        ("shape", Annotated[Shape, product(f"M {whole}, of any number, times (K, N).")], SHAPE),
        (
            "algorithm",
            Annotated[
                str, typer.Option(help="How rows are moved."), ("auto", *operator.algorithms)
            ],
            "auto",
        ),
        ("chunk_rows", Annotated[int | None, chunk], None),
    ]
    base = own.get(operator.name, FusedSettings)
    made = make_dataclass(operator.name, options, bases=(base,), frozen=True)
    name = operator.name.replace("_", "-")
    made.__doc__ = (
        f"{name}: compute alone, communication alone, one after the other, and overlapped."
    )
    return made


@dataclass(frozen=True)
class SweepSettings(Shown):
    """A collective over message size."""

    operation: str
    op: str = "sum"
    algorithm: str = "auto"
    device: str = "cpu"
    comm_sms: str = ""
    ranks: Several = None
    sizes: Annotated[str, of_sizes("Bytes of each rank's input; K, M, G are binary.")] = "4K:64M:4"
    dtype: Annotated[
        Literal["float16", "bfloat16", "float32", "float64", "int8", "int32", "int64"],
        typer.Option(help="Of the elements."),
    ] = "float32"
    warmup: Annotated[
        int, typer.Option(min=0, help="Rounds of batches before the measured ones.")
    ] = 2
    iterations: Annotated[int, typer.Option(min=1, help="Rounds of batches measured.")] = 20
    seed: Seed = 0
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Of gloo, openmpi, mpich, intel-mpi, deepspeed, or none; by default gloo. `make baselines` makes them."
        ),
    ] = None

    @property
    def baselines(self) -> tuple[str, ...]:
        """What to compare with, by name; by default gloo, which has no averages."""
        text = self.baseline or ("none" if self.op == "avg" else "gloo")
        return () if text == "none" else tuple(text.split(","))


@dataclass(frozen=True)
class AllGather(SweepSettings):
    """All-gather over message size, out of place and in place."""

    operation: str = "all_gather"
    algorithm: Annotated[
        str, typer.Option(help="How rows travel."), ("auto", *all_gather.ALGORITHMS)
    ] = "auto"
    device: Annotated[
        Literal["cpu", "cuda"],
        typer.Option(help="cpu: ranks are processes; cuda: ranks share this process's GPU."),
    ] = "cpu"
    comm_sms: Annotated[
        str, _option(_numbers, "N,…", "With --device cuda: SMs that the kernels may take.")
    ] = "4,8,16,32"

    @property
    def sms(self) -> list[int]:
        return [int(number) for number in self.comm_sms.split(",")]


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
    algorithm: Annotated[
        str, typer.Option(help="How the work is shared out."), ("auto", *all_reduce.ALGORITHMS)
    ] = "auto"


@dataclass(frozen=True)
class Broadcast(SweepSettings):
    """Broadcast from rank 0 over message size, in place."""

    operation: str = "broadcast"


@dataclass(frozen=True)
class AllToAll(SweepSettings):
    """All-to-all of equal parts over message size, out of place."""

    operation: str = "all_to_all"
