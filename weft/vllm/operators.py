"""Collectives of vLLM's groups as custom operators, which graphs compiled by vLLM call.

A group is named by vLLM's unique name, such as ``tp:0``: graphs are then equal on all ranks and in
later processes, and vLLM's cache of compiled graphs holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from torch import Tensor

from weft.compiler.custom import define

if TYPE_CHECKING:
    from weft.vllm.communicator import Communicator

communicators: WeakValueDictionary[str, Communicator] = WeakValueDictionary()
"""The communicators of this process by the unique names of their groups."""


def _all_reduce(tensor: Tensor, group: str) -> None:
    communicators[group].all_reduce(tensor)


def _all_gather(tensor: Tensor, dim: int, sizes: Sequence[int], group: str) -> Tensor:
    return communicators[group].gathered(tensor, dim, sizes)


def _reduce_scatter(
    tensor: Tensor, dim: int, sizes: Sequence[int], rank: int, group: str
) -> Tensor:
    return communicators[group].scattered(tensor, dim, sizes)


def _resized(tensor: Tensor, dim: int, size: Any) -> Tensor:
    return tensor.new_empty([*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]])


all_reduce = define(
    "vllm_all_reduce(Tensor(a!) tensor, str group) -> ()", _all_reduce, lambda tensor, group: None
)
all_gather = define(
    "vllm_all_gather(Tensor tensor, int dim, SymInt[] sizes, str group) -> Tensor",
    _all_gather,
    lambda tensor, dim, sizes, group: _resized(tensor, dim, sum(sizes)),
)
reduce_scatter = define(
    "vllm_reduce_scatter(Tensor tensor, int dim, SymInt[] sizes, int rank, str group) -> Tensor",
    _reduce_scatter,
    lambda tensor, dim, sizes, rank, group: _resized(tensor, dim, sizes[rank]),
)
