"""The cores of a host, from which the figures of a machine follow for any ranks and threads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from weft_tools.predict.rates import LinkRate, ProductRate


class CoreGroup(NamedTuple):
    """Groups of `cores` cores: the GB/s at which a core reads from the cache of another, the
    microseconds for one cache line, and the GB/s at which all cores of a group together read from
    other groups, if limited.
    """

    cores: int
    gbs: float
    line_us: float
    out_gbs: float | None = None


@dataclass(frozen=True)
class Cores:
    """The cores of a host, from which a machine's figures for any ranks and threads are computed.

    Attributes:
        levels: groups of cores, the smallest first and all cores last.
        package: the number of cores that share a memory bandwidth of `package_gbs`.
        core_gbs: the memory bandwidth of one core alone.
        products: rates of one core.
    """

    levels: tuple[CoreGroup, ...]
    package: int
    package_gbs: float
    core_gbs: float
    products: Mapping[str, ProductRate]

    @property
    def total(self) -> int:
        """The number of all cores."""
        return self.levels[-1].cores

    def links(self, ranks: int, threads: int) -> tuple[LinkRate, ...]:
        """The links between ranks with `threads` threads each, spread evenly over the cores."""
        links = []
        for inner, level in zip((None, *self.levels), self.levels, strict=False):
            reach = max(1, level.cores * ranks // self.total)
            if reach > 1 or level is self.levels[-1]:
                out = (
                    inner.out_gbs / max(1, inner.cores * ranks // self.total)
                    if inner and inner.out_gbs
                    else math.inf
                )
                gbs = min(threads * level.gbs, out)
                links.append(
                    LinkRate(
                        gbs,
                        reach=None if level is self.levels[-1] else reach,
                        line_us=level.line_us,
                    )
                )
        return tuple(links)

    def memory(self, ranks: int, threads: int) -> float:
        """GB/s of memory for each of `ranks` ranks."""
        return min(
            threads * self.core_gbs,
            self.package_gbs / max(1, -(-self.package * ranks // self.total)),
        )
