"""Activations between two parallel layers, of which each rank holds its own rows only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from weft.vllm.communicator import Communicator


class RowShard(Tensor):
    """A tensor (rows, …) of which rank p holds ``sizes[p]`` rows.

    weft's layers compute with `own`, this rank's rows. Every other operator gets all rows, gathered
    when they are first needed, so a model is right whatever its layers do with them; like every
    collective, that must happen on all ranks.
    """

    own: Tensor
    sizes: Sequence[int]
    communicator: Communicator
    gathered: Tensor | None

    @staticmethod
    def __new__(cls, own: Tensor, sizes: Sequence[int], communicator: Communicator) -> RowShard:
        shape = sum(sizes), *own.shape[1:]
        made: RowShard = Tensor._make_wrapper_subclass(
            cls, shape, dtype=own.dtype, device=own.device
        )
        made.own = own
        made.sizes = sizes
        made.communicator = communicator
        made.gathered = None
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(RowShard, whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def part(self, tensor: Tensor) -> Tensor:
        """This rank's rows of a tensor of as many rows."""
        if isinstance(tensor, RowShard) and tensor.gathered is None:
            return tensor.own
        start = sum(self.sizes[: self.communicator.rank_in_group])
        return whole(tensor)[start : start + len(self.own)]

    def of(self, own: Tensor) -> RowShard:
        """A tensor that is distributed like this one, of which this rank has the rows `own`."""
        return RowShard(own, self.sizes, self.communicator)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RowShard(rows {[*self.sizes]}, own={self.own!r})"


def whole(tensor: Tensor) -> Tensor:
    """The tensor with the rows of all ranks."""
    if not isinstance(tensor, RowShard):
        return tensor
    if tensor.gathered is None:
        tensor.gathered = tensor.communicator.gathered(tensor.own, 0, tensor.sizes)
    return tensor.gathered


def shard_among(*tensors: Tensor | None) -> RowShard | None:
    """The first of the tensors whose rows are still distributed."""
    return next((t for t in tensors if isinstance(t, RowShard) and t.gathered is None), None)
