"""The variants to measure for a call in a world whose lanes are streams, besides its algorithms and
pieces: tiles, then lanes and SMs of copies, then SMs of products.

Each group starts from the fastest variant so far: all combinations would be thousands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from weft.gpu.options import programs
from weft.schedules.device_options import DEFAULT, TILES
from weft.schedules.workload import Variant

_COPYING = (4, 8, 16, 32)
"""SMs of copies that are tried."""
_LINKS = (2, 4, 8)
"""Lanes of transfers that are tried."""
_SHARES = (7, 6, 4)
"""SMs of products that are tried, in eighths of those that are free by default."""


def tiles(call: Any, fastest: Sequence[Variant]) -> Iterator[Variant]:
    """The tiles of the product kernel."""
    if call.world.backend.products == "triton":
        for tile in TILES:
            yield fastest[0]._replace(device=replace(DEFAULT, tile=tile))


def transfers(call: Any, fastest: Sequence[Variant]) -> Iterator[Variant]:
    """Lanes and SMs of copies, each with the fastest algorithm that honours them."""
    world, tile = call.world, fastest[0].device.tile
    for links in (1, *(n for n in _LINKS if n < world.ranks)):
        for comm_sms in (0, *(_COPYING if world.backend.runs_kernels else ())):
            device = replace(DEFAULT, tile=tile, links=links, comm_sms=comm_sms)
            serving = [each for each in fastest if call.honours(each.algorithm, device)]
            if serving:
                yield serving[0]._replace(device=device)


def sms(call: Any, fastest: Sequence[Variant]) -> Iterator[Variant]:
    """The SMs of products."""
    if call.world.backend.products == "triton":
        device = fastest[0].device
        most = programs(call.world, device)
        for eighths in _SHARES:
            compute_sms = max(1, most * eighths // 8)
            yield fastest[0]._replace(device=replace(device, compute_sms=compute_sms))
