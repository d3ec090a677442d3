"""The options that several commands have, and why one of them has no effect.

Imports neither torch nor ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from weft.cli.conditions import Unless
from weft.cli.values import not_negative, option, positive
from weft.schedules.operators import OPERATORS

FUSED = tuple(name.replace("_", "-") for name in OPERATORS)
"""The names of the fused operators in commands."""
ENGINES = {"cpu": ("host", "reference", "streams", "interpreter"), "cuda": ("streams", "triton")}
"""The engines of each device, the default first."""


def no_threads(settings: Any) -> str:
    on_gpu = getattr(settings, "device", "cpu") == "cuda"
    return "products on a GPU use no threads of the CPU: omit one of them" if on_gpu else ""


def no_link(settings: Any) -> str:
    """Why an emulated link has no latency."""
    if settings.link_gbps:
        return ""
    return "an emulated link needs a bandwidth too: add --link-gbps"


def not_emulated(settings: Any) -> str:
    """Why a link is not emulated."""
    if (engine := settings.place["engine"]) != "host":
        return f"the engine {engine} does not emulate links: omit one of them"
    return ""


Dtype = Literal["float16", "bfloat16", "float32", "float64"]
_DEVICE = "cuda: each rank on the GPU of its local rank."
Device = Annotated[Literal["cpu", "cuda"], Option(help=_DEVICE)]
_ENGINE = (
    f"What executes plans: {', '.join(ENGINES['cpu'])}; with --device cuda "
    f"{', '.join(ENGINES['cuda'])}."
)
Engine = Annotated[
    Literal["host", "reference", "streams", "interpreter", "triton"] | None, Option(help=_ENGINE)
]
_THREADS = "Compute threads per rank; default: its cores."
Threads = Annotated[int | None, Option(min=1, help=_THREADS), Unless(no_threads)]
_EMULATED = "Gbit/s of an emulated link, as for weft bench."
EmulatedGbps = Annotated[float | None, option(positive, "GBPS", _EMULATED, keep=False)]
_LATENCY = "Latency of the emulated link."
EmulatedLatency = Annotated[
    float, option(not_negative, "US", _LATENCY, keep=False), Unless(no_link)
]
_JSON = "Write the result as JSON; -: stdout."
Json = Annotated[str | None, Option("--json", metavar="FILE|-", help=_JSON)]
Plot = Annotated[Path | None, Option(metavar="FILE.png|svg", help="Draw the result.")]
_TRACE = "Write a trace for https://ui.perfetto.dev."
Trace = Annotated[Path | None, Option(metavar="FILE", help=_TRACE)]


class Placed:
    """Settings of a command with the options for the device and the engine."""

    device: str
    engine: str | None

    @property
    def place(self) -> dict[str, Any]:
        """The device, and the engine: by default the device's first one."""
        return {"device": self.device, "engine": self.engine or ENGINES[self.device][0]}
