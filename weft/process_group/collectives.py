"""The collectives of torch.distributed, synchronous, by operators of weft.

Tensors may have any strides, any dtype, gradients, and no elements. Tensors that weft supports are
passed on directly, so that its call cache works; others by a view or a copy. Plans are of elements,
one after another, since shapes and strides may differ between ranks. Dtypes that weft does
not support are moved as integers of their size; complex numbers are added as pairs. Reductions that
weft does not support (products, bits, other dtypes) are gathered, and computed by the ranks that
need the result, in rank order.

`timeout` is in seconds, None for the world's. An `op` is a `dist.ReduceOp`, or a member of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.checks import name, overlap
from weft.kernels.weights import DTYPES as FLOATS
from weft.kernels.weights import FLOAT8
from weft.ops import collective, split_sizes
from weft.ops.all_gather import all_gather as weft_all_gather
from weft.ops.all_gather import check as check_all_gather
from weft.ops.all_reduce import all_reduce as weft_all_reduce
from weft.ops.all_to_all import all_to_all as weft_all_to_all
from weft.ops.all_to_all import check as check_all_to_all
from weft.ops.barrier import barrier  # noqa: F401  (by its name, like the others)
from weft.ops.broadcast import broadcast as weft_broadcast
from weft.ops.collective import ANY, NUMBERS, CollectiveCall, same_place
from weft.ops.reduce_scatter import check as check_reduce_scatter
from weft.schedules.exchanges import Counts, Direction
from weft.world import World

# a table, since the name of an op takes 5 us
_KINDS = {hash(op): name.lower() for name, op in dist.ReduceOp.RedOpType.__members__.items()}
_SUPPORTED = {"sum": {*NUMBERS}, "max": {*NUMBERS}, "min": {*NUMBERS}, "avg": {*FLOATS}}
"""The dtypes of weft's own reductions."""

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ON_BOOLEANS = {
    "sum": "max",
    "max": "max",
    "bor": "max",
    "product": "min",
    "min": "min",
    "band": "min",
}

_COMBINE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(0, dtype=rows.dtype),
    "avg": lambda rows: _integer_mean(rows) if rows.dtype in _INTEGERS else rows.mean(0),
    "product": lambda rows: rows.prod(0, dtype=rows.dtype),
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
    "band": lambda rows: functools.reduce(torch.bitwise_and, rows.unbind()),
    "bor": lambda rows: functools.reduce(torch.bitwise_or, rows.unbind()),
    "bxor": lambda rows: functools.reduce(torch.bitwise_xor, rows.unbind()),
}
"""Reductions of gathered rows, one from each rank."""


def all_reduce(world: World, tensor: Tensor, op: Any, timeout: float | None = None) -> None:
    """Overwrite `tensor` with the reduction of all ranks'."""
    kind, here, reducible = _operand(tensor, op)
    if reducible:
        weft_all_reduce(here, op=kind, out=here, world=world, timeout=timeout)
    else:
        here = _combined(_gathered(world, here, timeout).view(world.ranks, -1), kind)
    _put(here, tensor)


def all_reduce_sparse(world: World, tensor: Tensor, op: Any, timeout: float | None = None) -> None:
    """Overwrite a sparse tensor, of one shape on all ranks, with the coalesced sum of all ranks'.

    The indices and values of all ranks are gathered and added in rank order, so the elements have
    the same bits on all ranks.
    """
    if (kind := _kind(op)) != "sum":
        raise ValueError(f"all_reduce of sparse tensors can only add; got {kind}")
    own = tensor.coalesce()
    shape = [own.sparse_dim(), *own.shape]
    described = torch.tensor([own._nnz(), len(shape), *shape], device="cpu")
    found = _gathered(world, described, timeout).view(world.ranks, -1).tolist()
    for peer, (_, *theirs) in enumerate(found):
        if theirs != [len(shape), *shape]:
            raise ValueError(
                f"the sparse tensors must have one shape on all ranks: that of rank {world.rank} "
                f"has {shape[0]} sparse dimensions of {shape[1:]}, and that of rank {peer} "
                f"{theirs[1]} of {theirs[2:]}"
            )
    counts = [nnz for nnz, *_ in found]
    indices, values = (
        _gathered(world, part, timeout, [nnz * math.prod(part.shape[1:]) for nnz in counts]).view(
            sum(counts), *part.shape[1:]
        )
        for part in (own.indices().t(), own.values())
    )
    total = torch.sparse_coo_tensor(indices.t(), values, own.shape).coalesce()
    tensor.copy_(total)


