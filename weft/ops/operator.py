"""The half of an operator's record that handles tensors; the planner's half is
`weft.schedules.workload.Operator`, or `Collective`.

Every module of this package with the name of an operator ends with its record, `OPERATOR`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple

from torch import Tensor

from weft.ops.arguments import as_key
from weft.ops.collective import CollectiveCall, describe, options_of
from weft.ops.fused import FusedCall
from weft.ops.options import Operands, Options
from weft.schedules.workload import Collective, Operator
from weft.world import World

SPLIT_SIZES = "input_split_sizes", "output_split_sizes"
"""Arguments that ranks exchange in the call."""
EXCHANGED = (
    "split sizes are exchanged by the call itself, and explain sends nothing: leave them out"
)
"""Why calls with split sizes are not explained."""


class Recorded(NamedTuple):
    """The arguments of a call that torch records.

    There is a bias for each weight, an empty tensor if the weight has none; or no bias at all.
    `world` is (number, rank, ranks).
    """

    a: Tensor
    weights: Sequence[Tensor]
    biases: Sequence[Tensor]
    options: Any
    timeout: float | None
    world: Sequence[int]


Gradients = tuple[Tensor | None, Sequence[Tensor | None], Sequence[Tensor | None]]
"""The gradients of a, of each weight and of each bias."""


class Gradient(NamedTuple):
    """A backward formula.

    `save` stores the tensors and options that `backward` needs in torch's context; `backward`
    takes the gradient of each result.
    """

    save: Callable[[Any, Recorded, Sequence[Tensor]], None]
    backward: Callable[[Any, Sequence[Tensor | None]], Gradients]


class Exchange(NamedTuple):
    """The arguments of a functional collective of torch: its rows, the name of its process group,
    the number of ranks if rows are gathered or divided, and the reduction of a sum.
    """

    rows: Any
    group: str
    ranks: Any = None
    op: str = "sum"


class Pattern(NamedTuple):
    """The nodes of a compiled graph that an operator replaces: a functional collective of torch,
    and the products of its result (``after``) or of its operand (``before``).

    `exchange` reads the arguments of the collective; it returns None for arguments with which the
    operator cannot replace it. Several operators may have patterns of one collective. `any_dim`:
    rows may be gathered or divided along any dimension, the operator's ``dim``. `keeps`: the
    collective's result can be a result of the operator, too, by ``keep``.
    """

    collective: str
    product: Literal["before", "after"]
    exchange: Callable[..., Exchange | None]
    any_dim: bool = False
    keeps: bool = False


@dataclass(frozen=True)
class CollectiveOperator:
    """A collective: its planner's record, and `check`, which returns a checked call; its options
    follow the world, the input and the output.
    """

    schedule: Collective
    check: Callable[..., CollectiveCall]

    def call(self, world: World, a: Tensor, options: Mapping[str, Any]) -> CollectiveCall:
        """A checked call on `a` with a new result, and with these options among others. Raises the
        errors of the operator, and `ValueError` for split sizes, which a call exchanges.
        """
        names = options_of(self.check)
        if any(options.get(name) is not None for name in SPLIT_SIZES):
            raise ValueError(EXCHANGED)
        values = tuple(
            as_key(value) if isinstance(value := options[name], list) else value for name in names
        )
        call = self.check(world, a, None, *values)
        call.description = describe(call.name, a, self.check, values)
        return call


@dataclass(frozen=True)
class FusedOperator:
    """A fused operator: its planner's record, the type of its options (`weft.ops.records`), and how
    it handles tensors.

    `check` returns a checked call. `reference` is the definition: it computes each rank's result
    from each rank's input and weight, and the numbers of rows of the results. `fake` returns the
    results of a recorded call without data; an operator without it can neither be differentiated
    nor compiled. `exchange`, of an operator with split sizes, returns the options with those of all
    ranks; collective.
    """

    schedule: Operator
    options: type[Options]
    check: Callable[[World, Operands, Any], FusedCall]
    reference: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[int]], Sequence[Tensor]]
    fake: Callable[[Recorded], list[Tensor]] | None = None
    gradient: Gradient | None = None
    pattern: Pattern | None = None
    exchange: Callable[[World, Operands, Any, float | None], Any] | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` for a record that compiles an operator without `fake`."""
        if self.fake is None and (self.gradient or self.pattern):
            raise ValueError(f"{self.name}: gradient= and pattern= require fake=")

    def checked(
        self, world: World, operands: Operands, options: Any, companions: Sequence[Tensor] = ()
    ) -> FusedCall:
        """A checked call, in which the rows of ``a`` have these companions."""
        call = self.check(world, operands, options)
        call.carry(companions)
        return call

    def exchanged(
        self, world: World, operands: Operands, options: Any, timeout: float | None
    ) -> Any:
        """The options, with the split sizes of all ranks if they have some; collective then."""
        return (
            options if self.exchange is None else self.exchange(world, operands, options, timeout)
        )

    @property
    def name(self) -> str:
        """The name of the public function and of its module."""
        return self.schedule.name


def find(name: str) -> FusedOperator:
    """The fused operator of this name."""
    found = find_any(name)
    assert isinstance(found, FusedOperator)
    return found


def find_any(name: str) -> FusedOperator | CollectiveOperator:
    """The operator of this name."""
    operator: FusedOperator | CollectiveOperator = import_module(f"weft.ops.{name}").OPERATOR
    return operator


def function(name: str) -> Callable[..., Any]:
    """The public function of the operator of this name."""
    found: Callable[..., Any] = getattr(import_module(f"weft.ops.{name}"), name)
    return found
