"""The reference engine of a world: each rank executes the plans of all ranks, with the reference
interpreter, on operands that ranks exchange as texts, by the sockets of the world.

Slow, and independent of shared memory, signals, threads and devices: programs and benchmarks run on
it to distinguish an error in a plan from one in an engine.
"""

from __future__ import annotations

import math
import pickle
from base64 import b64decode, b64encode
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import weft._native as _native
from weft.checks import name as dtype_name
from weft.engines import reference
from weft.engines.engine import Engine
from weft.engines.program import Dtypes, Program, Tensors, Weights, kinds, moves
from weft.errors import MismatchError
from weft.kernels.packed import PackedWeight
from weft.kernels.weights import Weight
from weft.plan import Plan, Region
from weft.plan.binding import bind
from weft.world import World
from weft.world.values import all_gather_texts


class ReferenceEngine(Engine):
    """Executes plans of a world, each in full on every rank."""

    products = "products by the reference interpreter"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.executions = 0

    def kind(self, tensors: Tensors, rows: Sequence[int]) -> Hashable:
        return (*rows, *((name, t.dtype, t.shape[1]) for name, t in tensors.items()))

    def compile(
        self,
        plan: Plan,
        tensors: Tensors,
        rows: Sequence[int],
        dtypes: Dtypes,
        options: Any,
    ) -> ReferenceProgram:
        return ReferenceProgram(self, plan, tensors, rows, dtypes)


class RankOperands(NamedTuple):
    """A rank's part of a call, as its peers get it."""

    call: str
    inputs: Mapping[str, Tensor]
    weights: Mapping[str, Any]
    biases: Mapping[str, Tensor]


class ReferenceProgram(Program):
    """A plan of all ranks for fixed numbers of rows."""

    engine: ReferenceEngine

    def __init__(
        self,
        engine: ReferenceEngine,
        plan: Plan,
        tensors: Tensors,
        rows: Sequence[int],
        dtypes: Dtypes,
    ) -> None:
        super().__init__(engine, plan)
        self.whole = bind(plan, rows)
        self.dtypes = dtypes
        self.check_tensors(tensors)
        found = {name: tensor.dtype for name, tensor in tensors.items()}
        self.kinds = kinds(moves(self.whole), found, dtypes)
        self.check_columns(tensors)
        self.compiled = _native.Compiled(plan.operator, 1, [], plan.ranks)

    def run_locked(
        self,
        tensors: Tensors,
        rows: Sequence[int],
        weights: Weights,
        bias: Tensors | None = None,
        timeout: float | None = None,
    ) -> None:
        with self.world.failure.fail_on_error:
            calls = self._exchange(tensors, weights, bias or {})
            outputs = {
                name: tensors[name].dtype
                for name, buffer in self.whole.buffers.items()
                if buffer.role == "output"
            }
            call = reference.Call(
                self.whole,
                [each.inputs for each in calls],
                [each.weights for each in calls],
                {**self.dtypes, **outputs},
                [each.biases for each in calls],
            )
            ((*results,),) = reference.run(call)
            for name in outputs:
                tensors[name].copy_(results[self.world.rank][name])

    def _exchange(self, tensors: Tensors, weights: Weights, bias: Tensors) -> list[RankOperands]:
        """The operands of all ranks. Raises `MismatchError` if a rank makes another call."""
        world = self.world
        number = self.engine.executions
        self.engine.executions += 1
        inputs = {
            name: tensors[name].contiguous()
            for name, buffer in self.whole.buffers.items()
            if buffer.role == "input"
        }
        plain = {name: _exchanged(weight) for name, weight in weights.items()}
        own = RankOperands(self._describe(tensors), inputs, plain, dict(bias))
        texts = all_gather_texts(world, b64encode(pickle.dumps(own)).decode())
        found: list[RankOperands] = [pickle.loads(b64decode(text)) for text in texts]
        for peer, theirs in enumerate(found):
            if theirs.call != own.call:
                raise MismatchError.between(number, world.rank, own.call, peer, theirs.call)
        return found

    def _describe(self, tensors: Tensors) -> str:
        """The user's call, and the values that must be equal on all ranks."""
        plan = self.whole
        sizes = ", ".join(
            f"{name}={[*buffer.rows]} rows x {tensors[name].shape[1]} "
            f"{dtype_name(tensors[name].dtype)}"
            for name, buffer in plan.buffers.items()
            if name in self.agreed and name in tensors
        )
        return f"{plan.operator}({sizes})\nalgorithm={plan.algorithm}, plan {plan.digest:08x}"

    def bind(self, tensors: Tensors, rows: Sequence[int], description: str = "") -> Any:
        """The tensors themselves, which `execute` and `start` take."""
        return tensors

    def execute(self, binding: Any, timeout: float | None = None) -> None:
        self.run_locked(binding, (), {}, timeout=timeout)

    def start(self, binding: Any, retained: object = None, timeout: float | None = None) -> None:
        """Execute at once."""
        self.execute(binding, timeout)

    def done(self) -> bool:
        return True

    def join(self, timeout: float = math.inf) -> bool:
        return True

    def stop(self, timeout: float) -> None:
        pass

    def rows_of(self, region: Region) -> tuple[int, int]:
        return region.start, region.stop


def _exchanged(weight: Weight) -> Weight:
    """The weight as a peer gets it, of a packed one its tensor; in float32 at least, in which
    products are then added up.
    """
    plain = weight.plain if isinstance(weight, PackedWeight) else weight
    if not isinstance(plain, Tensor):
        return plain
    return plain.to(torch.promote_types(plain.dtype, torch.float32))
