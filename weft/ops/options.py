"""The operands and the options of fused operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.checks import check_dtype, check_size, check_timeout, integer, integers, name
from weft.kernels.matmul import MATMUL
from weft.kernels.weights import Weight, packed
from weft.plan import Kernel
from weft.schedules.workload import Workload

_SCHEMA_OF = {
    "int": "SymInt",
    "int | None": "SymInt?",
    "Sequence[int] | None": "SymInt[]?",
    "bool": "bool",
    "str": "str",
    "str | None": "str?",
    "float | None": "float?",
    "torch.dtype | None": "ScalarType?",
}
"""The types of torch's operators by those of options."""


def _check_integer(value: object, name: str) -> None:
    check_size(abs(integer(value, f"{name} must be an integer")), name)


def _check_text(value: object, name: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a text; got {value!r}")


_CHECKS: Mapping[str, Callable[[Any, str], object]] = {
    "int": _check_integer,
    "Sequence[int]": integers,
    "bool": lambda value, name: None,
    "str": _check_text,
    "float": lambda value, name: check_timeout(value),
    "torch.dtype": check_dtype,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a call, as in the operators' docstrings.

    `keep`: the gathered a is a result too. `own_bias`: each rank adds a bias of its own to its
    product, so all are summed. `order`: one of `ORDERS`, for an algorithm that can send in any of
    them; None is the first. `compress`: how rows travel between hosts. The split sizes are those of
    an exchange of uneven parts, `experts_of_ranks` the numbers of weights of each rank there.
    """

    dim: int = 0
    op: str = "sum"
    out_dtype: torch.dtype | None = None
    keep: bool = False
    shard_rows: Sequence[int] | None = None
    algorithm: str = "auto"
    chunk_rows: int | None = None
    timeout: float | None = None
    own_bias: bool = False
    order: str | None = None
    compress: str | None = None
    input_split_sizes: Sequence[int] | None = None
    output_split_sizes: Sequence[int] | None = None
    experts_of_ranks: Sequence[int] | None = None

    @classmethod
    def schema(cls) -> str:
        """The options as arguments in the schema of one of torch's operators."""
        return ", ".join(f"{_SCHEMA_OF[str(each.type)]} {each.name}" for each in fields(cls))

    def values(self) -> tuple[Any, ...]:
        """The options in the order of their fields, as the arguments of torch's operators."""
        return tuple([getattr(self, field.name) for field in fields(self)])

    def check_types(self) -> None:
        """Raise `TypeError` or `ValueError` for an option that is of no type of its schema."""
        for each in fields(self):
            value, kind = getattr(self, each.name), str(each.type)
            if value is None and kind.endswith("None"):
                continue
            _CHECKS[kind.removesuffix(" | None")](value, each.name)

    @classmethod
    def of(cls, values: Sequence[Any]) -> Options:
        """The inverse of `values`."""
        return cls(**dict(zip([field.name for field in fields(cls)], values, strict=True)))


class Operands(NamedTuple):
    """The tensors of a call: this rank's rows, the weights, and for each weight its bias and its
    output, or None.
    """

    a: Tensor
    weights: Sequence[Weight]
    biases: Sequence[Tensor | None]
    outs: Sequence[Tensor | None]


def kernel_of(weight: Weight) -> Kernel:
    """The kernel of products by a weight."""
    return MATMUL if isinstance(weight, Tensor) else weight.kernel or MATMUL


def workload(
    operator: str,
    rows: tuple[int, ...],
    operands: Operands,
    out_dtype: torch.dtype,
    symmetric: bool = True,
) -> Workload:
    """The workload of a call; several weights count as one of all their columns."""
    a, weights, _, _ = operands
    columns, dtypes = sum([b.shape[1] for b in weights]), (name(a.dtype), name(out_dtype))
    return Workload(operator, rows, a.shape[-1], columns, *dtypes, packed(weights), symmetric)
