"""Calls of fused operators with a weight and options that were made before: only their rows are new.

What a call checks and decides of its weight and options is remembered, by the identity of the weight. For rows of a class that was
decided on it is then left to look at them, to make the result, and to bind and run the program.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.engines import engine
from weft.engines.engine import Program
from weft.engines.weights import PackedWeight, Weight, plain
from weft.ops import fused
from weft.ops.call import Call
from weft.ops.fused import Way
from weft.schedules.workload import size_class
from weft.world import World, memory

_REMEMBERED = 1024  # weights and options, per world
_WAYS = 256  # sizes of each, where an algorithm was asked for and so each is a class of its own


class Asked(NamedTuple):
    """A call of an operator with one weight, whose rows are matrices or whatever has them: what it is remembered by."""

    operator: str
    b: Weight
    bias: Tensor | None
    options: tuple[Hashable, ...]

    @property
    def name(self) -> Hashable:
        """What it is found by."""
        return self.operator, id(self.b), id(self.bias), self.options


def repeat(world: World, asked: Asked, a: Tensor) -> Tensor | None:
    """The result for these rows if such a call was made before; else None, with nothing done."""
    if world.engine is None or world.closed is not None:
        return None
    known: KnownCall | None = world.engine.known.get(asked.name)
    return None if known is None else known.repeat(asked, a)


def run(asked: Asked, call: Call) -> Any:
    """Carry out a checked call, and remember it."""
    known = engine(call.world).known
    result, way, settled = fused.carry_out(call)
    if settled and engine(call.world).remembers:
        if len(known) >= _REMEMBERED:
            known.clear()
        if asked.name not in known or not known[asked.name].matches(asked):
            known[asked.name] = KnownCall(asked, call)
        known[asked.name].add(asked, call, way)
    return result


class _Way(NamedTuple):
    """The program for a class of sizes, the buffer of its product, and whether this rank adds the bias."""

    program: Program
    product: str
    biased: bool


class KnownCall:
    """A call with a certain weight, bias and options, neither of which it keeps alive, and the way of each class of sizes."""

    def __init__(self, asked: Asked, call: Call) -> None:
        self.world, self.operator, self.decided = call.world, call.operator, call.key is not None
        self.b = memory.snapshot(plain(asked.b))
        self.bias = None if asked.bias is None else memory.snapshot(asked.bias)
        self.k, self.n = asked.b.shape
        self.dtype, self.out_dtype = call.tensors["a"].dtype, call.tensors["out"].dtype
        self.ways: dict[Hashable, _Way] = {}

    def matches(self, asked: Asked) -> bool:
        """Whether weight and bias are what they were."""
        return self.b.matches(plain(asked.b)) and (self.bias is None or self.bias.matches(asked.bias))

    def add(self, asked: Asked, call: Call, way: Way) -> None:
        """From now on go this way for calls like this, unless what it multiplies or adds is made of them anew each time."""
        if len(self.ways) >= _WAYS:
            self.ways.clear()
        [(product, weight)] = way.weights.items()
        if weight is asked.b and all(bias is asked.bias for bias in way.biases.values()):
            made = _Way(way.program, product, bool(way.biases))
            self.ways[self._class(call.workload.rows, call.workload.symmetric)] = made

    def _class(self, shards: Sequence[int], symmetric: bool) -> Hashable:
        return size_class(max(shards)) if self.decided else tuple(shards), symmetric, self.world.emulated_link

    def repeat(self, asked: Asked, a: Tensor) -> Tensor | None:
        """The result for these rows; None where anything is not as it was, or their class is new."""
        if a.dtype != self.dtype or a.shape[-1] != self.k:
            return None
        matrix = a if a.dim() == 2 else a.view(-1, self.k)
        shards, segment = self.operator.shards(matrix.shape[0], self.world.ranks), memory.find(matrix)
        if shards is None or (segment is not None and segment.world != self.world.number):
            return None
        way = self.ways.get(self._class(shards, segment is not None or self.operator.name != "all_gather_matmul"))
        if way is None or not self.matches(asked):
            return None
        if isinstance(asked.b, PackedWeight):
            asked.b.check_unchanged()
        out = torch.empty((self.operator.kept(shards, self.world.rank), self.n), dtype=self.out_dtype)
        bias = {way.product: asked.bias} if way.biased and asked.bias is not None else {}
        way.program.run({"a": matrix, "out": out}, shards, {way.product: asked.b}, bias)
        return out if a.dim() == 2 else out.view(*a.shape[:-1], self.n)
