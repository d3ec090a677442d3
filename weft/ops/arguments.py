"""Checks of arguments that operators share. Their errors state the argument and a remedy, and are
raised before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import weft.checks as checks
from weft.checks import name, overlap
from weft.engines import engine
from weft.kernels import compression
from weft.kernels.weights import DTYPES, FLOAT8, PreparedWeight, Weight, source
from weft.ops.options import Options, check_types
from weft.plan.language import COMPRESSIONS
from weft.schedules.workload import ORDERS, Collective, Operator
from weft.world import World, memory

FACTORS = (*DTYPES, *FLOAT8)
"""The dtypes of factors of products."""


def check_place(tensor: Tensor, argument: str, world: World, traced: bool = False) -> None:
    """Raise an error unless `tensor` is a plain tensor on the world's device, and outside another
    world's symmetric memory.
    """
    checks.check_tensor(tensor, argument, traced)
    if tensor.device != world.device:
        remedy = "one with data" if tensor.is_meta else f"{argument}.to({str(world.device)!r})"
        raise ValueError(
            f"{argument} is on {tensor.device}; this world's ranks work on {world.device}: pass "
            f"{remedy}"
        )
    segment = None if traced else memory.find(tensor)
    if segment is not None and segment.world != world.number:
        raise ValueError(
            f"{argument} is symmetric in another world; pass a plain tensor or one made by this "
            "world's empty(...)"
        )


def check_input(
    tensor: Tensor,
    argument: str,
    world: World,
    dtypes: Sequence[torch.dtype] = DTYPES,
    traced: bool = False,
) -> None:
    """Raise an error unless `tensor` passes `check_place` and has a supported dtype."""
    check_place(tensor, argument, world, traced)
    if tensor.dtype not in dtypes:
        if len(dtypes) == 1:
            raise TypeError(f"{argument} must have dtype {name(*dtypes)}; got {name(tensor.dtype)}")
        raise TypeError(
            f"{argument} has dtype {name(tensor.dtype)}; supported are "
            f"{', '.join(map(name, dtypes))}"
        )


def check_weight(a: Tensor, b: Weight, world: World, k: int | None = None) -> None:
    """Raise an error unless `b` is (K, N) of a's dtype; K is the columns of a, or `k` if a is a
    part of the factor.
    """
    k = a.shape[-1] if k is None else k
    if isinstance(b, PreparedWeight):
        b.check(k)
    else:
        check_input(b, "b", world)
    if len(b.shape) != 2:
        raise ValueError(f"b must be a matrix (K, N); got shape {tuple(b.shape)}")
    if k != b.shape[0]:
        turned = "weft.pack(b.t())" if isinstance(b, PreparedWeight) and b.packed else "b.t()"
        raise ValueError(
            f"a has {k} columns and b {b.shape[0]} rows; these inner dimensions must be equal"
            + (f": pass {turned} if b is (N, K), as nn.Linear.weight is" if k == b.shape[1] else "")
        )
    if a.dtype != b.dtype:
        converted = "b.to(a.dtype)" if isinstance(b, Tensor) else f"a.to({b.dtype})"
        raise TypeError(
            f"a is {name(a.dtype)} and b {name(b.dtype)}; they must have one dtype: pass "
            f"{converted}"
        )


def check_out_dtype(dtype: torch.dtype, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the result: the input's, or float32; for float8 bfloat16, or any other."""
    if out_dtype is not None:
        checks.check_dtype(out_dtype, "out_dtype")
    if dtype in FLOAT8:
        if out_dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
            raise TypeError(
                f"out_dtype must be bfloat16, float16 or float32 for {name(dtype)}; got {out_dtype}"
            )
        return out_dtype or torch.bfloat16
    if out_dtype not in (None, dtype, torch.float32) or (
        dtype == torch.float64 and out_dtype == torch.float32
    ):
        one = dtype in (torch.float32, torch.float64)
        raise TypeError(
            f"out_dtype must be {name(dtype)}{'' if one else ' or float32'}; got {out_dtype}"
        )
    return out_dtype or dtype


def as_key(sizes: Any) -> Any:
    """A list of sizes as a tuple, which the call cache can keep; anything else unchanged, which
    `integers` rejects.
    """
    # a list first: the compiler may not know whether other types have a method
    if isinstance(sizes, (list, tuple)):
        return tuple(sizes)
    try:
        return tuple(sizes) if hasattr(sizes, "__iter__") else sizes
    except TypeError:  # such as a tensor without dimensions
        return sizes


