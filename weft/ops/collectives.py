"""The collectives of `torch.distributed`, on symmetric or plain CPU tensors, as plans that run wholly in the native core.

Each is collective, and returns when its result is in place and its inputs are the caller's again. The ``_async`` form returns a
`Handle` at once and works on the native lane (the first call of its kind may wait for its peers, to take a workspace together);
until it is waited for, its tensors must not be touched. Calls are carried out in the order in which they are made. Results do not
depend on arrival order: the same bits on every run.

Passing `out`, and the same tensors again and again, is the fastest way to call: the compiled plan is then found by the tensors'
identity. Symmetric tensors (`World.empty`), the same on all ranks, are read and written in place by peers; others are staged.

All tensors are plain: `torch.Tensor` or `torch.nn.Parameter` itself, strided, no conjugate or negative view. Autograd does not take
part, so `out` must not require a gradient while it records.

Keywords that all share: `out`, a contiguous tensor for the result (else a new one); `world`, by default that of ``weft.init()``;
`timeout`, the seconds any wait may take, by default the world's. Bad arguments are `ValueError` or `TypeError`, raised before
anything is sent; lost, late or disagreeing peers are `PeerLost`, `PeerTimeout` and `MismatchError`, and close the world.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from weft.checks import check_timeout
from weft.engines import engine
from weft.engines.cached_call import CachedCall
from weft.engines.engine import Geometry, Program
from weft.engines.host import HostProgram
from weft.engines.weights import DTYPES as FLOATS
from weft.errors import PeerTimeout
from weft.ops import arguments
from weft.plan import Plan
from weft.schedules import all_gather as gathering
from weft.schedules import all_reduce as reducing
from weft.schedules import all_to_all as exchanging
from weft.schedules import broadcast as broadcasting
from weft.schedules import reduce_scatter as scattering
from weft.schedules.common import Hosts, apart
from weft.schedules.workload import PIECES
from weft.world import World, current

NUMBERS = (*FLOATS, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
"""What can be reduced; averages are of floating dtypes."""

ANY = (*NUMBERS, torch.bool)
"""What can be moved."""

REDUCTIONS = ("sum", "avg", "max", "min")

ONE_SHOT_BYTES = 16 << 10  # up to this size the least waiting wins over the least work
PUSH_BYTES = 256 << 10  # from this size on of a rank's rows, not reading them from memory twice wins over finding them in the cache
SHARED_BYTES = 256 << 10  # from this size on of a broadcast its source moves rows, too
STAGED_BYTES = 1 << 20  # up to so much for each peer, what peers cannot read is staged at once, and in pieces above
SLOT_BYTES = 512 << 10  # what a rank then stages at a time: few enough that it stays in the caches until it is read
STEPS = 64  # in which it does so at most: a plan is a list of all of them
_REMEMBERED = 1024  # calls per world that are found by the identity of their tensors


class Handle:
    """A collective in progress, made by the ``_async`` forms."""

    def __init__(self, program: Program, work: _Work) -> None:
        self._program, self._result = program, work.result
        self._work: _Work | None = work

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work is None or self._program.done()

    def wait(self, timeout: float | None = None) -> Tensor:
        """The result, once it is in place.

        Raises `PeerTimeout` if it is not after `timeout` seconds; the collective goes on and can be waited for again. Raises what
        the collective itself would.
        """
        if self._work is not None:
            if not self._program.join(float("inf") if timeout is None else timeout):
                raise PeerTimeout(f"{self._program.plan.operator} is not done after {timeout:g} s")
            self._work.finish()
            self._work = None
        return self._result


class _Work(NamedTuple):
    """What a call comes to: a plan, the matrices it works on, its result, and what is copied to which parts of it at the end."""

    plan: Plan
    tensors: dict[str, Tensor]
    result: Tensor
    copied: Sequence[tuple[Tensor, Tensor]] = ()

    def finish(self) -> None:
        for part, block in self.copied:
            part.copy_(block)


_Prepare = Callable[..., _Work]
_Mode = Callable[["_Prepare", Tensor, Tensor | None, tuple[Hashable, ...], World | None, float | None], Any]


def _now(
    prepare: _Prepare, a: Tensor, out: Tensor | None, options: tuple[Hashable, ...], world: World | None, timeout: float | None
) -> Tensor:
    """Make a call and return its result."""
    if world is None or world.closed is not None:
        world = current(world)
    if timeout is not None:
        check_timeout(timeout)
    calls = (world.engine or engine(world)).calls
    name = prepare, id(a), id(out), options
    known: CachedCall | None = calls.get(name)
    if known is not None and out is not None and known.replay(a, out, timeout):
        return out
    work = prepare(world, a, out, *options)
    program = _program(world, work)
    addresses = program.addresses(work.tensors)
    program.execute(addresses, timeout)
    work.finish()
    lasting = engine(world).remembers and not work.copied
    if lasting and out is not None and all(_within(tensor, (a, out)) for tensor in work.tensors.values()):
        if len(calls) >= _REMEMBERED:
            calls.clear()
        assert isinstance(program, HostProgram)
        calls[name] = CachedCall(program, addresses, a, out)
    return work.result


def _later(
    prepare: _Prepare, a: Tensor, out: Tensor | None, options: tuple[Hashable, ...], world: World | None, timeout: float | None
) -> Handle:
    """Begin a call and return at once."""
    world = current(world)
    check_timeout(timeout)
    work = prepare(world, a, out, *options)
    program = next(program for number in range(1 << 30) if (program := _program(world, work, number)).idle())
    program.start(program.addresses(work.tensors), timeout)
    return Handle(program, work)


def all_gather(
    a: Tensor,
    *,
    out: Tensor | None = None,
    dim: int = 0,
    shard_rows: Sequence[int] | None = None,
    algorithm: str = "auto",
    chunk_rows: int | None = None,
    world: World | None = None,
    timeout: float | None = None,
    _mode: _Mode = _now,
) -> Tensor:
    """The tensors `a` of all ranks joined along `dim`, in rank order; any dtype of `ANY`.

    `shard_rows` are the sizes of that dimension on all ranks if they differ (zero is allowed). `algorithm` is ``pull`` (every rank
    reads its peers'), ``push`` (every rank writes to its peers) or ``ring``, these two in transfers of `chunk_rows`; auto pushes
    where `out` is symmetric, unless `a` is so too and small. `a` may be this rank's own part of `out`; where that is symmetric a
    push copies nothing but what peers get.
    """
    shards = None if shard_rows is None else tuple(shard_rows)
    made: Tensor = _mode(_prepare_all_gather, a, out, (dim, shards, algorithm, chunk_rows), world, timeout)
    return made


def all_gather_async(a: Tensor, **keywords: Any) -> Handle:
    """`all_gather` in the background; takes the same keywords."""
    return cast(Handle, all_gather(a, **keywords, _mode=_later))


def reduce_scatter(
    a: Tensor,
    *,
    op: str = "sum",
    out: Tensor | None = None,
    dim: int = 0,
    shard_rows: Sequence[int] | None = None,
    algorithm: str = "auto",
    world: World | None = None,
    timeout: float | None = None,
    _mode: _Mode = _now,
) -> Tensor:
    """This rank's part along `dim` of the element-wise reduction of all ranks' `a`; a dtype of `NUMBERS`.

    `op` is ``sum``, ``avg``, ``max`` or ``min``; sums are accumulated in rank order in float32 (float64 in float64, integers
    exactly) and rounded once. Without `shard_rows`, the sizes of the parts, the dimension must divide evenly. `out` may be this
    rank's own part of `a`.

    `algorithm` is ``direct`` (every rank reads its peers' rows; auto's choice on one host), ``push`` (they are put to it, a host's
    sum once; auto's choice on several) or ``ring`` (sums go from host to host, or from rank to rank on one, rounded to a's dtype at
    every hop).
    """
    shards = None if shard_rows is None else tuple(shard_rows)
    made: Tensor = _mode(_prepare_reduce_scatter, a, out, (op, dim, shards, algorithm), world, timeout)
    return made


def reduce_scatter_async(a: Tensor, **keywords: Any) -> Handle:
    """`reduce_scatter` in the background; takes the same keywords."""
    return cast(Handle, reduce_scatter(a, **keywords, _mode=_later))


def all_reduce(
    a: Tensor,
    *,
    op: str = "sum",
    out: Tensor | None = None,
    algorithm: str = "auto",
    world: World | None = None,
    timeout: float | None = None,
    _mode: _Mode = _now,
) -> Tensor:
    """The element-wise reduction of all ranks' `a`, with equal bits on all ranks; a dtype of `NUMBERS`.

    `op` as in `reduce_scatter`. `algorithm` is ``one_shot`` (every rank reduces everything; auto's choice for few bytes),
    ``two_shot`` (every rank reduces a part and copies the others') or ``ring`` (from neighbour to neighbour, rounded to a's dtype
    at every hop). `out` may be `a` itself.
    """
    made: Tensor = _mode(_prepare_all_reduce, a, out, (op, algorithm), world, timeout)
    return made


def all_reduce_async(a: Tensor, **keywords: Any) -> Handle:
    """`all_reduce` in the background; takes the same keywords."""
    return cast(Handle, all_reduce(a, **keywords, _mode=_later))


def broadcast(
    tensor: Tensor,
    source: int,
    *,
    algorithm: str = "auto",
    world: World | None = None,
    timeout: float | None = None,
    _mode: _Mode = _now,
) -> Tensor:
    """Overwrite `tensor`, which must be contiguous, with that of rank `source`, and return it; any dtype of `ANY`.

    `algorithm` is ``pull`` (ranks read it; auto's choice on one host), ``push`` (the source puts it to each other host, or rank on
    one; auto's choice on several) or ``ring`` (each hands it to the next, so the source sends it once).
    """
    made: Tensor = _mode(_prepare_broadcast, tensor, tensor, (source, algorithm), world, timeout)
    return made


def broadcast_async(tensor: Tensor, source: int, **keywords: Any) -> Handle:
    """`broadcast` in the background; takes the same keywords."""
    return cast(Handle, broadcast(tensor, source, **keywords, _mode=_later))


def all_to_all(
    a: Tensor,
    *,
    out: Tensor | None = None,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    world: World | None = None,
    timeout: float | None = None,
    _mode: _Mode = _now,
) -> Tensor:
    """Part p of a's first dimension goes to rank p; the result has the parts for this rank in rank order. Any dtype of `ANY`.

    Every row goes straight to its rank, also where hosts are several: round a ring it would be sent several times.
    The parts are even, or as large as `input_split_sizes` and `output_split_sizes` say (all ranks give both or none; the sizes
    are exchanged first, and those that do not fit together are a `ValueError` on all ranks).
    """
    given = None if input_split_sizes is None else tuple(input_split_sizes)
    taken = None if output_split_sizes is None else tuple(output_split_sizes)
    made: Tensor = _mode(_prepare_all_to_all, a, out, (given, taken), world, timeout)
    return made


def all_to_all_async(a: Tensor, **keywords: Any) -> Handle:
    """`all_to_all` in the background; takes the same keywords."""
    return cast(Handle, all_to_all(a, **keywords, _mode=_later))


def _program(world: World, work: _Work, number: int = 0) -> Program:
    """The program for this work; `number` tells those apart that are under way at the same time."""
    key = id(work.plan), number, *((name, Geometry.of(tensor, world)) for name, tensor in work.tensors.items())
    return engine(world).program(key, work.plan, work.tensors)


def _within(tensor: Tensor, owners: tuple[Tensor, ...]) -> bool:
    return tensor.numel() == 0 or any(arguments.overlap(tensor, owner) for owner in owners)


def _prepare_all_gather(
    world: World, a: Tensor, out: Tensor | None, dim: int, shards: tuple[int, ...] | None, algorithm: str, chunk_rows: int | None
) -> _Work:
    arguments.check_input(a, "a", world, ANY)
    dim = _dimension(a, dim)
    arguments.check_algorithm(algorithm, ("pull", "push", "ring"), world)
    arguments.check_chunk_rows(chunk_rows)
    sizes = arguments.check_shard_rows(a.shape[dim], shards, world)
    shape = (*a.shape[:dim], sum(sizes), *a.shape[dim + 1 :])
    lead = math.prod(a.shape[:dim])
    rows, start = tuple(lead * size for size in sizes), sum(sizes[: world.rank])

    def is_part(out: Tensor) -> bool:
        return lead == 1 and _same_place(a, out.narrow(dim, start, a.shape[dim]))

    result = arguments.result(out, shape, a.dtype, [a], world, is_part)
    in_place = out is not None and is_part(out)
    matrix, gathered = _matrix(a, dim), _matrix(result, dim)
    whole = gathered if lead == 1 else torch.empty_like(gathered)  # else the rows of a rank do not lie side by side in the result
    # In place each rank's rows begin elsewhere, so they are not one symmetric tensor.
    symmetric, symmetric_out = world.is_symmetric(matrix) and not in_place, world.is_symmetric(whole)
    hosts = world.topology
    if algorithm == "auto":
        most = max(rows) * matrix.shape[1] * matrix.itemsize
        straight = symmetric_out and (not symmetric or most >= PUSH_BYTES)
        algorithm = "push" if hosts or straight else "pull"
    pieces = 1 if algorithm == "push" and symmetric_out and hosts is None else PIECES
    chunk = max(1, lead * chunk_rows if chunk_rows else -(-max(rows) // pieces))
    if algorithm == "pull" and not symmetric and chunk_rows is None:
        chunk = _slot_rows(matrix, max(rows), 1)
    plan = _plan_all_gather(rows, algorithm, chunk, symmetric, symmetric_out, hosts)
    copied = _parts(result, whole, dim, sizes) if lead != 1 else ()
    return _Work(plan, {"a": matrix, "gathered": whole}, result, copied)


def _prepare_reduce_scatter(
    world: World, a: Tensor, out: Tensor | None, op: str, dim: int, shards: tuple[int, ...] | None, algorithm: str
) -> _Work:
    _check_reduction(a, op, world)
    arguments.check_algorithm(algorithm, ("direct", "push", "ring"), world)
    dim = _dimension(a, dim)
    sizes = arguments.check_parts(a.shape[dim], shards, world)
    lead = math.prod(a.shape[:dim])
    rows, start = tuple(lead * size for size in sizes), sum(sizes[: world.rank])
    shape = (*a.shape[:dim], sizes[world.rank], *a.shape[dim + 1 :])

    def is_part(out: Tensor) -> bool:
        return lead == 1 and _same_place(out, a.narrow(dim, start, sizes[world.rank]))

    result = arguments.result(out, shape, a.dtype, [a], world, is_part)
    if lead == 1:
        matrix = _matrix(a, dim)
    else:
        matrix = a.new_empty(sum(rows), math.prod(a.shape[dim + 1 :]))
        for part, block in _parts(a.detach(), matrix, dim, sizes):
            block.copy_(part)
    slot = _slot_rows(matrix, max(rows), world.ranks - 1)
    plan = _plan_reduce_scatter(rows, algorithm, op, world.is_symmetric(matrix), slot, world.topology)
    return _Work(plan, {"a": matrix, "out": _matrix(result, dim)}, result)


def _prepare_all_reduce(world: World, a: Tensor, out: Tensor | None, op: str, algorithm: str) -> _Work:
    _check_reduction(a, op, world)
    arguments.check_algorithm(algorithm, reducing.ALGORITHMS, world)
    result = arguments.result(out, a.shape, a.dtype, [a], world, partial(_same_place, a))
    in_place = out is not None and _same_place(a, out)
    if algorithm == "auto":
        algorithm = "one_shot" if a.numel() * a.itemsize <= ONE_SHOT_BYTES else "two_shot"
    flat = a.reshape(-1, 1).contiguous()
    # Where every rank reads all of a there is no moment at which its own rank may overwrite it.
    symmetric = world.is_symmetric(flat) and not (in_place and algorithm == "one_shot")
    places = symmetric, world.is_symmetric(result)
    slot = _slot_rows(flat, -(-a.numel() // world.ranks), world.ranks - 1)
    plan = _plan_all_reduce(a.numel(), world.ranks, algorithm, op, *places, slot, world.topology)
    return _Work(plan, {"a": flat, "out": result.view(-1, 1)}, result)


def _prepare_broadcast(world: World, tensor: Tensor, out: Tensor, source: int, algorithm: str) -> _Work:
    arguments.check_input(tensor, "tensor", world, ANY)
    arguments.check_algorithm(algorithm, ("pull", "push", "ring"), world)
    if not 0 <= source < world.ranks:
        raise ValueError(f"there is no rank {source} in a world of {world.ranks}")
    if not tensor.is_contiguous():
        raise ValueError("tensor must be contiguous")
    rows = tensor.view(-1, 1)
    slot, shared = _slot_rows(rows, len(rows), 1), rows.numel() * rows.itemsize >= SHARED_BYTES
    plan = _plan_broadcast(len(rows), world.ranks, source, algorithm, world.is_symmetric(rows), shared, slot, world.topology)
    mine, theirs = ("a", "out") if world.rank == source else ("out", "a")
    return _Work(plan, {mine: rows, theirs: rows[:0]}, tensor)


def _prepare_all_to_all(
    world: World, a: Tensor, out: Tensor | None, given: tuple[int, ...] | None, taken: tuple[int, ...] | None
) -> _Work:
    arguments.check_input(a, "a", world, ANY)
    _dimension(a, 0)
    even = given is None and taken is None
    given, taken = _splits(world, a.shape[0], given, taken)
    result = arguments.result(out, (sum(taken), *a.shape[1:]), a.dtype, [a], world)
    counts = (given,) * world.ranks if even else _exchange_splits(world, given, taken)
    matrix = _matrix(a)
    slot = _slot_rows(matrix, max(map(max, counts)), world.ranks - 1)
    plan = _plan_all_to_all(counts, world.is_symmetric(matrix), slot, world.topology)
    return _Work(plan, {"a": matrix, "out": _matrix(result)}, result)


def _splits(
    world: World, rows: int, given: tuple[int, ...] | None, taken: tuple[int, ...] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How many of its `rows` this rank gives to each rank, and takes from each."""
    if given is None and taken is None:
        if rows % world.ranks:
            raise ValueError(f"{rows} rows do not divide evenly over {world.ranks} ranks: give the split sizes")
        return ((rows // world.ranks,) * world.ranks,) * 2
    given, taken = given or (), taken or ()
    if not len(given) == len(taken) == world.ranks or min(given + taken) < 0 or sum(given) != rows:
        raise ValueError(
            f"input_split_sizes and output_split_sizes must be {world.ranks} counts each, none negative, the former of {rows} "
            f"rows in all; got {[*given]} and {[*taken]}"
        )
    return given, taken


def _exchange_splits(world: World, given: tuple[int, ...], taken: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """What every rank gives to every other, once all have been told; sizes that do not fit are an error on all ranks alike."""
    everyone = all_gather(torch.tensor([given, taken]).view(1, -1), world=world).view(world.ranks, 2, world.ranks)
    sent, expected = everyone[:, 0], everyone[:, 1].t()
    if not torch.equal(sent, expected):
        giver, taker = [int(i) for i in (sent != expected).nonzero()[0]]
        raise ValueError(
            f"rank {giver} gives rank {taker} {sent[giver, taker]} rows, but rank {taker} expects {expected[giver, taker]} from it"
        )
    return tuple(tuple(row) for row in sent.tolist())


def _check_reduction(a: Tensor, op: str, world: World) -> None:
    if op not in REDUCTIONS:
        raise ValueError(f"there is no reduction {op!r}; choose one of {', '.join(REDUCTIONS)}")
    arguments.check_input(a, "a", world, FLOATS if op == "avg" else NUMBERS)


def _dimension(a: Tensor, dim: int) -> int:
    if not a.dim():
        raise ValueError("a must have at least one dimension; got a tensor with none: pass a.view(1)")
    if not -a.dim() <= dim < a.dim():
        raise ValueError(f"a has {a.dim()} dimensions; there is no dimension {dim}")
    return dim % a.dim()


def _matrix(tensor: Tensor, dim: int = 0) -> Tensor:
    """The tensor as contiguous rows: one for each index of the dimensions up to `dim`."""
    return tensor.contiguous().view(math.prod(tensor.shape[: dim + 1]), math.prod(tensor.shape[dim + 1 :]))


def _parts(tensor: Tensor, blocks: Tensor, dim: int, sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """The parts of a tensor along `dim`, of these sizes, each with its place in `blocks`, where they lie one after another."""
    parts = tensor.split([*sizes], dim)
    places = blocks.view(-1).split([part.numel() for part in parts])
    return [(part, place.view(part.shape)) for part, place in zip(parts, places, strict=True)]


def _slot_rows(matrix: Tensor, most: int, readers: int) -> int:
    """How many of at most `most` rows go to each of as many readers at a time, where they are staged."""
    row = max(1, matrix.shape[1] * matrix.itemsize)
    return max(1, most if most * row <= STAGED_BYTES else SLOT_BYTES // (row * max(1, readers)), -(-most // STEPS))


def _same_place(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.is_contiguous() and other.is_contiguous() and one.shape == other.shape


_plan_all_gather = lru_cache(1024)(
    lambda rows, algorithm, chunk, a, gathered, hosts: gathering.all_gather(
        rows, algorithm, chunk_rows=chunk, symmetric_a=a, symmetric_gathered=gathered, hosts=hosts
    )
)


@lru_cache(1024)
def _plan_reduce_scatter(rows: tuple[int, ...], algorithm: str, op: str, symmetric: bool, slot: int, hosts: Hosts | None) -> Plan:
    if hosts is not None or algorithm in ("push", "ring"):
        way = "ring" if algorithm == "ring" else "push"
        return scattering.put(rows, way, op, chunk_rows=max(1, -(-max(rows) // PIECES)), hosts=hosts or range(len(rows)))
    return scattering.reduce_scatter(rows, op, symmetric_a=symmetric, chunk_rows=slot)


@lru_cache(1024)
def _plan_all_reduce(
    rows: int, ranks: int, algorithm: str, op: str, symmetric: bool, symmetric_out: bool, slot: int, hosts: Hosts | None
) -> Plan:
    if hosts is not None and not (algorithm == "ring" and apart(hosts) and rows >= ranks):
        way = "ring" if algorithm == "ring" else "two_shot"
        return reducing.put(rows, ranks, way, op, chunk_rows=max(1, -(-rows // (ranks * PIECES))), hosts=hosts)
    places = {"symmetric_a": symmetric, "symmetric_out": symmetric_out}
    return reducing.all_reduce(rows, ranks, algorithm, op, chunk_rows=slot, **places)


@lru_cache(1024)
def _plan_broadcast(
    rows: int, ranks: int, source: int, algorithm: str, symmetric: bool, shared: bool, slot: int, hosts: Hosts | None
) -> Plan:
    places, staged = hosts or range(ranks), hosts is None and not symmetric
    if algorithm == "ring":
        return broadcasting.ring(rows, source, places, chunk_rows=max(1, -(-rows // PIECES)), staged=staged)
    if hosts is not None or algorithm == "push":
        return broadcasting.push(rows, source, places, staged=staged)
    return broadcasting.broadcast(rows, ranks, source, symmetric_a=symmetric, shared=shared, chunk_rows=slot)


_plan_all_to_all = lru_cache(1024)(
    lambda rows, a, slot, hosts: exchanging.all_to_all(rows, symmetric_a=a, chunk_rows=slot, hosts=hosts)
)
