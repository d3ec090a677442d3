"""How a kernel of a GPU executes a plan. Without torch, as all of this package."""

from __future__ import annotations

from typing import NamedTuple


class Launch(NamedTuple):
    """The launch of a kernel that executes a plan's copies to all ranks, equal on all ranks: of
    `weft.all_gather` with ``algorithm="kernel"``.

    `comm_sms`: programs, each on a separate SM (compute unit on AMD). `tile_bytes`: bytes that a
    program loads at once, in accesses of 16 bytes, and stores to every rank before it loads more, a
    power of two, 16 to 256 for each thread and at most 65536; in narrower accesses a tile has as
    many of them, so fewer bytes. `warps`: warps of a program. `gluon`: whether Gluon compiles the
    kernel, with the layout of a tile over threads stated, in place of Triton.

    The defaults were measured on no GPU.

    Examples:
        >>> print(weft.Launch(comm_sms=8, warps=4))
        comm_sms=8, tile_bytes=32768, warps=4, gluon=False
    """

    comm_sms: int = 16
    tile_bytes: int = 32768
    warps: int = 8
    gluon: bool = False

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._asdict().items())
