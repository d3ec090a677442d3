"""Gathers and scatters along any dimension: engines move rows, so the dimension is moved to the
front, and back at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from weft.checks import integer


def normal(dim: int, dims: int) -> int:
    """`dim` counted from the front, of a tensor with `dims` dimensions; `ValueError` if it
    has no such dimension, `TypeError` if `dim` is no integer.
    """
    dim = integer(dim, "dim must be an integer")
    if not dims:
        raise ValueError(
            "a must have at least one dimension; got a tensor with none: pass a.view(1)"
        )
    if not -dims <= dim < dims:
        raise ValueError(f"a has {dims} dimensions; there is no dimension {dim}")
    return dim % dims


def to_front(tensor: Tensor, dim: int) -> Tensor:
    """The tensor as a matrix with contiguous rows, whose outermost dimension is `dim`, and whose
    columns are its last dimension. It is a view if the strides permit.
    """
    front = tensor.movedim(dim, 0) if dim else tensor
    return adjacent(front.reshape(math.prod(front.shape[:-1]), front.shape[-1]))


def adjacent(matrix: Tensor) -> Tensor:
    """The matrix if the columns of each row are adjacent, else a copy of which that is true."""
    if matrix.shape[1] <= 1 or matrix.stride(1) == 1:
        return matrix
    # `contiguous` would return an empty matrix as it is
    return matrix.contiguous() if matrix.numel() else matrix.new_empty(matrix.shape)


def resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """A shape with another size of dimension `dim`."""
    return (*shape[:dim], size, *shape[dim + 1 :])


def front(result: Tensor, dim: int) -> Tensor:
    """A tensor for a result with dimension `dim` first; the result itself for dimension 0."""
    return result.new_empty(result.movedim(dim, 0).shape) if dim else result


def inner(shape: Sequence[int], dim: int) -> int:
    """Rows of the matrix of `to_front` for each index of dimension `dim`."""
    return math.prod(shape[:dim]) * math.prod(shape[dim + 1 : -1])


def back(front: Tensor, dim: int, result: Tensor) -> Tensor:
    """Copy `front` to the `result` that it was made for, its first dimension back as `dim`."""
    return result if dim == 0 else result.copy_(front.movedim(0, dim))
