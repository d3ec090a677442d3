"""Float8 inputs: each row of `a` has its scale as a companion, which plans move with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.checks import name
from weft.kernels.float8 import ScaledWeight
from weft.kernels.weights import FLOAT8, Weight, source
from weft.ops import arguments
from weft.world import World


def scaled(
    a: Tensor,
    weights: Sequence[Weight],
    scale_a: Tensor | None,
    scales_b: Sequence[Tensor | None],
    world: World,
) -> tuple[list[Weight], tuple[Tensor, ...]]:
    """The weights with their scales, and those of the rows of `a` as their companion; unchanged
    weights, and no companion, without scales.

    Scales are float32: one for a whole tensor, or one for each row of a (…, 1) and each column of b
    (1, N), as ``torch._scaled_mm`` takes them. Raises `ValueError` or `TypeError` for anything
    else.
    """
    if (
        scale_a is None
        and all(scale is None for scale in scales_b)
        and getattr(a, "dtype", None) not in FLOAT8
    ):
        return [*weights], ()  # if it is no tensor, the operator says so
    arguments.check_matrix(a, world, FLOAT8)
    made: list[Weight] = []
    for b, scale in zip(weights, scales_b, strict=True):
        if not isinstance(b, Tensor):
            raise TypeError(
                f"b must be a tensor where a is {name(a.dtype)}; got {type(b).__name__}"
            )
        arguments.check_input(b, "b", world, FLOAT8)
        if b.dim() != 2:
            raise ValueError(f"b must be a matrix (K, N); got shape {tuple(b.shape)}")
        made.append(ScaledWeight(b, _spread(scale, (1, b.shape[1]), "scale_b", world)))
    scales = _spread(scale_a, (*a.shape[:-1], 1), "scale_a", world)
    if arguments.recorded((a, scale_a, *scales_b)):
        for b in made:
            source(b)
    return made, (scales,)


def _spread(scale: Tensor | None, shape: tuple[int, ...], argument: str, world: World) -> Tensor:
    """One scale for each row or column."""
    if scale is None:
        raise ValueError(f"float8 inputs need scales: give {argument}")
    arguments.check_place(scale, argument, world)
    if scale.dtype != torch.float32 or (scale.numel() != 1 and scale.shape != torch.Size(shape)):
        raise ValueError(
            f"{argument} must be float32, a single one or of shape {shape}; got {scale.dtype}, "
            f"{tuple(scale.shape)}"
        )
    return scale.reshape(-1)[:1].expand(shape) if scale.numel() == 1 else scale
