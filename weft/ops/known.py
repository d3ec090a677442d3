"""Calls of fused operators with weights and options like those of a call before: only where they
lie is new, and their rows.

What a call checks and decides of its weights and options is remembered by how they lie, not where,
so that layers which are alike share it and a view made anew, like ``weight.t()``, finds it. For
rows of a class that was decided on it is then left to look at them, to make the results, and to
bind and run the program. What there is to know of so many rows is found natively the next time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.checks import PLAIN
from weft.engines import engine
from weft.engines.engine import Program
from weft.kernels.weights import PackedWeight, Weight, plain
from weft.ops import arguments, fused
from weft.ops.call import Call
from weft.ops.fused import Way
from weft.schedules.workload import size_class
from weft.world import World, memory

_REMEMBERED = 1024  # weights and options, per world
_WEIGHTS, _BIASES = {*PLAIN, PackedWeight}, {*PLAIN, type(None)}
_WAYS = 256  # sizes of each, where an algorithm was asked for and so each is a class of its own


class Asked(NamedTuple):
    """What a call of an operator is remembered by, beside its rows; each weight has its bias."""

    options: tuple[Hashable, ...]
    """The operator, then what else is asked for."""
    weights: Sequence[Weight]
    biases: Sequence[Tensor | None]

    @property
    def name(self) -> Hashable | None:
        """What it is found by; None for operands that have to be checked."""
        kinds = tuple(map(type, self.weights))
        if not (_WEIGHTS.issuperset(kinds) and _BIASES.issuperset(map(type, self.biases))):
            return None
        lie = memory.layouts((*map(plain, self.weights), *self.biases))
        return None if lie is None else (kinds, lie, self.options)


def repeat(world: World, a: Tensor, asked: Asked) -> list[Tensor] | None:
    """The result of each weight for these rows if such a call was made before; else None, with
    nothing done.
    """
    if world.engine is None:
        return None
    options, weights, biases = asked
    ready: _Ready | None = world.engine.ready.find(options, a, weights, biases)
    if ready is None or ready.link is not world.emulated_link or a.is_neg():
        if (where := arguments.symmetric_world(a)) not in (0, world.number) or (
            known := world.engine.known.get(asked.name)
        ) is None:
            return None
        if (ready := known.ready(a, symmetric=where != 0)) is None:
            return None
        world.engine.ready.add(options, a, weights, biases, ready)
    return ready.run(a, weights, biases)


def run(asked: Asked, call: Call) -> Any:
    """Carry out a checked call, and remember it."""
    known = engine(call.world).known
    result, way = fused.carry_out(call)
    if way is not None and engine(call.world).remembers and (name := asked.name) is not None:
        if name not in known:
            if len(known) >= _REMEMBERED:
                known.clear()
            known[name] = KnownCall(asked, call)
        known[name].add(asked, call, way)
    return result


class _Out(NamedTuple):
    """A result: its buffer, what it is like, and its shape as a matrix if it is none."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    matrix: tuple[int, int] | None


class _Ready(NamedTuple):
    """What there is to know of a call but its tensors.

    `link` is the emulated one; `matrix` the shape of rows that are none; `packed` and `biased` are
    the places of weights that are packed and of biases that are added.
    """

    link: object
    program: Program
    shards: tuple[int, ...]
    matrix: tuple[int, int] | None
    outs: Sequence[_Out]
    products: tuple[str, ...]
    packed: tuple[int, ...]
    biased: tuple[int, ...]

    def run(
        self, a: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        _, program, shards, shape, outs, products, packed, biased = self
        for at in packed:
            weights[at].check_unchanged()  # type: ignore[union-attr]
        tensors, results = {"a": a if shape is None else a.view(shape)}, []
        for name, size, strides, dtype, matrix in outs:
            result = torch.empty_strided(
                size, strides, dtype=dtype
            )  # which takes half the time of `torch.empty`
            tensors[name] = result if matrix is None else result.view(matrix)
            results.append(result)
        added = {products[at]: biases[at] for at in biased} if biased else None
        program.run(tensors, shards, dict(zip(products, weights, strict=True)), added)  # type: ignore[arg-type]
        return results


class KnownCall:
    """A call with weights and biases that lie in a certain way, and certain options, and the way of
    each class of sizes.
    """

    def __init__(self, asked: Asked, call: Call) -> None:
        self.world, self.operator, self.decided = call.world, call.operator, call.tunable
        self.packed = tuple(
            [at for at, b in enumerate(asked.weights) if isinstance(b, PackedWeight)]
        )
        self.biased = tuple([at for at, bias in enumerate(asked.biases) if bias is not None])
        self.k, self.dtype = asked.weights[0].shape[0], call.tensors["a"].dtype
        self.outs = [
            (name, tensor.shape[1], tensor.dtype)
            for name, tensor in call.tensors.items()
            if name != "a"
        ]
        self.ways: dict[Hashable, tuple[Way, bool]] = {}  # with whether this rank adds biases

    def add(self, asked: Asked, call: Call, way: Way) -> None:
        """From now on go this way for calls like this, unless what it multiplies or adds is made of
        them anew each time.
        """
        if len(self.ways) >= _WAYS:
            self.ways.clear()
        added = [bias for bias in call.biases if bias is not None]
        own = [bias for bias in asked.biases if bias is not None] if added else []
        if _same(call.weights, asked.weights) and _same(added, own):
            self.ways[
                self._class(tuple(call.workload.rows), memory.find(call.tensors["a"]) is not None)
            ] = way, bool(added)

    def _class(self, shards: tuple[int, ...], symmetric: bool) -> Hashable:
        return (
            size_class(max(shards)) if self.decided else shards,
            symmetric,
            self.world.emulated_link,
        )

    def ready(self, a: Tensor, symmetric: bool) -> _Ready | None:
        """What there is to know of a call with these rows; None where anything is not as it was, or
        their class is new.
        """
        operator, world = self.operator, self.world
        if (
            a.dtype != self.dtype
            or a.shape[-1] != self.k
            or (a.dim() != 2 and not operator.flattens)
        ):
            return None
        matrix = None if a.dim() == 2 else (a.numel() // self.k, self.k)
        if (
            shares := operator.default_shards(
                a.shape[0] if matrix is None else matrix[0], world.ranks
            )
        ) is None:
            return None
        shards = tuple(shares)
        if (known := self.ways.get(self._class(shards, symmetric))) is None:
            return None
        (program, products), biased = known
        kept = operator.result_rows(shards, world.rank)
        outs = []
        for name, n, dtype in self.outs:
            shape = (kept, n) if matrix is None else (*a.shape[:-1], n)
            outs.append(
                _Out(
                    name,
                    shape,
                    torch.empty(shape, device="meta").stride(),
                    dtype,
                    matrix and (kept, n),
                )
            )
        return _Ready(
            world.emulated_link,
            program,
            shards,
            matrix,
            outs,
            products,
            self.packed,
            self.biased if biased else (),
        )


def _same(given: Iterable[object], asked: Iterable[object]) -> bool:
    """Whether these are the very things that were asked for."""
    return [*map(id, given)] == [*map(id, asked)]
