"""Machine models of the simulator: the speeds of products, sums, copies and links, and the
interference between them.

A profile is a TOML file in the folder ``machines``, fitted to published figures, or the profile of
this machine that ``weft calibrate`` stores in the cache directory. `load` reads them, `names` lists
them. Sizes are in bytes, bandwidths in GB/s of 1e9 bytes, and times in seconds, or in
microseconds for names that end in ``_us``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import weft.cache as cache
from weft.outside import parsed, read_text
from weft.schedules.thresholds import Thresholds
from weft_tools.predict.cores import CoreGroup, Cores
from weft_tools.predict.interpolation import RateGrid
from weft_tools.predict.rates import ITEMSIZE, passing
from weft_tools.predict.rates import LinkRate as LinkRate
from weft_tools.predict.rates import ProductRate as ProductRate

_DIRECTORY = Path(__file__).parent / "machines"
THIS = "this"
"""The name of the machine that ``weft calibrate`` measured."""
_UNMEASURED = "cpu"  # the profile of a machine that was not calibrated


@dataclass(frozen=True)
class Machine:
    """A machine on which plans are simulated.

    Attributes:
        products: rates of products by dtype, and by ``dtype packed`` if they differ.
        links: the links between ranks, the fastest first.
        network: the link between two hosts, if known, shared by all ranks of a host; its latency is
            the signal latency.
        hosts: the host of each rank, if there are several (`over`).
        memory_gbs, reduce_gbs: GB/s that a local copy moves, and that a sum reads; with factors
            as of a link.
        notify_us: the signal latency.
        notify_source: where it comes from, if it is neither measured nor part of the fit.
        launch_us: the time from the call until a rank's lanes start; with comm lanes, lane_us more.
        wake_us: the delay of a lane that sleeps for an idle link.
        turn_us: the scheduling delay of a comm lane, after the wait for a signal, on a core that
            the compute lane uses.
        compute_slowdown: factor of the compute lane's times while the rank's comm lanes work.
        communicate_slowdown: factor of the comm lanes' times while the compute lane works.
        lanes: the number of comm lanes of a rank, each with a link.
        in_place: products and sums read the memory of peers like their own.
        fetches: the number of peers from which a core fetches rows at a time.
        cores: the source of figures that follow from the ranks and their threads (`of_ranks`).
        ranks: the number of ranks with which the figures were measured, if that matters.
        counter_mhz: the rate of the device's counter, in whose ticks durations are published.
        thresholds: the thresholds of its collectives.
        source: where the figures come from.
        residuals: of the fit of the figures, in percent.
    """

    name: str
    products: Mapping[str, ProductRate]
    links: tuple[LinkRate, ...]
    memory_gbs: float
    reduce_gbs: float
    notify_us: float = 0.0
    notify_source: str = ""
    launch_us: float = 0.0
    lane_us: float = 0.0
    wake_us: float = 0.0
    turn_us: float = 0.0
    compute_slowdown: float = 1.0
    communicate_slowdown: float = 1.0
    lanes: int = 1
    in_place: bool = False
    memory_factors: RateGrid | None = None
    reduce_factors: RateGrid | None = None
    network: LinkRate | None = None
    hosts: tuple[int, ...] | None = None
    fetches: int = 1
    cores: Cores | None = None
    ranks: int | None = None
    counter_mhz: float = 0.0
    thresholds: Thresholds = field(default_factory=Thresholds)
    source: str = ""
    residuals: Mapping[str, float] = field(default_factory=dict)

    def multiplies(self, dtype: str) -> bool:
        """Whether there is a rate for products of this dtype."""
        return dtype in self.products

    def product(self, rows: int, k: int, n: int, dtype: str, packed: bool) -> float:
        """Seconds of a local product."""
        product = self.products.get(f"{dtype} packed") if packed else None
        product = product or self.products.get(dtype)
        if product is None:
            dtypes = sorted({name.removesuffix(" packed") for name in self.products})
            raise ValueError(
                f"{self.name} has no product rate for {dtype}; it has {', '.join(dtypes)}"
            )
        return product.seconds(rows, k, n, ITEMSIZE[dtype])

    def copy(self, size: int) -> float:
        """Seconds of a local copy of `size` bytes."""
        return passing(size, self.memory_gbs, self.memory_factors)

    def reduce(self, size: int) -> float:
        """Seconds of a sum that reads `size` bytes."""
        return passing(size, self.reduce_gbs, self.reduce_factors)

    def link(self, one: int, other: int) -> LinkRate:
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
        """Microseconds from the moment at which rank `one` has raised a counter of rank `other` to
        the end of that rank's wait, which fetches the cache line.
        """
        return (
            self.network.latency_us
            if self.network and self.on_other_hosts(one, other)
            else self.notify_us + self.line_us(one, other)
        )

    def line_us(self, one: int, other: int) -> float:
        """Microseconds for which a rank waits for a cache line that another rank has written."""
        return (
            0.0
            if one == other or self.on_other_hosts(one, other)
            else self.link(one, other).line_us
        )

    def cycles(self, seconds: float) -> float | None:
        """Ticks of the device's counter in a call of so many seconds, without its launch; None if
        the rate of the counter is unknown.
        """
        return 1e6 * self.counter_mhz * (seconds - self.launch_us * 1e-6) or None

    def of_ranks(self, ranks: int, threads: int | None = None) -> Machine:
        """This machine with `ranks` ranks of `threads` threads each, by default with all cores
        divided evenly; unchanged if it has no `cores`.

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
        """The group of each rank by the reach of each link, the smallest groups first."""
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
        """Several machines like this one, with a rank on each of `hosts`, joined by the network, or
        else by the link between the largest groups.

        Raises `ValueError` for a machine that has neither.
        """
        network = self.network or (self.links[-1] if len(self.links) > 1 else None)
        if network is None:
            raise ValueError(
                f"{self.name} has no link to other hosts; weft calibrate, started by torchrun on "
                "two, measures it"
            )
        return replace(self, network=network, hosts=tuple(hosts))

    def with_link(
        self, ranks: int, gbs: float | None = None, latency_us: float | None = None
    ) -> Machine:
        """This machine with another bandwidth or latency of the link that joins all of `ranks`
        ranks.
        """

        def changed(link: LinkRate) -> LinkRate:
            return replace(
                link,
                gbs=link.gbs if gbs is None else gbs,
                latency_us=link.latency_us if latency_us is None else latency_us,
            )

        if self.hosts is not None and self.network:
            return replace(self, network=changed(self.network))
        joining = next(link for link in self.links if link.reach is None or link.reach >= ranks)
        return replace(
            self, links=tuple(changed(link) if link is joining else link for link in self.links)
        )

    def emulating(self, gbps: float, latency_us: float) -> Machine:
        """This machine with the link of `World.emulate_link`; `gbps` is in 1e9 bits per second."""
        return replace(self, links=(LinkRate(gbps / 8, latency_us, idle=True),))


