"""The settings of the benchmark of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from typer import Option

from weft.cli.common import Dtype, Trace
from weft.cli.conditions import Unless
from weft_tools.bench import reasons
from weft_tools.bench.settings.fused import Timeline
from weft_tools.bench.settings.shared import (
    Baseline,
    Compared,
    Gbps,
    Iterations,
    Seed,
    Several,
    Shown,
    Warmup,
)

_ROUTING = (
    "What tokens choose: all experts alike, few of them often (Zipf), one of them always, or only "
    "every second one, so that the others are empty."
)
_REPLICATED = "All ranks have the same tokens, and sum; else each has its own, which travel."


@dataclass(frozen=True)
class MoeSettings(Compared, Shown):
    """A layer of a mixture of experts: dispatch, experts and combine, or experts and a sum.

    For example: weft bench moe --routing zipf --link-gbps auto --timeline timeline.png
    """

    device = "cpu"
    engine = None
    ranks: Several = None
    replicated: Annotated[bool, Option("--replicated", help=_REPLICATED)] = False
    routing: Annotated[
        Literal["uniform", "zipf", "hot", "empty"],
        Option(help=_ROUTING),
    ] = "uniform"
    tokens: Annotated[int, Option(min=1, help="Tokens of a rank.")] = 1024
    experts: Annotated[int, Option(min=1, help="Experts of a rank.")] = 4
    top: Annotated[int, Option(min=1, help="Experts that a token chooses.")] = 2
    width: Annotated[int, Option(min=1, help="Width of a token.")] = 512
    inner: Annotated[int, Option(min=1, help="Width between the products of an expert.")] = 1024
    dtype: Annotated[Dtype, Option(help="Of tokens and weights.")] = "float32"
    warmup: Warmup = 3
    iterations: Iterations = 20
    seed: Seed = 0
    baseline: Baseline = None
    link_gbps: Gbps = None
    trace: Annotated[Trace, Unless(reasons.over_time)] = None
    timeline: Timeline = None
