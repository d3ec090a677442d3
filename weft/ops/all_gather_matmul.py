"""All-gather + matmul as an operator: ``concatenation of all ranks' a @ b``, computed while the rows arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from weft.checks import check_timeout
from weft.engines import engine
from weft.engines.engine import Geometry
from weft.engines.matmul import multiply
from weft.engines.weights import DTYPES, FLOAT8, PackedWeight, Weight, plain
from weft.ops import arguments, dims, float8
from weft.ops.choice import Choice, Signature, best, check, dtype_name, pieces, preferred
from weft.plan import Plan
from weft.schedules import all_gather as gathering
from weft.schedules import all_gather_matmul as schedule
from weft.schedules.common import Hosts
from weft.schedules.workload import Variant, Workload
from weft.world import World, current

FEW_ROWS = 32  # up to this many rows per rank one product over all rows beats one per rank, which reads b each time

Optionals = Sequence[Tensor | None]


def all_gather_matmul(
    a: Tensor,
    b: Weight | Sequence[Weight],
    *,
    dim: int = 0,
    bias: Tensor | Optionals | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | Optionals | None = None,
    out: Tensor | Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    return_gathered: bool = False,
    shard_rows: Sequence[int] | None = None,
    algorithm: str = "auto",
    chunk_rows: int | None = None,
    world: World | None = None,
    timeout: float | None = None,
) -> Tensor | list[Tensor] | tuple[Tensor | list[Tensor], Tensor]:
    """Gather `a` from all ranks along a dimension and multiply by this rank's `b`, collectively.

    The result is that of `torch.distributed.all_gather_into_tensor` followed by `torch.matmul` (plus `bias`); it does not depend
    on the order in which rows arrive.

    Gradients flow to a, b and bias: that of a is the sum over ranks of their gradients times their b^T, computed by
    `matmul_reduce_scatter`; for those of b the gathered a is kept from forward to backward. A call whose gradient is recorded,
    or that is compiled, multiplies by the plain weight where a packed one is given.

    Args:
        a: this rank's shard; (rows, …, K), of at least two dimensions; float16, bfloat16, float32 or float64; any strides. If it
            is symmetric (`World.empty`), the same tensor on all ranks, peers may read it in place; otherwise it is staged.
        b: (K, N) of a's dtype, any strides, or packed once by `weft.pack`. N may differ between ranks. A list of weights shares
            one gather and gives a list of results.
        dim: the dimension of a that is gathered. For the last one, a split of K, b has as many rows as all ranks' a have columns;
            a is then gathered first and multiplied in one product, without overlap.
        bias: (N,), added to every row; a list where b is one.
        scale_a: for float8 inputs (float8_e4m3fn or float8_e5m2, both a and b): the scale of a in float32, one for all of it or one
            for each row, (…, 1). Products are those of ``torch._scaled_mm``, in float32; there is no gradient.
        scale_b: the scale of b, one for all of it or one for each column, (1, N); a list where b is one.
        out: contiguous, of the shape of the result, not overlapping an input; a list where b is one.
        out_dtype: a's dtype (default) or float32; for float8 bfloat16 (default), float16 or float32.
        return_gathered: also return the gathered a, a tensor of the caller's own.
        shard_rows: the size of the gathered dimension of a on every rank, if they differ; zero is allowed.
        algorithm: ``direct`` (peers' rows are read where they lie), ``pull``, ``push``, ``ring``, ``sequential`` (gather, then one
            product) or ``auto``; `explain` says what auto chooses.
        chunk_rows: rows (of a as a matrix of K columns) per transfer of pull, push and ring; the others make no use of it.
        world: by default the world made by ``weft.init()``.
        timeout: seconds any wait may take; by default the world's.

    Returns:
        a's shape with the gathered dimension of all ranks together and N in place of K, of `out_dtype`; a list of these for a list
        of weights; with `return_gathered` a pair.

    Raises:
        ValueError, TypeError: bad arguments, before anything is sent.
        MismatchError, PeerLost, PeerTimeout: the ranks do not make the same call, or one is lost or late; the world is closed.
    """
    world = current(world)
    several = isinstance(b, list | tuple)
    weights: list[Weight] = [*b] if several else [b]  # type: ignore[list-item, misc]
    biases = _listed(bias, weights, several, "bias")
    outs = _listed(out, weights, several, "out")
    rows, weights = float8.scaled(a, weights, scale_a, _listed(scale_b, weights, several, "scale_b"), world)
    if arguments.recorded([a, *weights, *biases, *outs]):
        arguments.check_recorded(a, weights, biases, out, world)
        plains = [plain(w) for w in weights]
        keep = return_gathered or any(w.requires_grad for w in plains)
        given = [a.new_empty(0) if x is None else x for x in biases] if any(x is not None for x in biases) else []
        options = dim, out_dtype, keep, shard_rows, world.name, algorithm, chunk_rows, timeout
        made = torch.ops.weft.all_gather_matmul(a, plains, given, *options)
        results, gathered = made[: len(weights)], made[-1]
    else:
        with torch.no_grad():
            results, kept = gather_and_multiply(
                rows, weights, biases, outs, dim, out_dtype, return_gathered, shard_rows, algorithm, chunk_rows, world, timeout
            )
        scales = rows.shape[-1] - a.shape[-1]  # columns of float8 rows that are not their own
        gathered = a if kept is None else kept[..., : kept.shape[-1] - scales].contiguous()
    y = results if several else results[0]
    return (y, gathered) if return_gathered else y


def _listed(value: object, weights: Sequence[Weight], several: bool, what: str) -> list[Tensor | None]:
    """What is given for each weight."""
    if not several:
        return [value]  # type: ignore[list-item]
    if value is None:
        return [None] * len(weights)
    if not isinstance(value, list | tuple) or len(value) != len(weights):
        raise ValueError(f"b is a list of {len(weights)} weights, so {what} must be a list of {len(weights)} too")
    return [*value]


def gather_and_multiply(
    a: Tensor,
    weights: Sequence[Weight],
    biases: Optionals,
    outs: Optionals,
    dim: int,
    out_dtype: torch.dtype | None,
    keep: bool,
    shard_rows: Sequence[int] | None,
    algorithm: str,
    chunk_rows: int | None,
    world: World,
    timeout: float | None,
) -> tuple[list[Tensor], Tensor | None]:
    """What the operator does, without gradients: the results, and the gathered a if it is to be kept."""
    arguments.check_matrix(a, world, (*DTYPES, *FLOAT8))
    dim = dims.normal(dim, a.dim())
    split = dim == a.dim() - 1
    shards = arguments.check_shard_rows(a.shape[dim], shard_rows, world)
    if not weights:
        raise ValueError("b is an empty list: give at least one weight")
    for b, bias in zip(weights, biases, strict=True):
        arguments.check_weight(a, b, world, sum(shards) if split else None)
        arguments.check_bias(bias, b.shape[1], world)
    check_timeout(timeout)
    out_dtype = arguments.check_out_dtype(a.dtype, out_dtype)
    inner = 1 if split else dims.inner(a.shape, dim)
    rows = tuple(shard * inner for shard in shards)
    choice = choose(rows, world, algorithm, chunk_rows, split)
    whole = (*a.shape[:dim], sum(shards), *a.shape[dim + 1 :])
    results: list[Tensor] = []
    for out, b in zip(outs, weights, strict=True):
        results.append(arguments.result(out, (*whole[:-1], b.shape[1]), out_dtype, [a, *weights, *biases, *results], world))
    if algorithm == "auto" and not split and any(rows):
        choice = best(world, *question(rows, a, weights, out_dtype, world, chunk_rows), choice, timeout)
    if split:
        columns = _gather_columns(a, rows, choice, world, timeout)
        for result, b, bias in zip(results, weights, biases, strict=True):
            multiply(columns, b, result.view(len(columns), b.shape[1]), bias)
        return results, columns.view(whole) if keep else None
    names = schedule.outputs(len(weights))
    fronts = [result if dim == 0 else result.new_empty(dims.front_shape(result.shape, dim)) for result in results]
    tensors = {"a": dims.to_front(a, dim)}
    tensors |= {name: front.view(sum(rows), front.shape[-1]) for name, front in zip(names, fronts, strict=True)}
    gathered = a.new_empty(dims.front_shape(whole, dim)) if keep else None
    if gathered is not None:
        tensors["gathered"] = gathered.view(sum(rows), a.shape[-1])
    geometry = Geometry.of(tensors["a"], world)
    key = "all_gather_matmul", choice.way, rows, geometry, out_dtype, tuple(b.shape[1] for b in weights), keep
    plan = plan_for(rows, choice.way, world.is_symmetric(tensors["a"]), keep, len(weights), world.topology)
    program = engine(world).program(key, plan, tensors)
    added = {name: bias for name, bias in zip(names, biases, strict=True) if bias is not None}
    program.run(tensors, dict(zip(names, weights, strict=True)), added, timeout)
    for front, result in zip(fronts, results, strict=True):
        dims.back(front, dim, result)
    if gathered is not None and dim:
        gathered = gathered.movedim(0, dim).contiguous()
    return results, gathered


def _gather_columns(a: Tensor, columns: tuple[int, ...], choice: Choice, world: World, timeout: float | None) -> Tensor:
    """All ranks' `a` side by side, as a matrix; what is moved are its columns."""
    own = a.flatten(0, -2).t().contiguous()
    gathered = own.new_empty(sum(columns), own.shape[1])
    tensors = {"a": own, "gathered": gathered}
    key = "all_gather_columns", choice.way, columns, own.dtype, own.shape[1]
    plan = columns_plan_for(columns, choice.way, world.topology)
    engine(world).program(key, plan, tensors).run(tensors, {}, timeout=timeout)
    return gathered.t().contiguous()