def reduce(world: World, tensor: Tensor, op: Any, root: int, timeout: float | None = None) -> None:
    """Overwrite `tensor` of rank `root` with the reduction of all ranks'; others do not change."""
    _check_root(root, world)
    parts = [tensor.numel() if rank == root else 0 for rank in range(world.ranks)]
    out = tensor if world.rank == root else tensor.detach().new_empty(0)
    _reduce_scatter(world, out, tensor, parts, op, timeout)


def broadcast(world: World, tensor: Tensor, root: int, timeout: float | None = None) -> None:
    """Overwrite `tensor` with that of rank `root`."""
    _check_root(root, world)
    here = _movable(tensor)
    weft_broadcast(here, root, world=world, timeout=timeout)
    if world.rank != root:
        _put(here, tensor)


def all_gather_single(
    world: World, out: Tensor, tensor: Tensor, timeout: float | None = None
) -> None:
    """Gather the tensors of all ranks in `out`, one after another."""
    _check_dtypes(out, tensor)
    if out.numel() != tensor.numel() * world.ranks:
        raise ValueError(
            f"the output must have {world.ranks} times the {tensor.numel()} elements of the input; "
            f"got {out.numel()}"
        )
    target = _movable(out)
    collective.run(_check_all_gather, _movable(tensor), target, (), world, timeout)
    _put(target, out)


def _check_all_gather(world: World, a: Tensor, out: Tensor) -> CollectiveCall:
    own, whole = a.view(-1), out.view(-1)
    part = whole.narrow(0, world.rank * len(own), len(own))
    own = _without_overlap(own, whole, same_place(own, part))
    return check_all_gather(world, own, whole, 0, None, "auto", None, None)


def all_gather(
    world: World, outs: Sequence[Tensor], tensor: Tensor, timeout: float | None = None
) -> None:
    """Gather the tensor of rank p in ``outs[p]``; they may differ in size."""
    _check_dtypes(*outs, tensor)
    _check_count(outs, world)
    if outs[world.rank].numel() != tensor.numel():
        raise ValueError(
            f"the input has {tensor.numel()} elements, but its output on rank {world.rank} has "
            f"{outs[world.rank].numel()}"
        )
    _put_parts(_gathered(world, tensor, timeout, [out.numel() for out in outs]), outs)


def reduce_scatter_single(
    world: World, out: Tensor, tensor: Tensor, op: Any, timeout: float | None = None
) -> None:
    """Reduce all ranks' `tensor`, of one even part for each rank, and put this rank's part in
    `out`.
    """
    _check_dtypes(out, tensor)
    if tensor.numel() != out.numel() * world.ranks:
        raise ValueError(
            f"the input must have {world.ranks} times the {out.numel()} elements of the output; "
            f"got {tensor.numel()}"
        )
    _reduce_scatter(world, out, tensor, None, op, timeout)


def _check_reduce_scatter(
    world: World, a: Tensor, out: Tensor, op: str, shard_rows: tuple[int, ...] | None
) -> CollectiveCall:
    whole, own = a.view(-1), out.view(-1).view(a.dtype)  # booleans are reduced as integers
    start = world.rank * len(own) if shard_rows is None else sum(shard_rows[: world.rank])
    part = whole.narrow(0, start, len(own))
    whole = _without_overlap(whole, own, same_place(own, part))
    return check_reduce_scatter(world, whole, own, op, 0, shard_rows, "auto")


def reduce_scatter(
    world: World, out: Tensor, tensors: Sequence[Tensor], op: Any, timeout: float | None = None
) -> None:
    """Reduce all ranks' ``tensors[p]`` to `out` of rank p; they may differ in size."""
    _check_dtypes(out, *tensors)
    _check_count(tensors, world)
    if tensors[world.rank].numel() != out.numel():
        raise ValueError(
            f"the output has {out.numel()} elements, but its input on rank {world.rank} has "
            f"{tensors[world.rank].numel()}"
        )
    _reduce_scatter(
        world, out, _joined(tensors), [tensor.numel() for tensor in tensors], op, timeout
    )


