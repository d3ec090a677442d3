"""How a fused operator carries out a call, and why: what `weft.explain` tells."""

from __future__ import annotations

from typing import NamedTuple

from weft.engines import engine
from weft.ops import arguments
from weft.world import World

PIECES = 16  # transfers per shard: enough that little is left to do when the last one arrives


class Choice(NamedTuple):
    """An algorithm, the rows of a piece, and why these."""

    algorithm: str
    chunk_rows: int
    why: str

    def __str__(self) -> str:
        return f"{self.algorithm}, at most {self.chunk_rows} rows per transfer: {self.why}"


def check_possible(algorithm: str, known: tuple[str, ...], world: World) -> None:
    """Raise `ValueError` for an algorithm that is unknown, or that the world's engine cannot carry out."""
    arguments.check_algorithm(algorithm, known)
    refused = engine(world).refused
    if algorithm in refused:
        others = ", ".join(name for name in known if name not in refused)
        raise ValueError(f"{algorithm} is not possible in this world: {refused[algorithm]}; choose {others}")


def check(algorithm: str, known: tuple[str, ...], chunk_rows: int | None, in_place: tuple[str, ...], world: World) -> None:
    """Raise `ValueError` for what cannot be chosen; algorithms `in_place` move no rows, which an emulated link could slow."""
    check_possible(algorithm, known, world)
    arguments.check_chunk_rows(chunk_rows)
    if algorithm in in_place and world.link:
        others = ", ".join(name for name in known if name not in in_place)
        raise ValueError(f"{algorithm} moves no rows, so an emulated link cannot slow it: choose {others}")