def question(
    rows: tuple[int, ...], a: Tensor, weights: Sequence[Weight], out_dtype: torch.dtype, world: World, chunk_rows: int | None
) -> tuple[Signature, Callable[[], Choice]]:
    """What all ranks know of a call with ``auto``, and how one of them decides. Several weights are as one as wide as all."""

    def decide() -> Choice:
        columns, packed = sum(b.shape[1] for b in weights), all(isinstance(b, PackedWeight) for b in weights)
        dtypes = dtype_name(a.dtype), dtype_name(out_dtype)
        case = Workload("all_gather_matmul", rows, a.shape[-1], columns, *dtypes, packed, world.is_symmetric(a))
        rule = partial(choose, rows, world, chunk_rows=chunk_rows)
        return preferred(case, rule, world.emulated_link, chunk_rows, world.topology)

    return Signature("all_gather_matmul", rows, a.shape[-1], a.dtype, chunk_rows), decide


def choose(
    rows: Sequence[int], world: World, algorithm: str = "auto", chunk_rows: int | None = None, split: bool = False
) -> Choice:
    """The usual way for shards of `rows[rank]` rows (of a as a matrix), or of as many columns if K is `split`."""
    check(algorithm, schedule.ALGORITHMS, chunk_rows, ("direct",), world)
    largest = max(rows)
    why = "as asked for"
    if split:
        reading = "push" if world.multi_host else "pull"
        algorithm = {"auto": reading, "direct": "pull", "sequential": "push"}.get(algorithm, algorithm)
        why = "the last dimension is gathered, a split of K: no product can begin before all columns are there"
    elif algorithm == "auto":
        if world.ranks == 1 or not any(rows):
            algorithm, why = "sequential", "there is nothing to gather"
        elif world.emulated_link:
            algorithm, why = "push", "the emulated link is slower than memory, so rows are moved while others are multiplied"
        elif largest <= FEW_ROWS:
            algorithm, why = "sequential", f"at most {FEW_ROWS} rows per rank: one product that reads b once beats one per rank"
        elif world.multi_host:
            algorithm, why = "push", "rows cross to each other host once, and are multiplied as they arrive"
        else:
            algorithm, why = "direct", "peers' rows can be read where they lie at the speed of own memory"
    whole = algorithm in ("direct", "sequential")
    chunk = largest if whole else chunk_rows or -(-largest // pieces(world))
    return Choice(Variant(algorithm, max(1, chunk)), why)


@lru_cache(maxsize=1024)
def plan_for(
    rows: tuple[int, ...], way: Variant, symmetric_a: bool, gathered: bool, weights: int = 1, hosts: Hosts | None = None
) -> Plan:
    """The plan of a call."""
    return schedule.all_gather_matmul(
        rows,
        way.algorithm,
        chunk_rows=way.chunk_rows,
        order=way.order,
        symmetric_a=symmetric_a,
        gathered=gathered,
        weights=weights,
        hosts=hosts,
    )


@lru_cache(maxsize=1024)
def columns_plan_for(columns: tuple[int, ...], way: Variant, hosts: Hosts | None = None) -> Plan:
    """The plan of a gather of columns."""
    return gathering.all_gather(columns, way.algorithm, chunk_rows=way.chunk_rows, hosts=hosts)