def all_to_all_single(
    world: World,
    out: Tensor,
    tensor: Tensor,
    output_sizes: Sequence[int],
    input_sizes: Sequence[int],
    timeout: float | None = None,
) -> None:
    """Send part p of the first dimension of `tensor` to rank p, and receive its part in `out`. The
    sizes are the rows of each part; even parts if empty.
    """
    _check_dtypes(out, tensor)
    _check_split(tensor, input_sizes, "input", world)
    _check_split(out, output_sizes, "output", world)
    source, target = _movable(tensor), _movable(out)
    counts, run = None, collective.run
    if input_sizes or output_sizes:
        sent, received = (
            _in_elements(full, sizes, world)
            for full, sizes in ((source, input_sizes), (target, output_sizes))
        )
        found = split_sizes.exchange(
            world, "all_to_all", Direction.plain(world.ranks), sent, received, "elements", timeout
        )
        counts, run = found.counts, collective.run if found.again else collective.run_once
    run(_check_all_to_all, source, target, (counts,), world, timeout)
    _put(target, out)


def _check_root(root: int, world: World) -> None:
    """Raise `ValueError` unless `root` is one of a group's ranks."""
    if not 0 <= root < world.ranks:
        raise ValueError(f"there is no rank {root} in a group of {world.ranks}")


