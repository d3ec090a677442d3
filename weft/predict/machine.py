"""Machines as the simulator sees them: how fast ranks multiply, add, copy and reach each other, and
how these disturb each other.

A profile is a TOML file in ``weft/machines``, fitted from published figures, or the one of this
machine that ``weft calibrate`` leaves in the cache. `load` reads them, `names` lists them. Sizes
are in bytes, bandwidths in GB/s of 1e9 bytes, times in microseconds where a name says so and else
in seconds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import weft.cache as cache
from weft.predict.interpolation import Grid
from weft.schedules.thresholds import Thresholds

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element, by dtype."""

_DIRECTORY = Path(__file__).parent / "machines"
THIS = "this"
"""The name of the machine that ``weft calibrate`` measured."""
_UNMEASURED = "cpu"  # what is taken for this machine if it was not calibrated


@dataclass(frozen=True)
class Product:
    """The local product ``(rows, K) @ (K, N)``: ``fixed + K·N·itemsize / weight_gbs + 2·rows·K·N /
    tflops``.

    `weight_gbs` is how fast the weight is read (packed), or read and laid out (plain). `factors`:
    by what measured times differ from that, by rows and by elements of the weight, K·N.
    """

    tflops: float
    weight_gbs: float = 1e6
    fixed_us: float = 0.0
    factors: Grid | None = None

    def seconds(self, rows: int, k: int, n: int, itemsize: int) -> float:
        """The time of one product."""
        roughly = (
            self.fixed_us * 1e-6
            + k * n * itemsize / (self.weight_gbs * 1e9)
            + 2 * rows * k * n / (self.tflops * 1e12)
        )
        return roughly * (self.factors.at(rows, k * n) if self.factors else 1.0)


@dataclass(frozen=True)
class Link:
    """A link between two ranks: ``latency + bytes / gbs`` for each transfer.

    `reach`: it joins ranks of the same group of this many; None: all. `shared`: a rank's transfers
    share one link out and one in, instead of having one for each peer. `idle`: a transfer first
    copies at memory speed, and then waits until the link would have been done, as an emulated link
    does; a rank makes one transfer at a time. `factors` of measured times, by bytes.
    `core_gbs`: a core that did nothing else could send, or receive, this much; for links that need
    the processor. `line_us`: how long a core waits for one cache line over it, which it does for
    each notify and, `Machine.fetches` at a time, for each peer that it reads from.
    """

    gbs: float
    latency_us: float = 0.0
    reach: int | None = None
    shared: bool = False
    idle: bool = False
    factors: Grid | None = None
    core_gbs: float | None = None
    line_us: float = 0.0

    @property
    def core(self) -> float:
        """The part of a core's time that a transfer takes, at each of its ends."""
        return self.gbs / self.core_gbs if self.core_gbs else 0.0

    def seconds(self, size: int) -> float:
        """Seconds of a transfer of `size` bytes that has the link for itself."""
        return self.latency_us * 1e-6 + self.passing(size)

    def passing(self, size: int) -> float:
        """Seconds for which a transfer of `size` bytes occupies the link: its time without the
        latency.
        """
        return _passing(size, self.gbs, self.factors)


class CoreGroup(NamedTuple):
    """Groups of `cores` cores: the GB/s that a core reads from the caches of another, the latency
    of a cache line in microseconds, and the GB/s that a whole group reads from other groups, if that
    is limited.
    """

    cores: int
    gbs: float
    line_us: float
    out_gbs: float | None = None


