"""Matmul + all-reduce as an operator: ``sum over ranks of a @ b`` on every rank, added up while products are made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from weft.checks import check_timeout
from weft.engines.weights import DTYPES, FLOAT8, PackedWeight, Weight, plain
from weft.ops import arguments, dims, float8, partial_sums
from weft.ops.choice import Choice, Signature, best, check, dtype_name, pieces, preferred
from weft.ops.matmul_reduce_scatter import ADDED_ROWS, FEW_ROWS
from weft.ops.partial_sums import Sums
from weft.schedules import matmul_all_reduce as schedule
from weft.schedules.common import split
from weft.schedules.workload import Variant, Workload
from weft.world import World, current


def matmul_all_reduce(
    a: Tensor,
    b: Weight,
    *,
    op: str = "sum",
    bias: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
    chunk_rows: int | None = None,
    world: World | None = None,
    timeout: float | None = None,
) -> Tensor:
    """Multiply `a` by this rank's `b` and sum over all ranks, collectively; all ranks get equal bits.

    The result is that of `torch.matmul` followed by `torch.distributed.all_reduce` (plus `bias`). Sums are taken as by
    `matmul_reduce_scatter`: in rank order, in float32 (float64 for float64), rounded once.

    Gradients follow Megatron's convention, not that of `torch.distributed.nn` and torch's functional collectives: all ranks are
    taken to compute one and the same loss from the result, so its gradient is already complete on each, and goes to a, b and bias
    without communication. (Torch's sums the gradients of all ranks, which are as many losses: larger by a factor of the number of
    ranks.) So the gradients are those of the same layer on one rank. There are no second derivatives.

    Args:
        a: (…, K), this rank's columns of what is multiplied, at least two dimensions; float16, bfloat16, float32 or float64; any
            strides. K may differ between ranks.
        b: (K, N) of a's dtype, this rank's rows of the weight, any strides, or packed once by `weft.pack`.
        op: ``sum``, or ``avg``: the sum divided by the number of ranks.
        bias: (N,), the same on all ranks; added once, whatever `op` is.
        scale_a: for float8 inputs (float8_e4m3fn or float8_e5m2, both a and b): the scale of a in float32, one for all of it or one
            for each row, (…, 1). Products are those of ``torch._scaled_mm``, in float32; there is no gradient.
        scale_b: the scale of b, one for all of it or one for each column, (1, N).
        out: contiguous (…, N), not overlapping an input.
        out_dtype: a's dtype (default) or float32; for float8 bfloat16 (default), float16 or float32.
        algorithm: ``one_shot`` (every rank adds up everything where the products lie), ``two_shot`` (every rank adds up a part and
            copies the others), ``put`` (the same, with products made in the memory of the rank that adds them up), ``ring`` (sums
            pass from neighbour to neighbour), ``sequential`` (one product, then the sums) or ``auto``; `explain` says what auto
            chooses.
        chunk_rows: rows (of the product as a matrix of N columns) that are added together; sequential makes no use of it.
        world: by default the world made by ``weft.init()``.
        timeout: seconds any wait may take; by default the world's.

    Returns:
        (…, N) of `out_dtype`.

    Raises:
        ValueError, TypeError: bad arguments, before anything is sent.
        MismatchError, PeerLost, PeerTimeout: the ranks do not make the same call, or one is lost or late; the world is closed.
    """
    world = current(world)
    a, (b,) = float8.scaled(a, [b], scale_a, [scale_b], world)
    if arguments.recorded((a, b, bias, out)):
        arguments.check_recorded(a, [b], [bias], out, world)
        options = op, out_dtype, world.name, algorithm, chunk_rows, timeout
        summed: Tensor = torch.ops.weft.matmul_all_reduce(a, plain(b), bias, *options)
        return summed
    with torch.no_grad():
        return multiply_and_reduce(a, b, bias, out, op, out_dtype, algorithm, chunk_rows, world, timeout)


def multiply_and_reduce(
    a: Tensor,
    b: Weight,
    bias: Tensor | None,
    out: Tensor | None,
    op: str,
    out_dtype: torch.dtype | None,
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
    x = dims.to_front(a, 0)
    choice = choose(len(x), world, algorithm, chunk_rows, isinstance(b, PackedWeight))
    rows = tuple(split(len(x), world.ranks))
    result = arguments.result(out, (*a.shape[:-1], b.shape[1]), out_dtype, (a, b, bias), world)
    if algorithm == "auto" and any(rows):
        choice = best(world, *question(rows, x, b, out_dtype, world, chunk_rows), choice, timeout)
    work = Sums(schedule.matmul_all_reduce, rows, choice.way, op)
    partial_sums.add_up(work, x, b, bias, result.view(len(x), b.shape[1]), world, timeout)
    return result


def question(
    rows: tuple[int, ...], x: Tensor, b: Weight, out_dtype: torch.dtype, world: World, chunk_rows: int | None
) -> tuple[Signature, Callable[[], Choice]]:
    """What all ranks know of a call with ``auto``, and how one of them decides; `rows` are the shares that ranks add up."""

    def decide() -> Choice:
        packed = isinstance(b, PackedWeight)
        case = Workload("matmul_all_reduce", rows, x.shape[1], b.shape[1], dtype_name(x.dtype), dtype_name(out_dtype), packed)
        rule = partial(choose, len(x), world, chunk_rows=chunk_rows, packed=packed)
        return preferred(case, rule, world.emulated_link, chunk_rows, world.topology)

    return Signature("matmul_all_reduce", rows, b.shape[1], x.dtype, chunk_rows), decide


def choose(rows: int, world: World, algorithm: str = "auto", chunk_rows: int | None = None, packed: bool = False) -> Choice:
    """The usual way for `rows` rows (of a as a matrix) where b is `packed` or not."""
    check(algorithm, schedule.ALGORITHMS, chunk_rows, ("put",), world)
    why = "as asked for"
    if algorithm == "auto":
        if world.ranks == 1 or not rows:
            algorithm, why = "sequential", "there is nothing to sum"
        elif rows <= FEW_ROWS:
            algorithm, why = "sequential", f"at most {FEW_ROWS} rows: one product that reads b once beats several"
        elif world.multi_host:
            algorithm, why = "two_shot", "each rank adds up a part, to which each host sends its sum of it once"
        elif world.ranks == 2:
            algorithm, why = (
                "one_shot",
                "for two ranks adding everything costs no more than adding half and copying half",
            )
        else:
            algorithm, why = "two_shot", "each rank adds up a part, so the work does not grow with the number of ranks"
    # One_shot waits for all peers once per piece, so few and large ones let a rank be late now and then at no cost.
    few = min(rows, ADDED_ROWS[packed and algorithm == "two_shot"])
    added = -(-rows // (2 * pieces(world))) if world.emulated_link or world.multi_host else few
    chunk = rows if algorithm == "sequential" else chunk_rows or (rows if algorithm == "put" else added)
    return Choice(Variant(algorithm, max(1, chunk)), why)