def here() -> Machine:
    """This machine as ``weft calibrate`` measured it, or else the profile ``cpu``."""
    return load(THIS if calibrated() else _UNMEASURED)


def machines() -> list[str]:
    """The names of the profiles, without variants."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.toml"))


def names() -> list[str]:
    """The names for `load`: the profiles, and ``this`` after ``weft calibrate``."""
    profiles = []
    for machine in machines():
        variants = _read(_DIRECTORY / f"{machine}.toml").get("variants", {})
        profiles += [machine, *(f"{machine}/{variant}" for variant in variants)]
    return [THIS, *profiles] if calibrated() else profiles


def load(name: str) -> Machine:
    """The profile of this name, or ``machine/variant`` for another use of the same machine.

    Raises `ValueError` for an unknown name, with a list of the profiles.
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
    hint = "" if calibrated() else f"; {THIS!r} exists after weft calibrate"
    raise ValueError(f"there is no machine {name!r}; there are {', '.join(names())}{hint}")


def variant(found: Machine, name: str) -> Machine:
    """The variant of this name of a machine that was loaded, or the machine itself if its profile
    has none.
    """
    full = f"{found.name}/{name}"
    return load(full) if full in names() else found


def calibrated() -> dict[str, Any] | None:
    """The profile of this machine, if ``weft calibrate`` has been run."""
    profile: dict[str, Any] | None = cache.stored(cache.of_this_machine(cache.PROFILE), from_dict)
    return profile


def remember(profile: Mapping[str, Any]) -> None:
    """Store a measured profile of this machine."""
    cache.store(cache.of_this_machine(cache.PROFILE), profile)


def from_dict(profile: Mapping[str, Any]) -> Machine:
    """The machine of a profile; keys that are not fields of a machine are comments."""
    fields = {key: value for key, value in profile.items() if key in Machine.__dataclass_fields__}
    sizes = profile.get("thresholds", {})
    fields["thresholds"] = Thresholds(
        **{key: sizes[key] for key in Thresholds.__dataclass_fields__ if key in sizes}
    )
    fields |= {key: _grid(fields.get(key)) for key in ("memory_factors", "reduce_factors")}
    if cores := fields.get("cores"):
        levels = tuple(CoreGroup(**level) for level in cores["levels"])
        products = {name: ProductRate(**product) for name, product in cores["products"].items()}
        fields["cores"] = Cores(**{**cores, "levels": levels, "products": products})
        return Machine(
            **{"products": {}, "links": (), "memory_gbs": 0.0, "reduce_gbs": 0.0, **fields}
        ).of_ranks(2)
    fields["products"] = {
        name: ProductRate(**_with_grid(product)) for name, product in profile["products"].items()
    }
    fields["links"] = tuple(LinkRate(**_with_grid(link)) for link in profile["links"])
    fields["network"] = LinkRate(**_with_grid(fields["network"])) if fields.get("network") else None
    return Machine(**fields)


def _with_grid(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {**figures, "factors": _grid(figures.get("factors"))}


def _grid(figures: Mapping[str, Any] | None) -> RateGrid | None:
    return RateGrid(**figures) if figures else None


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = parsed(read_text(path), tomllib.loads)
    return found