@dataclass(frozen=True)
class Cores:
    """The cores of a host, by which a machine's figures follow from the ranks and their threads.

    `levels`: groups of cores, the smallest first and all cores last; `package`: the number that
    share `package_gbs` of memory, of which one core alone reads `core_gbs`. `products` are rates of
    one core.
    """

    levels: tuple[CoreGroup, ...]
    package: int
    package_gbs: float
    core_gbs: float
    products: Mapping[str, Product]

    @property
    def total(self) -> int:
        """All cores."""
        return self.levels[-1].cores

    def links(self, ranks: int, threads: int) -> tuple[Link, ...]:
        """The links between ranks with `threads` threads each, spread evenly over the cores."""
        found = []
        for inner, level in zip((None, *self.levels), self.levels, strict=False):
            reach = max(1, level.cores * ranks // self.total)
            if reach > 1 or level is self.levels[-1]:
                out = (
                    inner.out_gbs / max(1, inner.cores * ranks // self.total)
                    if inner and inner.out_gbs
                    else math.inf
                )
                gbs = min(threads * level.gbs, out)
                found.append(
                    Link(
                        gbs,
                        reach=None if level is self.levels[-1] else reach,
                        line_us=level.line_us,
                    )
                )
        return tuple(found)

    def memory(self, ranks: int, threads: int) -> float:
        """GB/s of memory for each of `ranks` ranks."""
        return min(
            threads * self.core_gbs,
            self.package_gbs / max(1, -(-self.package * ranks // self.total)),
        )


@dataclass(frozen=True)
class Machine:
    """A machine on which plans are simulated.

    Attributes:
        products: by dtype, and by ``dtype packed`` if that differs.
        links: the fastest first.
        network: the link between two hosts, if known: all ranks of a host share it, its latency is
            that of a signal.
        hosts: the host of each rank, if there are several (`over`).
        memory_gbs, reduce_gbs: GB/s that a local copy moves, and that a sum reads; with factors
            like a link's.
        notify_us: from a notify until the peer's wait ends.
        launch_us: from the call until a rank's lanes begin, with comm lanes lane_us later.
        wake_us: delay of a lane that sleeps for an idle link.
        turn_us: scheduling delay of a comm lane, after the wait for a signal, on a core that the
            compute lane uses.
        compute_slowdown: factor of the compute lane's times while the rank's comm lanes work.
        communicate_slowdown: factor of the comm lanes' times while the compute lane works.
        lanes: comm lanes of a rank, each with a link.
        in_place: products and sums read the memory of peers like their own.
        fetches: peers from which a core fetches rows at a time.
        cores: the source of figures that follow from the ranks and their threads (`of_ranks`).
        ranks: the number on which the figures were measured, if that matters.
        thresholds: of its collectives.
        source: of the figures.
        residuals: of the fit of the figures, in percent.
    """

    name: str
    products: Mapping[str, Product]
    links: tuple[Link, ...]
    memory_gbs: float
    reduce_gbs: float
    notify_us: float = 0.0
    launch_us: float = 0.0
    lane_us: float = 0.0
    wake_us: float = 0.0
    turn_us: float = 0.0
    compute_slowdown: float = 1.0
    communicate_slowdown: float = 1.0
    lanes: int = 1
    in_place: bool = False
    memory_factors: Grid | None = None
    reduce_factors: Grid | None = None
    network: Link | None = None
    hosts: tuple[int, ...] | None = None
    fetches: int = 1
    cores: Cores | None = None
    ranks: int | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)
    source: str = ""
    residuals: Mapping[str, float] = field(default_factory=dict)

    def multiplies(self, dtype: str) -> bool:
        """Whether the rate of products of this dtype is known."""
        return dtype in self.products

    def product(self, rows: int, k: int, n: int, dtype: str, packed: bool) -> float:
        """Seconds of a local product."""
        found = self.products.get(f"{dtype} packed") if packed else None
        found = found or self.products.get(dtype)
        if found is None:
            known = sorted({name.removesuffix(" packed") for name in self.products})
            raise ValueError(
                f"{self.name} has no product rate for {dtype}; it has {', '.join(known)}"
            )
        return found.seconds(rows, k, n, ITEMSIZE[dtype])

    def copy(self, size: int) -> float:
        """Seconds of a local copy of `size` bytes."""
        return _passing(size, self.memory_gbs, self.memory_factors)

    def reduce(self, size: int) -> float:
        """Seconds of a sum that reads `size` bytes."""
        return _passing(size, self.reduce_gbs, self.reduce_factors)

    def link(self, one: int, other: int) -> Link:
        """The nearest link that joins two ranks."""
        if self.network and self.on_other_hosts(one, other):
            return self.network
        return next(
            link
            for link in self.links
            if link.reach is None or one // link.reach == other // link.reach
        )

    def on_other_hosts(self, one: int, other: int) -> bool:
        """Whether two ranks are on different hosts."""
        return self.hosts is not None and self.hosts[one] != self.hosts[other]

    def signal_us(self, one: int, other: int) -> float:
        """Microseconds from when a rank has raised a counter of another until that one's wait is
        over: it fetches the line, too.
        """
        return (
            self.network.latency_us
            if self.network and self.on_other_hosts(one, other)
            else self.notify_us + self.line_us(one, other)
        )

    def line_us(self, one: int, other: int) -> float:
        """Microseconds for which a rank waits for a cache line of another."""
        return (
            0.0
            if one == other or self.on_other_hosts(one, other)
            else self.link(one, other).line_us
        )

    def of_ranks(self, ranks: int, threads: int | None = None) -> Machine:
        """This machine with `ranks` ranks of `threads` threads each, or all cores divided evenly.

        Without `cores` it is the same machine.
        Raises `ValueError` for more threads than cores.
        """
        if self.cores is None:
            return self
        threads = threads or max(1, self.cores.total // ranks)
        if ranks * threads > self.cores.total:
            raise ValueError(
                f"{self.name} has {self.cores.total} cores, too few for {ranks} ranks of {threads} "
                "threads"
            )
        memory = self.cores.memory(ranks, threads)
        products = {
            name: replace(one, tflops=threads * one.tflops, weight_gbs=memory)
            for name, one in self.cores.products.items()
        }
        links = self.cores.links(ranks, threads)
        return replace(
            self, products=products, links=links, memory_gbs=memory / 2, reduce_gbs=memory
        )

    def groups(self, ranks: int) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that links join, the nearest first."""
        reaches = (link.reach for link in self.links if link.reach and 1 < link.reach < ranks)
        return tuple(tuple(rank // reach for rank in range(ranks)) for reach in reaches)

    def group(self, ranks: int) -> int:
        """The smallest rotation of `ranks` ranks that leaves all links unchanged."""
        if self.hosts is not None:
            here = self.hosts.count(self.hosts[0])
            return here if self.hosts == tuple(rank // here for rank in range(ranks)) else ranks
        return max(
            (link.reach for link in self.links if link.reach and link.reach < ranks), default=1
        )

    def over(self, hosts: Sequence[int]) -> Machine:
        """Several machines like this one, with ranks on `hosts`, joined by the network, or by the
        link that reaches farthest.

        Raises `ValueError` for a machine of which no link to others is known.
        """
        network = self.network or (self.links[-1] if len(self.links) > 1 else None)
        if network is None:
            raise ValueError(
                f"{self.name} knows no link to other hosts; weft calibrate, started by torchrun on "
                "two, measures it"
            )
        return replace(self, network=network, hosts=tuple(hosts))

    def with_link(
        self, ranks: int, gbs: float | None = None, latency_us: float | None = None
    ) -> Machine:
        """This machine with other figures for the link that joins all of `ranks` ranks: GB/s and
        microseconds.
        """

        def changed(link: Link) -> Link:
            return replace(
                link,
                gbs=gbs or link.gbs,
                latency_us=link.latency_us if latency_us is None else latency_us,
            )

        if self.hosts is not None and self.network:
            return replace(self, network=changed(self.network))
        joining = next(link for link in self.links if link.reach is None or link.reach >= ranks)
        return replace(
            self, links=tuple(changed(link) if link is joining else link for link in self.links)
        )

    def emulating(self, gbps: float, latency_us: float) -> Machine:
        """This machine with the link of `World.emulate_link`: `gbps` counts 1e9 bits per second."""
        return replace(self, links=(Link(gbps / 8, latency_us, idle=True),))


def _passing(size: int, gbs: float, factors: Grid | None) -> float:
    """Seconds of `size` bytes at a bandwidth, times a measured factor of the size."""
    return size / (gbs * 1e9) * (factors.at(size) if factors and size else 1.0)


def here() -> Machine:
    """This machine as ``weft calibrate`` measured it; where it was not, the profile ``cpu`` has to
    do.
    """
    return load(THIS if calibrated() else _UNMEASURED)


def names() -> list[str]:
    """The names for `load`: the profiles, and ``this`` after ``weft calibrate``."""
    found = []
    for path in sorted(_DIRECTORY.glob("*.toml")):
        found += [
            path.stem,
            *(f"{path.stem}/{variant}" for variant in _read(path).get("variants", {})),
        ]
    return [THIS, *found] if calibrated() else found


def load(name: str) -> Machine:
    """The profile of this name; ``machine/variant`` for another use of the same machine.

    Raises `ValueError` that lists what there is.
    """
    stem, _, variant = name.partition("/")
    if name == THIS and (mine := calibrated()):
        return from_dict(mine)
    path = _DIRECTORY / f"{stem}.toml"
    if stem.replace("-", "").isalnum() and path.exists():
        profile = _read(path)
        variants = profile.pop("variants", {})
        if not variant or variant in variants:
            return from_dict(profile | variants.get(variant, {}) | {"name": name})
    hint = "" if calibrated() else f"; {THIS!r} is there once weft calibrate has been run"
    raise ValueError(f"there is no machine {name!r}; there are {', '.join(names())}{hint}")


def calibrated() -> dict[str, Any] | None:
    """The profile of this machine, if ``weft calibrate`` has been run."""
    found: dict[str, Any] | None = cache.stored(cache.of_this_machine(cache.PROFILE), from_dict)
    return found


def remember(profile: Mapping[str, Any]) -> None:
    """Store what ``weft calibrate`` measured as the profile of this machine."""
    cache.store(cache.of_this_machine(cache.PROFILE), profile)


def from_dict(profile: Mapping[str, Any]) -> Machine:
    """A machine from what a profile says; other keys than a machine's are notes for readers."""
    known = {key: value for key, value in profile.items() if key in Machine.__dataclass_fields__}
    sizes = profile.get("thresholds", {})
    known["thresholds"] = Thresholds(
        **{key: sizes[key] for key in Thresholds.__dataclass_fields__ if key in sizes}
    )
    known |= {key: _grid(known.get(key)) for key in ("memory_factors", "reduce_factors")}
    if cores := known.get("cores"):
        levels = tuple(CoreGroup(**level) for level in cores["levels"])
        products = {name: Product(**product) for name, product in cores["products"].items()}
        known["cores"] = Cores(**{**cores, "levels": levels, "products": products})
        return Machine(
            **{"products": {}, "links": (), "memory_gbs": 0.0, "reduce_gbs": 0.0, **known}
        ).of_ranks(2)
    known["products"] = {
        name: Product(**_with_grid(product)) for name, product in profile["products"].items()
    }
    known["links"] = tuple(Link(**_with_grid(link)) for link in profile["links"])
    known["network"] = Link(**_with_grid(known["network"])) if known.get("network") else None
    return Machine(**known)


def _with_grid(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {**figures, "factors": _grid(figures.get("factors"))}


def _grid(figures: Mapping[str, Any] | None) -> Grid | None:
    return Grid(**figures) if figures else None


def _read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())
