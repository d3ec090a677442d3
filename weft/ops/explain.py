"""A text on the variant that a fused operator would select for its arguments, and the reason."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.engines import engine
from weft.kernels.weights import Weight, words
from weft.ops import float8
from weft.ops.arguments import listed
from weft.ops.autotune import expected
from weft.ops.call import Call, Operands, Options
from weft.ops.operator import find
from weft.predict import machine, rank
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Variant
from weft.world import World, current


def explain(
    a: Tensor,
    b: Weight | Sequence[Weight],
    *,
    operator: str = "all_gather_matmul",
    dim: int = 0,
    op: str = "sum",
    bias: Tensor | Sequence[Tensor | None] | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | Sequence[Tensor | None] | None = None,
    out_dtype: torch.dtype | None = None,
    return_gathered: bool = False,
    shard_rows: Sequence[int] | None = None,
    algorithm: str = "auto",
    chunk_rows: int | None = None,
    order: str | None = None,
    world: World | None = None,
) -> str:
    """A text that names the variant that `operator` would select for these arguments, the reason,
    and the measured and predicted times of other variants.

    Not collective; nothing is sent. For ``auto``, if rank 0 has not selected yet, it is the variant
    that this rank would select.

    `operator` is the name of a fused operator, such as ``matmul_all_reduce``; other arguments are
    the operator's. Raises the `ValueError` or `TypeError` that the operator would raise.

    Examples:
        >>> a, b = torch.randn(64, 32), weft.pack(torch.randn(32, 16))
        >>> with weft.local_world(2) as local:
        ...     print(local.run(lambda: weft.explain(a, b, algorithm="ring"))[0])
        all_gather_matmul over 2 ranks: ring, at most 64 rows per transfer: as asked for; ...
    """
    world = current(world)
    if operator not in OPERATORS:
        raise ValueError(f"there is no operator {operator!r}; choose one of {', '.join(OPERATORS)}")
    several = isinstance(b, list | tuple)
    weights: list[Weight] = [*b] if several else [b]  # type: ignore[list-item, misc]
    if not weights or (len(weights) > 1 and not OPERATORS[operator].several_weights):
        names = ", ".join(name for name, found in OPERATORS.items() if found.several_weights)
        raise ValueError(
            f"b must be one weight, or several for {names}; got a list of {len(weights)} weights"
        )
    biases = listed(bias, weights, several, "bias")
    scales = listed(scale_b, weights, several, "scale_b")
    with torch.no_grad():
        rows, weights = float8.scaled(a, weights, scale_a, scales, world)
        options = Options(
            dim,
            op,
            out_dtype,
            return_gathered,
            shard_rows,
            algorithm,
            chunk_rows,
            order=order,
        )
        operands = Operands(rows, weights, biases, [None] * len(weights))
        call = find(operator).check(world, operands, options)
        selection, own = expected(call), engine(world)
    for weight in call.weights:
        own.check_product(call.tensors["a"], weight, getattr(torch, call.workload.out_dtype))
    notes = f"{own.products}; " if own.products else ""
    notes += f"the comm lane has {world.comm_threads} threads; " if world.comm_threads > 1 else ""
    details = call.describe(selection.variant)
    lines = [
        f"{operator} over {world.ranks} ranks: {call.cut(selection.variant)}: "
        f"{selection.reason}{details}; {notes}b is {words(weights)}"
    ]
    for kind, times in (("measured", selection.measured), ("predicted", _predicted(call))):
        lines += [f"{kind}:"] if times else []
        lines += [f"  {ms:9.3f} ms  {call.cut(variant)}" for variant, ms in times]
    return "\n".join(lines)


def _predicted(call: Call) -> list[tuple[Variant, float]]:
    """The predicted milliseconds of a call's variants on this machine, fastest first; empty if
    ``weft calibrate`` has not measured the machine, this dtype or the network.
    """
    world, workload, profile = call.world, call.workload, machine.calibrated()
    model = machine.from_dict(profile) if profile else None
    if model is None or not call.tunable or not model.multiplies(workload.dtype):
        return []
    if world.topology is not None:
        if model.network is None:
            return []
        model = model.over(world.topology)
    elif world.emulated_link:
        model = model.emulating(*world.emulated_link)
    return [(variant, 1e3 * seconds) for variant, seconds in rank(workload, model)]
