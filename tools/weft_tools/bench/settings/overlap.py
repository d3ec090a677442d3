"""The settings of the benchmark of a product beside an independent all-gather."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from weft.cli.common import Dtype
from weft.cli.conditions import Unless
from weft.cli.values import Shape, of_numbers, of_sizes, product
from weft_tools.bench.settings.shared import (
    Baseline,
    Compared,
    Gbps,
    Iterations,
    OnDevice,
    Seed,
    Several,
    Warmup,
)

PRODUCT = Shape(1024, 1024, 1024)
GATHERS = ("copy-engine", "kernel", "multicast", "nccl-zero-cta")
"""The gathers that overlap a product: on a CPU the first is the comm lane, which copies."""


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
        typer.Option(
            metavar="GATHER,…", help=f"One or more of {', '.join(GATHERS)}; default the first."
        ),
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
        return tuple((self.gather or GATHERS[0]).split(","))

    @property
    def sms(self) -> list[int]:
        return [int(number) for number in (self.comm_sms or "16").split(",")]
