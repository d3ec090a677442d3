"""How the device engine works on a call: the size of tiles, the SMs of products and of copies, and
the number of lanes for transfers.

Plans do not depend on these options, but for the number of lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.plan import Compute, Copy, Plan

Tile = tuple[int, int]
"""Rows and columns of a product that a program computes at once."""

TILES: tuple[Tile, ...] = (
    (64, 64),
    (64, 128),
    (128, 64),
    (128, 128),
    (64, 256),
    (128, 256),
    (256, 128),
)
"""The tiles of the product kernel, rows x columns. Tests compile it with each of them."""


@dataclass(frozen=True)
class DeviceOptions:
    """Options of a world whose lanes are streams: ``weft.init(device="cuda", device_options=…)``,
    or later `World.configure`. All ranks have the same.

    Attributes:
        tile: rows and columns that a program of the product kernel computes at once, one of
            `weft.schedules.device_options.TILES`; None: the largest that fits in the registers, or
            smaller ones if at least half of the programs would have no tile. Its elements are at
            most 128 x 256; 128 x 128 on AMD's GPUs; 64 x 128 of float32 factors.
        compute_sms: programs of the product kernel, each on its own SM; None: all SMs of the rank
            but those of copies and four more, for signals.
        comm_sms: 0: the copy engine moves rows between ranks; else a kernel of this number of
            programs in each lane for transfers.
        links: lanes in which a rank sends to its peers at the same time, each to its share of them.
        own_tile: as `tile`, of the products of this rank's own rows, which a launch computes before
            those of gathered rows; None: that of gathered rows.

    `tile`, `own_tile` and `compute_sms` need ``products="triton"``. With `comm_sms`, `own_tile` or
    several `links` ``algorithm="auto"`` selects an algorithm that supports them; others are
    rejected.

    Raises `ValueError` for a tile that is not one of `TILES` and for numbers that are too small.

    Examples:
        >>> options = weft.DeviceOptions(links=2)
        >>> with weft.local_world(3, streams=True, device_options=options) as local:
        ...     local.run(lambda: weft.init().device_options.links)
        [2, 2, 2]
    """

    tile: Tile | None = None
    compute_sms: int | None = None
    comm_sms: int = 0
    links: int = 1
    own_tile: Tile | None = None

    def __post_init__(self) -> None:
        for name in ("tile", "own_tile"):
            if (tile := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(tile))
                if tuple(tile) not in TILES:
                    raise ValueError(f"{name} must be one of {_names(TILES)}; got {tuple(tile)}")
        for name, least in (("compute_sms", 1), ("comm_sms", 0), ("links", 1)):
            value = getattr(self, name)
            if name == "compute_sms" and value is None:
                continue
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}; got {value!r}")

    @property
    def need_a_plan(self) -> bool:
        """Whether there are plans that cannot honour these options."""
        return self.links > 1 or self.comm_sms > 0 or self.own_tile is not None

    def __str__(self) -> str:
        """The options that are no defaults, in words; empty for none."""
        words = []
        if self.tile:
            words.append(f"tiles of {tile_name(self.tile)}")
        if self.own_tile:
            words.append(f"own rows in tiles of {tile_name(self.own_tile)}")
        if self.compute_sms:
            words.append(f"products on {self.compute_sms} SMs")
        if self.comm_sms:
            words.append(f"copies on {self.comm_sms} SMs")
        if self.links > 1:
            words.append(f"{self.links} links")
        return ", ".join(words)


DEFAULT = DeviceOptions()


def honours(plan: Plan, options: DeviceOptions) -> bool:
    """Whether a plan of ranks of one host has a lane for each link, copies rows between ranks if a
    kernel is to do so, and multiplies own and other rows if they are to have different tiles.
    """
    lanes = plan.lanes[0]
    instructions = [i for lane in lanes.values() for i in lane]
    copies = any(isinstance(i, Copy) and i.src.rank != i.dst.rank for i in instructions)
    links = sum(name.startswith("comm") for name in lanes)
    return (
        (copies or not options.comm_sms)
        and (options.links == 1 or links == options.links)
        and (options.own_tile is None or _multiplies_own_and_others(plan))
    )


def _multiplies_own_and_others(plan: Plan) -> bool:
    sources = {i.srcs[0][:2] for i in plan.lanes[0]["compute"] if isinstance(i, Compute)}
    own = {
        (rank, name) for rank, name in sources if not rank and plan.buffers[name].role == "input"
    }
    return bool(own) and sources > own


def tile_name(tile: Sequence[int]) -> str:
    """``128x256``."""
    return "x".join(map(str, tile))


def tile_of(name: str) -> Tile:
    """The tile of a name such as ``128x256``."""
    rows, columns = map(int, name.split("x"))
    return rows, columns


def _names(tiles: Sequence[Sequence[int]]) -> str:
    return ", ".join(map(tile_name, tiles))
