"""The common part of the public functions of fused operators: repeat a cached call, else let torch
record it, else check and execute it. A rejected call is reported to peers, which may wait in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft import _native
from weft.checks import check_timeout
from weft.kernels.weights import Weight
from weft.ops import arguments, autograd, driver, float8
from weft.ops.operator import FusedOperator
from weft.ops.options import Operands
from weft.ops.records import Exchanged
from weft.ops.rejections import report
from weft.world import World, current


def call(
    operator: FusedOperator,
    a: Tensor,
    b: Weight | Sequence[Weight],
    bias: Tensor | Sequence[Tensor | None] | None,
    out: Tensor | Sequence[Tensor] | None,
    options: tuple[Any, ...],
    world: World | None,
    timeout: float | None,
    scales: tuple[Any, Any] = (None, None),
    companions: tuple[Tensor, ...] = (),
) -> tuple[list[Tensor], Any]:
    """The results of a call, one for each weight, and what its options ask for beside; and the
    record of its options, with the sizes that ranks have exchanged; None of a call that is repeated
    without. `options` are the values of the record, `scales` those of a and b, and `companions`
    those of the rows of `a` that the kernel of its weights takes.
    """
    try:
        # no union: the compiler of torch 2.9 does not know them
        several = isinstance(b, (list, tuple)) and operator.schedule.several_weights
        weights: list[Weight] = [*b] if several else [b]  # type: ignore[list-item, misc]
        biases: list[Any] = arguments.listed(bias, weights, several, "bias") if several else [bias]
        check = operator.check
        # `isinstance(out, Tensor)` would take a tenth of a repeated call
        rows: Any = (a, *companions) if companions else a
        scale_a, scale_b = scales
        repeatable = scale_a is None and scale_b is None and not isinstance(out, (list, tuple))
        if repeatable and not torch.compiler.is_compiling():
            found: Any = _native.repeat(check, options, rows, out, weights, biases, world, timeout)
            if found is not None:
                return found if isinstance(found, list) else [found], None
        key: Any = (check, options, rows, out, weights, biases) if repeatable else None
        world = current(world)
        check_timeout(timeout)
        record: Any = operator.options(*options)
        # an exchange of rows has one result for all weights
        several_results = several and operator.exchange is None
        outs = arguments.listed(out, weights, several_results, "out")
        scales_b = arguments.listed(scale_b, weights, several, "scale_b")
        weights, of_rows = float8.scaled(a, weights, scale_a, scales_b, world)
        operands = Operands(a, weights, biases, outs)
        if arguments.recorded([a, *weights, *biases, *outs]):
            return _recorded(operator, operands, out, record, timeout, world)
        record = operator.exchanged(world, operands, record, timeout)
        sizes = getattr(record, "input_split_sizes", None)
        if isinstance(sizes, Exchanged):
            key = (check, record, rows, out, weights, biases) if key and sizes.again else None
            if key is not None and (found := driver.repeat(key, world, timeout)) is not None:
                return [found], record
        beside = *companions, *of_rows
        made = driver.call(operator, world, operands, record, timeout, key, beside)
        return made, record
    except Exception as error:
        report(error, world)
        raise


def _recorded(
    operator: FusedOperator,
    operands: Operands,
    out: object,
    record: Any,
    timeout: float | None,
    world: World,
) -> tuple[list[Tensor], Any]:
    """The results of a call that torch records: the rows that the gradients of weights need are
    kept, and ranks exchange sizes before it on which shapes depend.
    """
    a, weights, biases, _ = operands
    if "keep" in record._fields and any(getattr(b, "requires_grad", False) for b in weights):
        record = record._replace(keep=True)
    arrives = "output_split_sizes" in record._fields and record.output_split_sizes is None
    if arrives and record.input_split_sizes is not None:
        if torch.compiler.is_compiling():
            raise ValueError(
                "the shapes of a compiled graph cannot depend on what arrives: give "
                "output_split_sizes"
            )
        every = operator.exchanged(world, operands, record, timeout).input_split_sizes
        record = record._replace(output_split_sizes=every.received)
    custom = getattr(torch.ops.weft, operator.name).default
    return autograd.call(custom, a, weights, biases, out, record, timeout, world), record
