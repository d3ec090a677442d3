"""Values and texts of all ranks, which are small, exchanged by the sockets of their world: a
collective call as any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import weft._native as _native
from weft.bootstrap.wire import decode, encode
from weft.world.memory import exchange

if TYPE_CHECKING:
    from weft.world.world import World

Kind = TypeVar("Kind")
_CALL = "the exchange of values"
_PIECE = 15000  # characters, with which a note of a world is not cut


def all_gather_values(world: World, own: Kind, kind: type[Kind]) -> list[Kind]:
    """The value of each rank, which `weft.bootstrap.wire` can encode. Raises `ValueError` if one is
    not of type `kind`.
    """
    return [decode(text.encode(), kind) for text in all_gather_texts(world, encode(own).decode())]


def all_gather_texts(world: World, own: str) -> list[str]:
    """The text of each rank, in ASCII."""
    found = [""] * world.ranks
    while True:
        start = len(found[world.rank])
        pieces = _exchanged(world, own[start : start + _PIECE])
        found = [text + piece for text, piece in zip(found, pieces, strict=True)]
        if all(len(piece) < _PIECE for piece in pieces):
            return found


def _exchanged(world: World, own: str) -> list[str]:
    """The note of each rank."""
    notes = [own] * world.ranks
    compiled = _native.Compiled(_CALL, 0, [], world.ranks)
    world.executor.begin(compiled, world.timeout)
    for peer, note, _ in exchange(world, compiled, _CALL, own):
        notes[peer] = note
    return notes
