"""What a fused operator would do with given arguments, and why, in words."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from weft.engines import engine
from weft.engines.weights import PackedWeight, Weight
from weft.ops import all_gather_matmul, arguments, dims, matmul_all_reduce, matmul_reduce_scatter
from weft.ops.choice import Choice, explained
from weft.schedules.common import split
from weft.world import World, current

OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def explain(
    a: Tensor,
    b: Weight | Sequence[Weight],
    *,
    operator: str = "all_gather_matmul",
    dim: int = 0,
    shard_rows: Sequence[int] | None = None,
    algorithm: str = "auto",
    chunk_rows: int | None = None,
    world: World | None = None,
) -> str:
    """What `operator` would do with these arguments and why, in words, and the other ways with their predicted times.

    Not collective; nothing is sent. For ``auto`` it is what this rank would decide, where rank 0 has not decided yet.

    `operator` is ``all_gather_matmul``, ``matmul_reduce_scatter`` or ``matmul_all_reduce``; the rest as they take it. Raises
    `ValueError` or `TypeError` for arguments that the operator would refuse.
    """
    world = current(world)
    if operator not in OPERATORS:
        raise ValueError(f"there is no operator {operator!r}; choose one of {', '.join(OPERATORS)}")
    arguments.check_matrix(a, world)
    weights: list[Weight] = [*b] if isinstance(b, list | tuple) else [b]  # type: ignore[list-item]
    if not weights or (len(weights) > 1 and operator != "all_gather_matmul"):
        raise ValueError(f"b must be one weight, or several for all_gather_matmul; got a list of {len(weights)} weights")
    dim, packed = dims.normal(dim, a.dim()), all(isinstance(weight, PackedWeight) for weight in weights)
    last = dim == a.dim() - 1
    inner = 1 if last else dims.inner(a.shape, dim)
    if operator == "all_gather_matmul":
        shards = arguments.check_shard_rows(a.shape[dim], shard_rows, world)
        for weight in weights:
            arguments.check_weight(a, weight, world, sum(shards) if last else None)
        rows = tuple(n * inner for n in shards)
        choice = all_gather_matmul.choose(rows, world, algorithm, chunk_rows, last)
        if algorithm == "auto" and not last and any(rows):
            choice = explained(world, *all_gather_matmul.question(rows, a, weights, a.dtype, world, chunk_rows), choice)
        where = f"; {_place(a, choice, world)}"
    elif operator == "matmul_reduce_scatter":
        arguments.check_weight(a, weights[0], world)
        parts = arguments.check_parts(weights[0].shape[1] if last else a.shape[dim], shard_rows, world)
        rows = tuple(n * inner for n in parts)
        choice = matmul_reduce_scatter.choose(rows, world, algorithm, chunk_rows, packed and not last)
        if algorithm == "auto" and any(rows):
            asked = matmul_reduce_scatter.question(rows, a, weights[0], a.dtype, world, chunk_rows, last)
            choice = explained(world, *asked, choice)
        where = "; the transposed product is scattered by rows" if last else ""
    else:
        arguments.check_weight(a, weights[0], world)
        x = dims.to_front(a, 0)
        rows = tuple(split(len(x), world.ranks))
        choice = matmul_all_reduce.choose(len(x), world, algorithm, chunk_rows, packed)
        if algorithm == "auto" and any(rows):
            choice = explained(world, *matmul_all_reduce.question(rows, x, weights[0], a.dtype, world, chunk_rows), choice)
        where = ""
    own = engine(world)
    for weight in weights:
        own.check_product(a.flatten(0, -2), weight, a.dtype)
    made = f"{own.products}; " if own.products else ""
    return f"{operator} over {world.ranks} ranks: {choice}{where}; {made}b is {'packed' if packed else 'plain'}{choice.candidates}"


def _place(a: Tensor, choice: Choice, world: World) -> str:
    reading = choice.algorithm in ("direct", "pull")
    if world.is_symmetric(a):
        return "a is symmetric and read in place" if reading else "a is symmetric"
    return "a is staged" if reading else "a is sent from where it lies"
