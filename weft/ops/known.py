"""Calls of fused operators with weights and options like those of a call before: only where they lie is new, and their rows.

What a call checks and decides of its weights and options is remembered by how they lie, not where, so that layers which are alike
share it and a view made anew, like ``weight.t()``, finds it. For rows of a class that was decided on it is then left to look at
them, to make the results, and to bind and run the program.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.checks import PLAIN
from weft.engines import engine
from weft.engines.engine import Program
from weft.engines.weights import PackedWeight, Weight, plain
from weft.ops import fused
from weft.ops.call import Call
from weft.ops.fused import Way
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import size_class
from weft.world import World, memory

_REMEMBERED = 1024  # weights and options, per world
_WEIGHTS, _BIASES = {*PLAIN, PackedWeight}, {*PLAIN, type(None)}
_WAYS = 256  # sizes of each, where an algorithm was asked for and so each is a class of its own


class Asked(NamedTuple):
    """A call of an operator, whose rows are matrices or whatever has them: what it is remembered by. Each weight has its bias."""

    operator: str
    weights: Sequence[Weight]
    biases: Sequence[Tensor | None]
    options: tuple[Hashable, ...]

    @property
    def name(self) -> Hashable | None:
        """What it is found by; None for operands that have to be checked."""
        kinds = tuple(map(type, self.weights))
        if not (_WEIGHTS.issuperset(kinds) and _BIASES.issuperset(map(type, self.biases))):
            return None
        lie = memory.layouts((*map(plain, self.weights), *self.biases))
        return None if lie is None else (self.operator, kinds, lie, self.options)


def repeat(world: World, asked: Asked, a: Tensor) -> list[Tensor] | None:
    """The result of each weight for these rows if such a call was made before; else None, with nothing done."""
    if world.engine is None or world.closed is not None:
        return None
    known: KnownCall | None = world.engine.known.get(asked.name)
    return None if known is None else known.repeat(asked, a)


def run(asked: Asked, call: Call) -> Any:
    """Carry out a checked call, and remember it."""
    known = engine(call.world).known
    result, way, settled = fused.carry_out(call)
    if settled and engine(call.world).remembers and (name := asked.name) is not None:
        if name not in known:
            if len(known) >= _REMEMBERED:
                known.clear()
            known[name] = KnownCall(asked, call)
        known[name].add(asked, call, way)
    return result


class _Way(NamedTuple):
    """The program for a class of sizes, the buffers of its products, and whether this rank adds biases."""

    program: Program
    products: tuple[str, ...]
    biased: bool


class KnownCall:
    """A call with weights and biases that lie in a certain way, and certain options, and the way of each class of sizes."""

    def __init__(self, asked: Asked, call: Call) -> None:
        self.world, self.operator, self.decided = call.world, call.workload.operator, call.key is not None
        self.gathers = self.operator == "all_gather_matmul"  # so peers read `a`, where it is symmetric
        self.packed = [at for at, b in enumerate(asked.weights) if isinstance(b, PackedWeight)]
        self.biased = [at for at, bias in enumerate(asked.biases) if bias is not None]
        self.k, self.dtype = asked.weights[0].shape[0], call.tensors["a"].dtype
        self.outs = [(name, tensor.shape[1], tensor.dtype) for name, tensor in call.tensors.items() if name != "a"]
        self.ways: dict[Hashable, _Way] = {}

    def add(self, asked: Asked, call: Call, way: Way) -> None:
        """From now on go this way for calls like this, unless what it multiplies or adds is made of them anew each time."""
        if len(self.ways) >= _WAYS:
            self.ways.clear()
        own = [asked.biases[at] for at, name in enumerate(way.weights) if name in way.biases]
        if _same(way.weights.values(), asked.weights) and _same(way.biases.values(), own):
            made = _Way(way.program, tuple(way.weights), bool(way.biases))
            shards = tuple(call.workload.rows)
            sizes = size_class(max(shards)) if self.decided else shards
            self.ways[self._class(sizes, call.workload.symmetric)] = made

    def _class(self, sizes: Hashable, symmetric: bool) -> Hashable:
        return sizes, symmetric, self.world.emulated_link

    def repeat(self, asked: Asked, a: Tensor) -> list[Tensor] | None:
        """The results for these rows; None where anything is not as it was, or their class is new."""
        if a.dtype != self.dtype or a.shape[-1] != self.k:
            return None
        matrix = a if a.dim() == 2 else a.view(-1, self.k)
        segment = memory.find(matrix) if self.gathers else None
        if segment is not None and segment.world != self.world.number:
            return None
        if (shares := _shares(self.operator, matrix.shape[0], self.world.ranks, self.world.rank)) is None:
            return None
        shards, kept, most = shares
        way = self.ways.get(self._class(most if self.decided else shards, segment is not None or not self.gathers))
        if way is None:
            return None
        for at in self.packed:
            asked.weights[at].check_unchanged()  # type: ignore[union-attr]
        tensors = {"a": matrix}
        for name, columns, dtype in self.outs:
            tensors[name] = torch.empty((kept, columns), dtype=dtype)
        weights = dict(zip(way.products, asked.weights, strict=True))
        biases = {way.products[at]: asked.biases[at] for at in self.biased} if way.biased else {}
        way.program.run(tensors, shards, weights, biases)  # type: ignore[arg-type]
        results = [tensors[name] for name, _, _ in self.outs]
        return results if a.dim() == 2 else [out.view(*a.shape[:-1], out.shape[1]) for out in results]


@lru_cache(4096)
def _shares(operator: str, rows: int, ranks: int, rank: int) -> tuple[tuple[int, ...], int, int] | None:
    """The rows of each shard where a rank gives so many, those of its result, and the most rows of their class; None if that cannot
    be."""
    known = OPERATORS[operator]
    shards = known.shards(rows, ranks)
    return None if shards is None else (tuple(shards), known.kept(shards, rank), size_class(max(shards)))


def _same(given: Iterable[object], asked: Iterable[object]) -> bool:
    """Whether these are the very things that were asked for."""
    return [*map(id, given)] == [*map(id, asked)]
