"""The settings of the benchmark of serving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from weft_tools.bench.settings.shared import (
    Seed,
    Several,
    Shown,
)


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
