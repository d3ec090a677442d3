"""The options of a layer of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class LayerOptions(NamedTuple):
    """The options of `weft.moe`; they are also the arguments of its custom operator in torch."""

    experts_of_ranks: Sequence[int] | None = None
    algorithm: str = "auto"
    chunk_rows: int | None = None
    timeout: float | None = None
