"""The settings of the benchmarks in this package, from which their commands take their options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from weft.bench.settings import (
    Baseline,
    Compared,
    Dtype,
    Element,
    Gbps,
    Iterations,
    OnDevice,
    Seed,
    Several,
    Shown,
    Warmup,
)
from weft.bench.values import Shape, of_sizes, product

PRODUCT = Shape(1024, 1024, 1024)


@dataclass(frozen=True)
class OverlapSettings(Compared, OnDevice):
    """A product and an all-gather that are independent of each other: each alone, one after the
    other, and concurrently.
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
    baseline: Baseline = None
    link_gbps: Gbps = None


@dataclass(frozen=True)
class CopySettings(Shown):
    """One-sided put and get over size, synchronous, asynchronous and staged, and local copies."""

    ranks: Several = None
    sizes: Annotated[str, of_sizes("Bytes of a copy; K, M, G are binary.")] = "4K:64M:4"
    dtype: Annotated[Element, typer.Option(help="Dtype of the elements.")] = "float32"
    tile: Annotated[
        str, of_sizes("Of the buffer through which the staged get copies.", "BYTES")
    ] = "16K"
    warmup: Annotated[int, typer.Option(min=0, help="Rounds to run before measuring.")] = 2
    iterations: Iterations = 40
    seed: Seed = 0


@dataclass(frozen=True)
class ServingSettings(Shown):
    """A server's stream of steps through a tensor-parallel block, compared with torch's styles on
    gloo and one process with all cores.
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
