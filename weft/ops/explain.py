"""The text on the variant that an operator would select for its arguments, and the reason."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.engines import engine
from weft.kernels.weights import Weight, words
from weft.ops import float8
from weft.ops.arguments import listed
from weft.ops.autotune import expected
from weft.ops.call import Choice
from weft.ops.fused import FusedCall
from weft.ops.operator import EXCHANGED, SPLIT_SIZES, FusedOperator, find_any, function
from weft.ops.options import Operands
from weft.schedules.operators import COLLECTIVES, OPERATORS
from weft.world import World


def of_operator(
    name: str,
    a: Tensor,
    b: Any,
    options: Mapping[str, Any],
    world: World,
    title: str | None = None,
    companions: Sequence[Tensor] = (),
) -> str:
    """The text on an operator, by its name, for these arguments, and `companions` of the rows of
    `a`.
    """
    found = find_any(name)
    given = (a,) if b is None and name in COLLECTIVES else (a, b)
    bound = inspect.signature(function(name)).bind(*given, **options, world=world)
    title = title or name
    with torch.no_grad():
        if isinstance(found, FusedOperator):
            operands, choices, scales = _operands(found, world, a, b, options)
            call = found.checked(world, operands, choices, (*companions, *scales))
            return text(title, call, [call])
        bound.apply_defaults()
        return text(title, found.call(world, a, bound.arguments))


def text(title: str, choice: Choice, products: Sequence[FusedCall] = ()) -> str:
    """The text on a choice, whose variants are those of `products` if it is one among fused
    operators.
    """
    for each in products:
        _check_products(each)
    notes = _of_products(products[0].world, products[0].weights) if products else ""
    selection = expected(choice)
    cut, details = choice.cut(selection.variant), choice.describe(selection.variant)
    ranks = choice.world.ranks
    lines = [f"{title} over {ranks} ranks: {cut}: {selection.reason}{details}{notes}"]
    lines += ["measured:"] if selection.measured else []
    lines += [f"  {ms:9.3f} ms  {choice.cut(variant)}" for variant, ms in selection.measured]
    return "\n".join(lines)


def _operands(
    found: FusedOperator,
    world: World,
    a: Tensor,
    b: Weight | Sequence[Weight] | None,
    options: Mapping[str, Any],
) -> tuple[Operands, Any, Sequence[Tensor]]:
    """The operands and the options of a call, and the scales of rows of float8."""
    several = isinstance(b, list | tuple)
    weights: list[Weight] = [*b] if several else [b]  # type: ignore[list-item, misc]
    if not weights or (len(weights) > 1 and not found.schedule.several_weights):
        names = ", ".join(name for name, each in OPERATORS.items() if each.several_weights)
        raise ValueError(
            f"b must be one weight, or several for {names}; got a list of {len(weights)} weights"
        )
    if any(options.get(name) is not None for name in SPLIT_SIZES):
        raise ValueError(EXCHANGED)
    given = {"keep" if name == "return_gathered" else name: options[name] for name in options}
    given.pop("return_split_sizes", None)
    biases = listed(given.pop("bias", None), weights, several, "bias")
    scales = listed(given.pop("scale_b", None), weights, several, "scale_b")
    weights, of_rows = float8.scaled(a, weights, given.pop("scale_a", None), scales, world)
    operands = Operands(a, weights, biases, [None] * len(weights))
    return operands, found.options(**given), of_rows


def _check_products(call: FusedCall) -> None:
    own, out_dtype = engine(call.world), getattr(torch, call.workload.out_dtype)
    for weight in call.weights:
        own.check_product(call.tensors["a"], weight, out_dtype)


def _of_products(world: World, weights: Sequence[Weight]) -> str:
    """Words on how products by these weights are computed."""
    own = engine(world)
    notes = f"{own.products}; " if own.products else ""
    notes += f"the comm lane has {world.comm_threads} threads; " if world.comm_threads > 1 else ""
    return f"; {notes}b is {words(weights)}"