def check_parts(rows: int, shard_rows: Sequence[int] | None, world: World) -> list[int]:
    """How many of `rows` rows each rank keeps."""
    if shard_rows is None:
        if rows % world.ranks:
            raise ValueError(
                f"{rows} rows do not divide evenly over {world.ranks} ranks: give shard_rows, the "
                "rows of each"
            )
        return [rows // world.ranks] * world.ranks
    counts = checks.integers(shard_rows, "shard_rows")
    if len(counts) != world.ranks or min(counts) < 0 or sum(counts) != rows:
        raise ValueError(
            f"shard_rows must be {world.ranks} counts, none negative, of {rows} in all; got "
            f"{counts}"
        )
    return counts


def check_shard_rows(rows: int, shard_rows: Sequence[int] | None, world: World) -> list[int]:
    """The number of rows of every rank."""
    if shard_rows is None:
        return [rows] * world.ranks
    counts = checks.integers(shard_rows, "shard_rows")
    if len(counts) != world.ranks or min(counts) < 0:
        raise ValueError(
            f"shard_rows must be {world.ranks} counts, one per rank, none negative; got {counts}"
        )
    if counts[world.rank] != rows:
        raise ValueError(
            f"shard_rows gives rank {world.rank} {counts[world.rank]} rows, but its input has "
            f"{rows}"
        )
    return counts


def check_experts_of_ranks(numbers: Sequence[int], world: World) -> tuple[int, ...]:
    """The number of experts of every rank."""
    found = tuple(checks.integers(numbers, "experts_of_ranks"))
    if len(found) != world.ranks or min(found) < 0:
        raise ValueError(
            f"experts_of_ranks must be {world.ranks} numbers, one for each rank, none negative; "
            f"got {[*found]}"
        )
    return found


def check_chunk_rows(chunk_rows: int | None) -> None:
    """Raise an error unless it is None or an integer of at least 1."""
    if chunk_rows is None:
        return
    number = checks.integer(chunk_rows, "chunk_rows must be an integer")
    if number <= 0:
        raise ValueError(f"chunk_rows must be at least 1; got {chunk_rows}")
    checks.check_size(number, "chunk_rows")


def check_order(order: str | None, algorithm: str, operator: Operator) -> None:
    """Raise `ValueError` for an unknown order, or one that the algorithm lacks."""
    if order is None:
        return
    if order not in ORDERS:
        raise ValueError(f"there is no order {order!r}; choose {' or '.join(ORDERS)}")
    if algorithm not in operator.ordered:
        needed = " or ".join(f"algorithm={name!r}" for name in operator.ordered)
        why = f"use {needed}" if needed else f"{operator.name} has no algorithm with orders"
        raise ValueError(f"{algorithm} has no order {order!r}: {why}, or omit order")


def check_compress(compress: str | None, dtype: str) -> None:
    """Raise `ValueError` for an unknown compression, `TypeError` for a dtype that it does not
    support.
    """
    if compress is None:
        return
    if compress not in COMPRESSIONS:
        raise ValueError(f"there is no compression {compress!r}; choose {', '.join(COMPRESSIONS)}")
    compression.check_dtype(getattr(torch, dtype))


def check_algorithm(algorithm: str, operator: Operator | Collective, world: World) -> None:
    """Raise `ValueError` unless it is ``auto`` or an algorithm of the operator that the engine
    has.
    """
    own = engine(world)
    shared_memory_only = {} if own.shared_memory else operator.shared_memory_only
    known = algorithm in (*operator.algorithms, "auto")
    if known and algorithm not in shared_memory_only:
        return
    launched = () if own.launches or isinstance(operator, Operator) else operator.launched
    others = ", ".join(
        name for name in operator.algorithms if name not in (*shared_memory_only, *launched)
    )
    if not known:
        raise ValueError(
            f"there is no algorithm {algorithm!r}; choose auto or one of {others}"
            f"{checks.suggestion(algorithm, (*operator.algorithms, 'auto'))}"
        )
    raise ValueError(
        f"{algorithm} is not possible in this world: {shared_memory_only[algorithm]}; choose "
        f"{others}"
    )


def check_matrix(a: Tensor, world: World, dtypes: Sequence[torch.dtype] = FACTORS) -> None:
    """Rows to multiply: an input of at least two dimensions."""
    check_input(a, "a", world, dtypes)
    if a.dim() < 2:
        raise ValueError(
            f"a must have at least 2 dimensions, (rows, …, K); got shape {tuple(a.shape)}: pass "
            "a.view(1, -1) for one row"
        )


def check_bias(bias: Tensor | None, columns: int, world: World) -> None:
    """Raise an error unless `bias` is None or has the shape (`columns`,)."""
    if bias is not None:
        check_input(bias, "bias", world)
        if bias.shape != (columns,):
            raise ValueError(f"bias must have shape ({columns},); got {tuple(bias.shape)}")


def listed(
    value: object, weights: Sequence[Weight], several: bool, argument: str
) -> list[Tensor | None]:
    """An optional operand of each weight."""
    if not several:
        return [value]  # type: ignore[list-item]
    if value is None:
        return [None] * len(weights)
    if not isinstance(value, (list, tuple)) or len(value) != len(weights):
        raise ValueError(
            f"b is a list of {len(weights)} weights, so {argument} must be a list "
            f"of {len(weights)} too"
        )
    return [*value]


def result(
    out: Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    inputs: Sequence[Weight | None],
    world: World,
    in_place: Callable[[Tensor], bool] = lambda out: False,
    strided: bool = False,
) -> Tensor:
    """`out` if it fits, else a new tensor. It may overlap an input only where the call is made
    `in_place`. Its rows may have distances between them if `strided`.
    """
    if out is None:
        return torch.empty(shape, dtype=dtype, device=world.device)
    check_input(out, "out", world, (dtype,))
    if out.shape != torch.Size(shape):
        raise ValueError(f"out must have shape {tuple(shape)}; got {tuple(out.shape)}")
    if not (out.is_contiguous() or (strided and _distant_rows(out))):
        raise ValueError(
            f"out must be contiguous, as torch.empty{tuple(shape)} is; got strides {out.stride()}"
        )
    if any(overlap(out, tensor) for each in inputs for tensor in _read(each)) and not in_place(out):
        raise ValueError("out must not overlap an input or another out: pass separate memory")
    if out.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "out requires a gradient, but none is recorded: pass out.detach(), or call under "
            "torch.no_grad()"
        )
    return out


