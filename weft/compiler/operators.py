"""Overloads of the fused operators that name a process group, which compiled graphs use in place of
functional collectives: `torch.ops.weft.all_gather_matmul.group` and so on.

Graphs that refer to groups by name, as torch's own graphs do, are equal on all ranks and in later
processes, so torch can share them in its cache on disk.

Each overload returns one more result, an empty tensor, which the next one takes as `after`: without
this dependency a compiler could order the operators differently on each rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from weft.compiler.custom import define
from weft.errors import WeftError
from weft.ops import driver, operator
from weft.ops.operator import FusedOperator, Pattern, Recorded
from weft.ops.options import Operands, made
from weft.process_group import worlds
from weft.schedules.operators import OPERATORS

_SCHEMA = (
    "(Tensor a, Tensor[] weights, Tensor?[] biases, str op, SymInt dim, bool keep, SymInt? ranks, "
    "str group, Tensor? after) -> Tensor[]"
)


def _overload(fused_operator: FusedOperator) -> Any:
    """The overload ``group`` of a custom operator, whose world is that of a process group."""
    name, fake = fused_operator.name, fused_operator.fake
    assert fake is not None

    def run(*inputs: Any) -> list[Tensor]:
        a, weights, biases, op, dim, keep, _, group, _ = inputs
        operands = Operands(a, weights, biases, [None] * len(weights))
        options = made(fused_operator.options, dim=dim, op=op, keep=keep, own_bias=True)
        return [*_run(fused_operator, group, operands, options), a.new_empty(0)]

    def shapes(*inputs: Any) -> list[Tensor]:
        a, weights, _, op, dim, keep, ranks, *_ = inputs
        options = made(fused_operator.options, dim=dim, op=op, keep=keep)
        call = Recorded(a, weights, [], options, None, (0, 0, ranks))
        return [*fake(call), a.new_empty(0)]

    return define(f"{name}.group{_SCHEMA}", run, shapes)


def group_of(name: str) -> dist.ProcessGroup | None:
    """The process group of this name, None if it does not exist."""
    resolved: Any = distributed_c10d
    try:
        found: dist.ProcessGroup = resolved._resolve_process_group(name)
    except RuntimeError:
        return None
    return found


def _run(
    fused_operator: FusedOperator, name: str, operands: Operands, options: Any
) -> list[Tensor]:
    group = group_of(name)
    world = None if group is None else worlds.find(group)
    if group is None or world is None:
        raise WeftError(
            f"process group {name!r} no longer has a world, which graphs compiled for it need: "
            "make one with weft.enable_async_tp(group), on all of its ranks"
        )

    with world.failure.report_rejection:
        results: list[Tensor] = worlds.run_in_order(
            group, partial(driver.call, fused_operator, world, operands, options, None)
        )
        return results


COLLECTIVES: dict[Any, list[tuple[str, Pattern]]] = {}
"""The functional collectives of torch, each with the operators that can replace it."""
OVERLOADS: dict[str, Any] = {}
"""The overloads by the names of their operators."""
for found in map(operator.find, OPERATORS):
    if found.pattern is not None:
        collective = getattr(torch.ops._c10d_functional, found.pattern.collective).default
        COLLECTIVES.setdefault(collective, []).append((found.name, found.pattern))
        OVERLOADS[found.name] = _overload(found)
NAMES: Mapping[Any, str] = {overload: name for name, overload in OVERLOADS.items()}
