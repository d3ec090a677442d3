"""A text on the variant that an operator would select for its arguments, and the reason."""

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
from weft.ops.call import Call
from weft.ops.expert_sums import check_routing, factors
from weft.ops.fused import FusedCall
from weft.ops.moe import moe
from weft.ops.operator import EXCHANGED, SPLIT_SIZES, FusedOperator, find_any, function
from weft.ops.options import Operands, Options
from weft.schedules.operators import COLLECTIVES, OPERATORS
from weft.schedules.workload import Variant
from weft.world import World, current


def explain(
    a: Tensor,
    b: Weight | Sequence[Weight] | None = None,
    *,
    operator: str = "all_gather_matmul",
    world: World | None = None,
    **options: Any,
) -> str:
    """A text that names the variant that `operator` would select for these arguments, the reason,
    and the measured and predicted times of other variants.

    Not collective; nothing is sent. If the ranks have not selected yet, it is the variant that this
    rank would propose.

    `operator` is the name of a fused operator, such as ``matmul_all_reduce``, or of a collective,
    such as ``all_gather``, which has no `b`; `options` are the operator's, without `out` and
    `timeout`. Of ``moe`` a are the tokens and b the experts, and `chosen` and `scores` are options.
    Calls whose sizes ranks tell each other, by split sizes or `experts_of_ranks`, are a
    `ValueError`. Raises the `ValueError` or `TypeError` that the operator would raise.

    Examples:
        >>> a, b = torch.randn(64, 32), weft.pack(torch.randn(32, 16))
        >>> with weft.local_world(2) as local:
        ...     print(local.run(lambda: weft.explain(a, b, algorithm="ring"))[0])
        all_gather_matmul over 2 ranks: ring, at most 64 rows per transfer: as asked for; ...
        >>> with weft.local_world(2) as local:
        ...     print(local.run(lambda: weft.explain(a, operator="all_reduce"))[0])
        all_reduce over 2 ranks: eager, 1 piece per shard: the rule for its size and memory
    """
    world = current(world)
    names = ("moe", *OPERATORS, *(name for name in COLLECTIVES if name != "barrier"))
    if operator not in names:
        raise ValueError(f"there is no operator {operator!r}; choose one of {', '.join(names)}")
    title = operator
    if operator == "moe":
        operator, title = "matmul_all_reduce", "moe, by matmul_all_reduce,"
        a, b, options = _layer(a, b, options)
    found = find_any(operator)
    given = (a,) if b is None and operator in COLLECTIVES else (a, b)
    bound = inspect.signature(function(operator)).bind(*given, **options, world=world)
    call: Call
    notes, predicted = "", list[tuple[Variant, float]]()
    with torch.no_grad():
        if isinstance(found, FusedOperator):
            operands, choices = _operands(found, world, a, b, options)
            call = fused = found.check(world, operands, choices)
            _check_products(fused)
            notes, predicted = _of_products(world, operands.weights), _predicted(fused)
        else:
            bound.apply_defaults()
            call = found.call(world, a, bound.arguments)
        selection = expected(call)
    cut, details = call.cut(selection.variant), call.describe(selection.variant)
    lines = [f"{title} over {world.ranks} ranks: {cut}: {selection.reason}{details}{notes}"]
    for kind, times in (("measured", selection.measured), ("predicted", predicted)):
        lines += [f"{kind}:"] if times else []
        lines += [f"  {ms:9.3f} ms  {call.cut(variant)}" for variant, ms in times]
    return "\n".join(lines)


def _layer(x: Tensor, experts: Any, options: Mapping[str, Any]) -> tuple[Tensor, Weight, Any]:
    """The rows and the weight of a layer of experts whose tokens are on all ranks, and the options
    of their product.
    """
    bound = inspect.signature(moe).bind(x, experts=experts, **options)
    chosen, scores = bound.arguments["chosen"], bound.arguments["scores"]
    if options.get("experts_of_ranks") is not None:
        raise ValueError(EXCHANGED)
    check_routing(x, chosen, scores, experts)
    weight = experts.routed(chosen.shape[1])
    of_layer = ("chosen", "scores", "experts_of_ranks")
    others = {name: value for name, value in options.items() if name not in of_layer}
    with torch.no_grad():
        return weight.rows(x, chosen, factors(scores, x.dtype)), weight, others


def _operands(
    found: FusedOperator,
    world: World,
    a: Tensor,
    b: Weight | Sequence[Weight] | None,
    options: Mapping[str, Any],
) -> tuple[Operands, Options]:
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
    rows, weights = float8.scaled(a, weights, given.pop("scale_a", None), scales, world)
    return Operands(rows, weights, biases, [None] * len(weights)), Options(**given)


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


def _predicted(call: FusedCall) -> list[tuple[Variant, float]]:
    """The predicted milliseconds of a call's variants on this machine, fastest first; empty if
    ``weft calibrate`` has not measured the machine, this dtype or the network.
    """
    from weft.predict import machine, rank  # no part of the path of a call

    world, workload, profile = call.world, call.workload, machine.calibrated()
    model = machine.from_dict(profile) if profile else None
    if model is None or not call.tunable or not model.multiplies(workload.dtype):
        return []
    if world.hosts.several:
        if model.network is None:
            return []
        model = model.over(world.hosts)
    elif world.emulated_link:
        model = model.emulating(*world.emulated_link)
    return [(variant, 1e3 * seconds) for variant, seconds in rank(workload, model)]