def _in_elements(full: Tensor, sizes: Sequence[int], world: World) -> tuple[int, ...]:
    """The elements of each part of `full`, of which `sizes` are the rows; even parts if empty."""
    if not sizes:
        return (full.numel() // world.ranks,) * world.ranks
    return tuple(size * math.prod(full.shape[1:]) for size in sizes)


def _check_all_to_all(
    world: World, a: Tensor, out: Tensor, counts: Counts | None
) -> CollectiveCall:
    sent, received = a.view(-1), out.view(-1)
    return check_all_to_all(world, _without_overlap(sent, received), received, counts)


def all_to_all(
    world: World, outs: Sequence[Tensor], tensors: Sequence[Tensor], timeout: float | None = None
) -> None:
    """Send ``tensors[p]`` to rank p, and receive its tensor in ``outs[p]``; sizes may differ."""
    _check_dtypes(*outs, *tensors)
    _check_count(tensors, world)
    _check_count(outs, world)
    sent, received = ([tensor.numel() for tensor in each] for each in (tensors, outs))
    _put_parts(_exchanged(world, _joined(tensors), sent, received, timeout), outs)


def gather(
    world: World, outs: Sequence[Tensor], tensor: Tensor, root: int, timeout: float | None = None
) -> None:
    """Gather the tensor of rank p in ``outs[p]`` of rank `root`; the others have no `outs`."""
    _check_root(root, world)
    nothing = tensor.detach().new_empty(0)
    sent = [tensor if rank == root else nothing for rank in range(world.ranks)]
    all_to_all(world, outs if world.rank == root else [nothing] * world.ranks, sent, timeout)


def gather_single(
    world: World, out: Tensor, tensor: Tensor, root: int, timeout: float | None = None
) -> None:
    """Gather the tensors of all ranks in `out` of rank `root`, contiguous, one after another."""
    gather(world, out.view(-1).tensor_split(world.ranks), tensor, root, timeout)


def scatter(
    world: World, out: Tensor, tensors: Sequence[Tensor], root: int, timeout: float | None = None
) -> None:
    """Send ``tensors[p]`` of rank `root` to `out` of rank p; the others have no `tensors`."""
    _check_root(root, world)
    nothing = out.detach().new_empty(0)
    received = [out if rank == root else nothing for rank in range(world.ranks)]
    all_to_all(world, received, tensors if world.rank == root else [nothing] * world.ranks, timeout)


def all_reduce_coalesced(
    world: World, tensors: Sequence[Tensor], op: Any, timeout: float | None = None
) -> None:
    """`all_reduce` of several tensors, one call for each dtype."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        of_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
        joined = _joined(of_dtype)
        all_reduce(world, joined, op, timeout)
        _put_parts(joined, of_dtype)


def _of_several(collective: Callable[..., None]) -> Callable[..., None]:
    """A collective of several tensors: one call for each output and its input."""

    @functools.wraps(collective)
    def of_several(
        world: World, outs: Sequence[Tensor], tensors: Sequence[Tensor], *args: Any
    ) -> None:
        for out, tensor in zip(outs, tensors, strict=True):
            collective(world, out, tensor, *args)

    return of_several


all_gather_single_coalesced = _of_several(all_gather_single)
reduce_scatter_single_coalesced = _of_several(reduce_scatter_single)


def all_gather_coalesced(
    world: World, outs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], *args: Any
) -> None:
    """`all_gather` of several tensors: of ``tensors[i]`` in ``outs[p][i]``."""
    _of_several(all_gather)(world, [*zip(*outs, strict=True)], tensors, *args)


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements of a tensor, one after another, as bytes: its own memory if contiguous."""
    # a single element has any stride, with which torch would not view it as bytes
    return _movable(tensor).as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _reduce_scatter(
    world: World,
    out: Tensor,
    tensor: Tensor,
    parts: Sequence[int] | None,
    op: Any,
    timeout: float | None,
) -> None:
    """Reduce `tensor`, of parts with these elements, even ones if None, and put this rank's part in
    `out`.
    """
    kind, here, reducible = _operand(tensor, op)
    if reducible:
        target = _movable(out)
        sizes = None if parts is None else _numbers(tensor, parts)
        collective.run(_check_reduce_scatter, here, target, (kind, sizes), world, timeout)
        _put(target, out)
    else:
        mine = [out.numel()] * world.ranks
        rows = _exchanged(world, here, parts or mine, mine, timeout)
        _put(_combined(rows.view(world.ranks, -1), kind), out)


def _gathered(
    world: World, tensor: Tensor, timeout: float | None, sizes: Sequence[int] | None = None
) -> Tensor:
    """The elements of all ranks' tensors, which have so many, by default all as many."""
    here = _movable(tensor).view(-1)
    numbers = _numbers(tensor, sizes or [tensor.numel()] * world.ranks)
    full = here.new_empty(sum(numbers))
    weft_all_gather(here, out=full, shard_rows=numbers, world=world, timeout=timeout)
    return _elements(full, tensor.dtype)


def _exchanged(
    world: World,
    tensor: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    timeout: float | None,
) -> Tensor:
    """The elements that all ranks send to this one, of which each sends and receives so many."""
    here = _movable(tensor).view(-1)
    numbers = _numbers(tensor, received)
    full = here.new_empty(sum(numbers))
    weft_all_to_all(
        here,
        out=full,
        input_split_sizes=_numbers(tensor, sent),
        output_split_sizes=numbers,
        world=world,
        timeout=timeout,
    )
    return _elements(full, tensor.dtype)


def _operand(tensor: Tensor, op: Any) -> tuple[str, Tensor, bool]:
    """The kind of reduction, its operand, and whether weft reduces that, which is then in the form
    of `_movable`. The operand of a `premul_sum` is the tensor times the factor, in its dtype.
    """
    kind = _kind(op)
    if kind == "premul_sum":
        plain = tensor.detach()
        factor: float | Tensor = op.__getstate__()[1]
        scaled = (plain.float() if tensor.dtype in FLOAT8 else plain) * factor
        kind, tensor = "sum", scaled.to(tensor.dtype)
    if tensor.dtype in _SUPPORTED.get(kind, ()) or (tensor.is_complex() and kind in ("sum", "avg")):
        return kind, _movable(tensor), True
    if tensor.dtype == torch.bool and kind in _ON_BOOLEANS:
        return _ON_BOOLEANS[kind], _movable(tensor).view(torch.uint8), True
    if not _defined(kind, tensor.dtype):
        remedy = (
            "bitwise reductions need integers or booleans"
            if kind in ("band", "bor", "bxor")
            else "choose another reduction"
        )
        raise TypeError(f"there is no {kind} of {name(tensor.dtype)}: {remedy}")
    return kind, tensor, False


def _combined(rows: Tensor, kind: str) -> Tensor:
    """The reduction of gathered rows, one from each rank."""
    return (
        _COMBINE[kind](rows.float()).to(rows.dtype)
        if rows.dtype in FLOAT8
        else _COMBINE[kind](rows)
    )


def _integer_mean(rows: Tensor) -> Tensor:
    """The mean of integers, exact, rounded toward zero."""
    ranks = len(rows)
    if rows.dtype != torch.int64:
        return rows.sum(0, dtype=torch.int64).div(ranks, rounding_mode="trunc").to(rows.dtype)
    # their sum may have more than 64 bits
    whole = rows.div(ranks, rounding_mode="floor")
    rest = (rows - whole * ranks).sum(0)
    mean = whole.sum(0) + rest.div(ranks, rounding_mode="floor")
    return mean + ((mean < 0) & (rest % ranks != 0))


@functools.cache
def _defined(kind: str, dtype: torch.dtype) -> bool:
    """Whether `_combined` supports a reduction of this dtype."""
    try:
        _combined(torch.zeros(2, 1, dtype=dtype, device="cpu"), kind)
    except RuntimeError:
        return False
    return True


def _kind(op: Any) -> str:
    return _KINDS[hash(op)]


def _movable(tensor: Tensor) -> Tensor:
    """The elements of a tensor in a form that weft moves: contiguous and of a supported dtype; in
    the tensor's own memory if possible.
    """
    if (
        tensor.dtype in ANY
        and type(tensor) is Tensor
        and not tensor.requires_grad
        and tensor.is_contiguous()
        and not tensor.is_neg()
    ):
        return tensor
    plain = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg().contiguous()
    if plain.is_complex():
        return torch.view_as_real(plain)
    return plain if plain.dtype in ANY else plain.view(_INTEGER_OF_SIZE[plain.itemsize])


def _elements(here: Tensor, dtype: torch.dtype) -> Tensor:
    """Elements in the form of `_movable`, one after another, in their own dtype."""
    if dtype.is_complex and not here.is_complex():
        return torch.view_as_complex(here.view(-1, 2))
    return here.view(dtype)


def _put(here: Tensor, tensor: Tensor) -> None:
    """Copy `here`, elements in the form of `_movable`, to `tensor`, unless it is its own memory."""
    if here is tensor or (tensor.is_contiguous() and here.data_ptr() == tensor.data_ptr()):
        return
    place, here = tensor.detach(), _elements(here, tensor.dtype).view(tensor.shape)
    for dim, stride in enumerate(place.stride()):
        if stride == 0:  # an expanded tensor: all elements of the dimension are one
            place, here = (
                place[(slice(None),) * dim + (slice(1),)],
                here[(slice(None),) * dim + (slice(1),)],
            )
    place.copy_(here)


def _put_parts(full: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy to each of the tensors its part of `full`."""
    parts = full.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        _put(part, tensor)


def _numbers(tensor: Tensor, sizes: Sequence[int]) -> tuple[int, ...]:
    """The numbers of elements in `_movable` for so many elements of a tensor."""
    return tuple([2 * size for size in sizes] if tensor.is_complex() else sizes)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of all tensors, one after another."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _without_overlap(a: Tensor, out: Tensor, in_place: bool = False) -> Tensor:
    """`a`, or a copy if `out` overlaps it and the call is not `in_place`. Plans do not depend on
    it, so ranks may differ.
    """
    return a.clone() if overlap(a, out) and not in_place else a


def _check_dtypes(first: Tensor, *others: Tensor) -> None:
    for tensor in others:
        if tensor.dtype != first.dtype:
            raise TypeError(
                f"all tensors of a collective must have one dtype; got {name(first.dtype)} and "
                f"{name(tensor.dtype)}: convert one by .to({first.dtype})"
            )


def _check_count(tensors: Sequence[Tensor], world: World) -> None:
    if len(tensors) != world.ranks:
        raise ValueError(
            f"a list must have a tensor for each of the {world.ranks} ranks; got {len(tensors)}"
        )


def _check_split(full: Tensor, sizes: Sequence[int], side: str, world: World) -> None:
    if not full.dim():
        raise ValueError(
            f"the {side} must have at least one dimension, whose rows are sent; got a tensor with "
            "none"
        )
    rows = len(full)
    if sizes and (len(sizes) != world.ranks or sum(sizes) != rows):
        raise ValueError(
            f"the {side} needs {world.ranks} split sizes that add up to its {rows} rows; got "
            f"{[*sizes]}"
        )
    if not sizes and rows % world.ranks:
        raise ValueError(
            f"the {side} has {rows} rows, which cannot be split evenly among {world.ranks} ranks: "
            "pass split sizes"
        )
