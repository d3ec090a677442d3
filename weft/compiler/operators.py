"""The fused operators by the name of a process group, as compiled graphs have them in the place of
functional collectives.

They are overloads of weft's custom operators, `torch.ops.weft.all_gather_matmul.group` and so on.
Graphs that name groups, as those of torch do, are alike on all ranks and in the next process, so
torch may keep them on disk for all of these.

Each gives one more result, an empty tensor, which the next takes as `after`: a compiler orders what
is independent as it likes, by the sizes of tensors for instance, and so could choose one order here
and another on the next rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from weft.errors import WeftError
from weft.ops import autograd, dims, fused
from weft.ops.call import Given, Options
from weft.process_group import worlds

assert autograd  # it defines the operators of which these are overloads
_library = torch.library.Library("weft", "FRAGMENT")
NAMES: dict[Any, str] = {}
"""The overloads, each with the name of its operator."""


def _overload(name: str, takes: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    _library.define(
        f"{name}.group({takes}, str group, Tensor? after) -> Tensor[]",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    _library.impl(f"{name}.group", partial(run, name), "CPU")
    torch.library.register_fake(f"weft::{name}.group", shapes, lib=_library)
    made = getattr(torch.ops.weft, name).group
    NAMES[made] = name
    return made


def group_of(name: str) -> dist.ProcessGroup | None:
    """The process group of this name, if it is there."""
    resolved: Any = distributed_c10d
    try:
        found: dist.ProcessGroup = resolved._resolve_process_group(name)
    except RuntimeError:
        return None
    return found


def _run(operator: str, name: str, given: Given, options: Options) -> Any:
    group = group_of(name)
    world = None if group is None else worlds.of(group)
    if group is None or world is None:
        raise WeftError(
            f"process group {name!r} has no world any more: what was compiled for it is of no use"
        )

    def call() -> Any:
        with torch.no_grad():  # on whichever thread this is
            return fused.run(fused.check(operator, world, given, options))

    return worlds.in_turn(group, call)


def _gather(operator: str, *inputs: Any) -> list[Tensor]:
    """The results, and the gathered a if it is to be kept."""
    a, weights, biases, dim, keep, _, group, _ = inputs
    results, gathered = _run(
        operator, group, Given(a, weights, biases, [None] * len(weights)), Options(dim, keep=keep)
    )
    return [*results, *([gathered] if keep else []), a.new_empty(0)]


def _gather_shapes(*inputs: Any) -> list[Tensor]:
    a, weights, _, dim, keep, ranks, *_ = inputs
    whole = dims.resized(a.shape, dim, a.shape[dim] * ranks)
    return [
        *(a.new_empty(*whole[:-1], b.shape[1]) for b in weights),
        *([a.new_empty(whole)] if keep else []),
        a.new_empty(0),
    ]


def _sum(operator: str, *inputs: Any) -> list[Tensor]:
    """The sum, to which each rank adds a bias of its own."""
    a, b, bias, op, dim, _, group, _ = inputs
    return [
        _run(operator, group, Given(a, [b], [bias], [None]), Options(dim or 0, op, own_bias=True)),
        a.new_empty(0),
    ]


def _sum_shapes(*inputs: Any) -> list[Tensor]:
    a, b, _, _, dim, ranks, *_ = inputs
    whole = (*a.shape[:-1], b.shape[1])
    return [
        a.new_empty(whole if dim is None else dims.resized(whole, dim, whole[dim] // ranks)),
        a.new_empty(0),
    ]


_GATHERED = "Tensor a, Tensor[] weights, Tensor?[] biases, SymInt dim, bool keep, SymInt ranks"
_SUMMED = "Tensor a, Tensor b, Tensor? bias, str op, SymInt? dim, SymInt? ranks"
ALL_GATHER_MATMUL = _overload("all_gather_matmul", _GATHERED, _gather, _gather_shapes)
MATMUL_REDUCE_SCATTER = _overload("matmul_reduce_scatter", _SUMMED, _sum, _sum_shapes)
MATMUL_ALL_REDUCE = _overload("matmul_all_reduce", _SUMMED, _sum, _sum_shapes)
