"""The operands and results of a benchmark as NumPy files, for checks by other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.ops.operator import find
from weft.world import World
from weft_tools.bench.between_ranks import everyones


def save(
    directory: Path, world: World, name: str, rows: Sequence[int], tensors: Mapping[str, Tensor]
) -> None:
    """Write ``rank<r>.npz`` with the arrays of this rank: `tensors`, which are its input ``a``, its
    weight ``b``, its result ``out`` and, if the call has them, its ``bias`` and the ``gathered`` a;
    and what is ``expected`` by the definition of the operator `name`, plus the bias, in float64;
    collective.

    `rows` are the operator's rows of each rank. NumPy has no bfloat16: such values are written as
    float32, which holds them exactly.
    """
    if world.rank == 0:
        for file in directory.glob("rank*.npz"):  # of an earlier run of more ranks
            if (number := file.stem[4:]).isdecimal() and int(number) >= world.ranks:
                file.unlink()
    tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
    operator, own = find(name), (tensors["a"].clone(), tensors["b"])
    operands = everyones(world, own)
    inputs, weights = ([each.double() for each in part] for part in zip(*operands, strict=True))
    result_rows = [operator.schedule.result_rows(rows, rank) for rank in range(world.ranks)]
    expected = operator.reference(inputs, weights, result_rows)[world.rank]
    if "bias" in tensors:
        expected = expected + tensors["bias"]
    arrays = {**tensors, "expected": expected}
    file = directory / f"rank{world.rank}.npz"
    np.savez(file, **{name: _array(tensor) for name, tensor in arrays.items()})


def _array(tensor: Tensor) -> Any:
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
