"""Matmul + reduce-scatter as an operator: this rank's part of ``sum over ranks of a @ b``, added up while products are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from weft.checks import check_timeout
from weft.engines.weights import DTYPES, FLOAT8, PackedWeight, ScaledWeight, Weight, plain
from weft.ops import arguments, dims, float8, partial_sums
from weft.ops.choice import Choice, Signature, best, check, dtype_name, pieces, preferred
from weft.ops.partial_sums import Sums
from weft.schedules import matmul_reduce_scatter as schedule
from weft.schedules.workload import Variant, Workload
from weft.world import World, current

FEW_ROWS = 32  # up to this many rows one product beats one for each rank, which reads b each time
ADDED_ROWS = {True: 256, False: 1024}  # whether b is packed: rows still in the cache when they are added up; or worth packing b for


def matmul_reduce_scatter(
    a: Tensor,
    b: Weight,
    *,
    op: str = "sum",
    dim: int = 0,
    bias: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    shard_rows: Sequence[int] | None = None,
    algorithm: str = "auto",
    chunk_rows: int | None = None,
    world: World | None = None,
    timeout: float | None = None,
) -> Tensor:
    """Multiply `a` by this rank's `b`, sum over all ranks and keep this rank's part along a dimension, collectively.

    The result is that of `torch.matmul` followed by `torch.distributed.reduce_scatter_tensor` (plus `bias`). Products are summed
    in rank order in float32 (float64 for float64) and rounded once, by every algorithm: same inputs, same bits. The products
    themselves are in float32, except that those of bfloat16 for a bfloat16 result come in bfloat16, as `torch.mm` gives them.

    Gradients flow to a, b and bias. Those of a and b share one gather of the result's gradient, by `all_gather_matmul`; that of
    bias is complete on every rank.

    Args:
        a: (…, K), this rank's columns of what is multiplied, at least two dimensions; float16, bfloat16, float32 or float64; any
            strides. K may differ between ranks.
        b: (K, N) of a's dtype, this rank's rows of the weight, any strides, or packed once by `weft.pack`.
        op: ``sum``, or ``avg``: the sum divided by the number of ranks.
        dim: the dimension of the product (…, N) that is scattered. For the last one the transposed product is computed and
            scattered by rows, and the plain weight is used.
        bias: (N,), the same on all ranks; added once, whatever `op` is.
        scale_a: for float8 inputs (float8_e4m3fn or float8_e5m2, both a and b): the scale of a in float32, one for all of it or one
            for each row, (…, 1). Products are those of ``torch._scaled_mm``, in float32; there is no gradient.
        scale_b: the scale of b, one for all of it or one for each column, (1, N).
        out: contiguous, of the shape of the result, not overlapping an input.
        out_dtype: a's dtype (default) or float32; for float8 bfloat16 (default), float16 or float32.
        shard_rows: the size of the scattered dimension that each rank keeps; zero is allowed. Without it the dimension must
            divide evenly, as `torch.distributed.reduce_scatter_tensor` demands.
        algorithm: ``direct`` (peers' products are added where they lie), ``push`` (they are copied to the rank that keeps them),
            ``put`` (they are made in its memory), ``ring`` (running sums pass from neighbour to neighbour), ``sequential`` (one
            product, then the sums) or ``auto``; `explain` says what auto chooses.
        chunk_rows: rows (of the product as a matrix of N columns) that are added, or sent, together; sequential makes no use of it.
        world: by default the world made by ``weft.init()``.
        timeout: seconds any wait may take; by default the world's.

    Returns:
        (…, N) with this rank's part of the scattered dimension, of `out_dtype`.

    Raises:
        ValueError, TypeError: bad arguments, before anything is sent.
        MismatchError, PeerLost, PeerTimeout: the ranks do not make the same call, or one is lost or late; the world is closed.
    """
    world = current(world)
    a, (b,) = float8.scaled(a, [b], scale_a, [scale_b], world)
    if arguments.recorded((a, b, bias, out)):
        arguments.check_recorded(a, [b], [bias], out, world)
        options = op, dim, out_dtype, shard_rows, world.name, algorithm, chunk_rows, timeout
        scattered: Tensor = torch.ops.weft.matmul_reduce_scatter(a, plain(b), bias, *options)
        return scattered
    with torch.no_grad():
        return multiply_and_scatter(a, b, bias, out, op, dim, out_dtype, shard_rows, algorithm, chunk_rows, world, timeout)


def multiply_and_scatter(
    a: Tensor,
    b: Weight,
    bias: Tensor | None,
    out: Tensor | None,
    op: str,
    dim: int,
    out_dtype: torch.dtype | None,
    shard_rows: Sequence[int] | None,
    algorithm: str,
    chunk_rows: int | None,
    world: World,
    timeout: float | None,
) -> Tensor:
    """What the operator does, without gradients."""
    arguments.check_matrix(a, world, (*DTYPES, *FLOAT8))
    arguments.check_weight(a, b, world)
    arguments.check_bias(bias, b.shape[1], world)
    arguments.check_op(op)
    check_timeout(timeout)
    out_dtype = arguments.check_out_dtype(a.dtype, out_dtype)
    dim = dims.normal(dim, a.dim())
    whole = (*a.shape[:-1], b.shape[1])
    parts = arguments.check_parts(whole[dim], shard_rows, world)
    transposed = dim == a.dim() - 1
    if transposed and isinstance(b, ScaledWeight):
        raise ValueError("products of float8 cannot be scattered along their last dimension: choose another dim")
    inner = 1 if transposed else dims.inner(a.shape, dim)
    rows = tuple(part * inner for part in parts)
    kept = rows[world.rank]
    choice = choose(rows, world, algorithm, chunk_rows, isinstance(b, PackedWeight) and not transposed)
    shape = (*whole[:dim], parts[world.rank], *whole[dim + 1 :])
    result = arguments.result(out, shape, out_dtype, (a, b, bias), world)
    if algorithm == "auto" and any(rows):
        choice = best(world, *question(rows, a, b, out_dtype, world, chunk_rows, transposed), choice, timeout)
    if transposed:
        matrix = dims.to_front(a, 0)
        columns = matrix.new_empty(kept, len(matrix), dtype=out_dtype if bias is None else partial_sums.accumulator(out_dtype))
        work = Sums(schedule.matmul_reduce_scatter, rows, choice.way, op)
        partial_sums.add_up(work, dims.to_front(plain(b).t(), 0), matrix.t(), None, columns, world, timeout)
        own = sum(rows[: world.rank])
        return result.copy_((columns if bias is None else columns + bias[own : own + kept, None]).t().reshape(shape))
    front = result if dim == 0 else result.new_empty(dims.front_shape(shape, dim))
    work = Sums(schedule.matmul_reduce_scatter, rows, choice.way, op)
    partial_sums.add_up(work, dims.to_front(a, dim), b, bias, front.view(kept, b.shape[1]), world, timeout)
    return dims.back(front, dim, result)


def question(
    rows: tuple[int, ...],
    a: Tensor,
    b: Weight,
    out_dtype: torch.dtype,
    world: World,
    chunk_rows: int | None,
    transposed: bool = False,
) -> tuple[Signature, Callable[[], Choice]]:
    """What all ranks know of a call with ``auto``, and how one of them decides."""
    columns, packed = (len(dims.to_front(a, 0)), False) if transposed else (b.shape[1], isinstance(b, PackedWeight))

    def decide() -> Choice:
        case = Workload("matmul_reduce_scatter", rows, a.shape[-1], columns, dtype_name(a.dtype), dtype_name(out_dtype), packed)
        rule = partial(choose, rows, world, chunk_rows=chunk_rows, packed=packed)
        return preferred(case, rule, world.emulated_link, chunk_rows, world.topology)

    return Signature("matmul_reduce_scatter", rows, columns, a.dtype, chunk_rows), decide


def choose(
    rows: Sequence[int], world: World, algorithm: str = "auto", chunk_rows: int | None = None, packed: bool = False
) -> Choice:
    """The usual way where rank r keeps `rows[r]` rows (of the product as a matrix) and b is `packed` or not."""
    check(algorithm, schedule.ALGORITHMS, chunk_rows, ("direct", "put"), world)
    why = "as asked for"
    if algorithm == "auto":
        if world.ranks == 1 or not any(rows):
            algorithm, why = "sequential", "there is nothing to scatter"
        elif world.multi_host and sum(rows) > FEW_ROWS:
            algorithm, why = "push", "each host adds up its products and puts them to the others while more are made"
        elif world.emulated_link:
            algorithm, why = "push", "the emulated link is slower than memory, so products are moved while others are made"
        elif sum(rows) <= FEW_ROWS:
            algorithm, why = "sequential", f"at most {FEW_ROWS} rows: one product that reads b once beats one per rank"
        else:
            algorithm, why = "direct", "peers' products can be added where they lie at the speed of own memory"
    largest = max(rows)
    usual = {"direct": min(largest, ADDED_ROWS[packed]), "put": largest}.get(algorithm, -(-largest // pieces(world)))
    chunk = chunk_rows or usual
    return Choice(Variant(algorithm, max(1, largest if algorithm == "sequential" else chunk)), why)
