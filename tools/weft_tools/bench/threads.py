"""Benchmarks of ranks that are threads of this process and share a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from weft.measure.timing import TIMEOUT, products_of
from weft.schedules.device_options import DEFAULT
from weft.world.local import local_world
from weft_tools.bench.torch_products import sums_in_float32

Found = TypeVar("Found")


def in_threads(measure: Callable[[Any], Found], settings: Any) -> Found:
    """What `measure` finds on rank 0, called with the settings on each of their ranks."""
    place = settings.place
    if place["engine"] == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
    with (
        sums_in_float32(),  # of all threads: none restores torch's setting before the others end
        local_world(
            settings.ranks or 2,
            settings.device,
            timeout=TIMEOUT,
            streams=place["engine"] == "streams",
            products=products_of(place["engine"]),
            device_options=getattr(settings, "device_options", DEFAULT),
        ) as local,
    ):
        found: list[Found] = local.run(measure, settings)
        return found[0]
