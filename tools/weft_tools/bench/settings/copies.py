"""The settings of the benchmark of one-sided copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from weft.cli.conditions import Unless
from weft.cli.values import of_numbers, of_sizes, parse_sizes
from weft_tools.bench.settings.shared import (
    Element,
    Iterations,
    OnDevice,
    Seed,
    Several,
)


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
