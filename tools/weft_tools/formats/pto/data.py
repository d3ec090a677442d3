"""The data of a program of PTO: the rows and the weight of each rank, in float16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from weft_tools.formats.pto.writer import Sizes

_LARGEST = 4  # so that sums are exact


def _arrays(sizes: Sizes) -> dict[str, tuple[int, int]]:
    """The shape of each array of a rank; b is there for a product only."""
    return {"a": (sizes.rows, sizes.k), **({"b": (sizes.k, sizes.n)} if sizes.n else {})}


def drawn(ranks: int, sizes: Sizes) -> dict[str, Any]:
    """Random integers: ``a0``, ``b0``, ``a1``, …"""
    numbers = np.random.default_rng(0)
    return {
        f"{name}{rank}": numbers.integers(-_LARGEST, _LARGEST + 1, size).astype(np.float16)
        for rank in range(ranks)
        for name, size in _arrays(sizes).items()
    }


def saved(directory: Path, ranks: int, sizes: Sizes) -> dict[str, Any]:
    """The data that ``weft bench … --save-data`` has written. Raises `ValueError`
    for other files, dtypes or sizes.
    """
    found = {}
    for rank in range(ranks):
        file = directory / f"rank{rank}.npz"
        try:
            arrays = np.load(file)
            given = {name: arrays[name] for name in _arrays(sizes)}
        except (OSError, KeyError, ValueError) as error:
            wanted = " and ".join(_arrays(sizes))
            raise ValueError(f"{file} has no {wanted}: {error}") from None
        for name, size in _arrays(sizes).items():
            array = given[name]
            if array.dtype != np.float16 or array.shape != size:
                raise ValueError(
                    f"{file} has {name} of {array.dtype} {array.shape}; the program is for float16 "
                    f"{size}: make it by --dtype float16, or give its --shape"
                )
            found[f"{name}{rank}"] = np.ascontiguousarray(array)
    return found