def _distant_rows(tensor: Tensor) -> bool:
    """Whether each row of a tensor is contiguous, and none overlaps the next."""
    row = tensor[0]
    return row.is_contiguous() and tensor.stride(0) >= row.numel()


def _read(operand: Weight | None) -> Sequence[Tensor]:
    """The tensors that an input is read from."""
    if operand is None:
        return ()
    return operand.tensors if isinstance(operand, PreparedWeight) else (operand,)


def recorded(tensors: Sequence[object]) -> bool:
    """Whether a call is to be traced by torch, for gradients or by the compiler."""
    if torch.compiler.is_compiling() or checks.tracing_modes():
        return True
    if any(isinstance(tensor, Tensor) and checks.transforms(tensor) for tensor in tensors):
        return True
    return torch.is_grad_enabled() and any(
        isinstance(tensor, (Tensor, PreparedWeight)) and tensor.requires_grad for tensor in tensors
    )


def check_recorded(
    a: Tensor,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None],
    out: object,
    options: Options,
    world: World,
) -> None:
    """Check the operands of a call that torch records, and the types of its options, for which
    torch's errors would name positions in a schema; its results are new tensors.
    """
    if not torch.compiler.is_compiling():
        check_types(options)
        check_chunk_rows(options.chunk_rows)
        check_input(a, "a", world, FACTORS, traced=True)
        if not weights:
            raise ValueError("b is an empty list: give at least one weight")
        for b in weights:
            if not isinstance(b, PreparedWeight):
                check_input(b, "b", world, FACTORS, traced=True)
        for bias in biases:
            if bias is not None:
                check_input(bias, "bias", world, traced=True)
    if out is not None:
        if torch.compiler.is_compiling():
            raise ValueError("out= cannot be recorded under torch.compile: leave it out")
        raise ValueError(
            "out= cannot be recorded for a gradient, which a tensor of this call requires: leave "
            "it out, or call under torch.no_grad()"
        )
    for b in weights:
        source(b)
