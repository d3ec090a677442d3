"""Measurement of the variants of an operator in a world whose lanes are streams: algorithms and
pieces, then tiles, then lanes and SMs of copies, then SMs of products.

Each group is measured interleaved, and starts from the fastest variant so far, which is measured
again with it: all combinations would be thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from weft.engines import engine
from weft.engines.device.options import check_options, programs
from weft.measure.timing import Statistics, stopwatch_of
from weft.ops import driver
from weft.ops.fused import FusedCall
from weft.schedules.device_options import DEFAULT, TILES
from weft.schedules.workload import Variant

_PIECES = (1, 2, 4, 8, 16)
"""Pieces of a rank's rows that are tried."""
_COPYING = (4, 8, 16, 32)
"""SMs of copies that are tried."""
_LINKS = (2, 4, 8)
"""Lanes of transfers that are tried."""
_SHARES = (7, 6, 4)
"""SMs of products that are tried, in eighths of those that are free by default."""


def measure(call: FusedCall, iterations: int) -> list[tuple[Variant, Statistics]]:
    """The variants of a call that this world can execute, with their times, fastest first;
    collective. Raises `ValueError` if it can execute none.
    """
    times: dict[Variant, Statistics] = {}
    fastest: list[Variant] = []
    for group in (_algorithms, _tiles, _transfers, _sms):
        found = [*dict.fromkeys([*fastest[:1], *group(call, fastest)])]
        possible = list(_possible(call, found, last_resort=not fastest))
        if len(possible) > len(fastest[:1]):
            times |= _interleaved(call, possible, iterations)
        fastest = sorted(times, key=lambda variant: times[variant].median)
    return [(variant, times[variant]) for variant in fastest]


def _interleaved(
    call: FusedCall, variants: Iterable[Variant], iterations: int
) -> dict[Variant, Statistics]:
    names = {str(number): variant for number, variant in enumerate(variants)}
    views = {name: partial(driver.execute, call, each) for name, each in names.items()}
    times = stopwatch_of(call.world).interleave(views, 1, iterations)
    engine(call.world).programs.clear()
    return {variant: times[name] for name, variant in names.items()}


def _possible(call: FusedCall, variants: Iterable[Variant], last_resort: bool) -> Iterator[Variant]:
    """The variants that the device and the kernels do not refuse; if they refuse all and this is
    the `last_resort`, the error.
    """
    refused = None
    for variant in variants:
        try:
            check_options(call.world, variant.device)
            driver.prepare(call, variant)
        except ValueError as error:
            refused = error
        else:
            last_resort = False
            yield variant
    if last_resort and refused:
        raise refused


def _algorithms(call: FusedCall, _: list[Variant]) -> Iterator[Variant]:
    operator, most = call.operator, max(call.workload.rows)
    for algorithm in filter(call.possible, operator.algorithms):
        uncut = algorithm in operator.uncut
        for pieces in _PIECES[:1] if uncut else (n for n in _PIECES if n <= most):
            yield Variant(algorithm, pieces)


def _tiles(call: FusedCall, fastest: list[Variant]) -> Iterator[Variant]:
    if call.world.matmul_backend == "triton":
        for tile in TILES:
            yield fastest[0]._replace(device=replace(DEFAULT, tile=tile))


def _transfers(call: FusedCall, fastest: list[Variant]) -> Iterator[Variant]:
    """Lanes and SMs of copies, each with the fastest algorithm that honours them."""
    world, tile = call.world, fastest[0].device.tile
    copying = _COPYING if world.device.type == "cuda" or world.matmul_backend == "triton" else ()
    for links in (1, *(n for n in _LINKS if n < world.ranks)):
        for comm_sms in (0, *copying):
            device = replace(DEFAULT, tile=tile, links=links, comm_sms=comm_sms)
            serving = [each for each in fastest if call.honours(each.algorithm, device)]
            if serving:
                yield serving[0]._replace(device=device)


def _sms(call: FusedCall, fastest: list[Variant]) -> Iterator[Variant]:
    if call.world.matmul_backend == "triton":
        device = fastest[0].device
        most = programs(call.world, device)
        for eighths in _SHARES:
            compute_sms = max(1, most * eighths // 8)
            yield fastest[0]._replace(device=replace(device, compute_sms=compute_sms))
