"""The settings of the benchmarks in this package, from which their commands take their options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from weft.cli.common import Dtype
from weft.cli.conditions import Unless
from weft.cli.values import Shape, of_numbers, of_sizes, parse_sizes, product
from weft_bench.settings import (
    Baseline,
    Compared,
    Element,
    Gbps,
    Iterations,
    OnDevice,
    Seed,
    Several,
    Shown,
    Warmup,
)

PRODUCT = Shape(1024, 1024, 1024)
WAYS = ("copy-engine", "kernel", "multicast", "nccl-zero-cta")
"""The ways to gather beside a product: on a CPU the first is the comm lane, which copies."""


def _without_gathering_kernel(settings: OverlapSettings) -> str:
    return "" if "kernel" in settings.gathers else "no kernel gathers: add --gather kernel"


@dataclass(frozen=True)
class OverlapSettings(Compared, OnDevice):
    """A product and an all-gather that are independent of each other.

    Each alone, one after the other, and concurrently.
    """

    ranks: Several = None
    shape: Annotated[Shape, product("Each rank's product, which needs nothing of others.")] = (
        PRODUCT
    )
    size: Annotated[
        str, of_sizes("That each rank puts into the all-gather; K, M, G are binary.", "BYTES")
    ] = "16M"
    dtype: Annotated[Dtype, typer.Option(help="Of the matrices and the gathered tensor.")] = (
        "float32"
    )
    warmup: Warmup = 3
    iterations: Iterations = 20
    seed: Seed = 0
    gather: Annotated[
        str | None,
        typer.Option(metavar="WAY,…", help=f"One or more of {', '.join(WAYS)}; default the first."),
    ] = None
    comm_sms: Annotated[
        str | None,
        of_numbers("On how many SMs the kernel gathers; default 16."),
        Unless(_without_gathering_kernel),
    ] = None
    plain_out: Annotated[
        bool, typer.Option("--plain-out", help="Gather into ordinary memory, not symmetric.")
    ] = False
    baseline: Baseline = None
    link_gbps: Gbps = None

    @property
    def gathers(self) -> tuple[str, ...]:
        return tuple((self.gather or WAYS[0]).split(","))

    @property
    def sms(self) -> list[int]:
        return [int(number) for number in (self.comm_sms or "16").split(",")]


def _on_streams(settings: CopySettings) -> str:
    staged = settings.place["engine"] == "host"
    return "" if staged else "a staged get is measured on the cores of a CPU: omit it"


def _without_kernels(settings: CopySettings) -> str:
    kernels = settings.device == "cuda" or settings.engine == "interpreter"
    instead = "use --device cuda, or --engine interpreter"
    return "" if kernels else f"kernels run on a GPU, or in an interpreter: {instead}"


@dataclass(frozen=True)
class CopySettings(OnDevice):
    """One-sided put and get over size.

    On a CPU synchronous, asynchronous, staged and local copies, on a GPU by the copy engine and by
    a kernel.
    """

    ranks: Several = None
    sizes: Annotated[str, of_sizes("Bytes of a copy; K, M, G are binary.")] = "4K:64M:4"
    dtype: Annotated[Element, typer.Option(help="Dtype of the elements.")] = "float32"
    tile: Annotated[
        str | None,
        of_sizes("On a CPU: of the buffer of the staged get; default 16K.", "BYTES"),
        Unless(_on_streams),
    ] = None
    comm_sms: Annotated[
        str | None,
        of_numbers("On a GPU: on how many SMs a kernel copies; default 4,8,16,32."),
        Unless(_without_kernels),
    ] = None
    warmup: Annotated[int, typer.Option(min=0, help="Rounds to run before measuring.")] = 2
    iterations: Iterations = 40
    seed: Seed = 0

    @property
    def tile_size(self) -> int:
        return parse_sizes(self.tile or "16K")[0]

    @property
    def sms(self) -> list[int]:
        return [int(number) for number in (self.comm_sms or "4,8,16,32").split(",")]


@dataclass(frozen=True)
class ServingSettings(Shown):
    """A server's stream of steps through a tensor-parallel block.

    It is compared with torch's styles on gloo, and with one process that has all cores.
    """

    ranks: Several = None
    hidden: Annotated[
        int, typer.Option(min=1, help="Width of the block; a multiple of the ranks.")
    ] = 1024
    intermediate: Annotated[
        int, typer.Option(min=1, help="Width within its MLP; a multiple of the ranks.")
    ] = 2816
    decode: Annotated[
        int, typer.Option(min=1, help="Most sequences that a step adds a token to.")
    ] = 32
    prefill: Annotated[
        int, typer.Option(min=1, help="Most tokens of prompts that a step reads.")
    ] = 288
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option(help="Of weights and activations.")
    ] = "float32"
    warmup: Annotated[int, typer.Option(min=0, help="Steps before the measured ones.")] = 10
    steps: Annotated[
        int, typer.Option(min=1, help="Steps measured, each of another number of tokens.")
    ] = 200
    seed: Seed = 0


FURTHER: dict[str, type[Any]] = {
    "overlap": OverlapSettings,
    "p2p": CopySettings,
    "serving": ServingSettings,
}
"""The settings by the names of their commands."""
