"""The operands and the options of fused operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar, get_type_hints

import torch
from torch import Tensor

from weft.checks import check_dtype, check_size, check_timeout, integer, integers, name
from weft.kernels.matmul import MATMUL
from weft.kernels.weights import Weight, packed
from weft.ops.records import Sizes
from weft.plan import Kernel
from weft.schedules.workload import Workload


class Options(Protocol):
    """The options of a call of any operator, one of `weft.ops.records`: these, and others."""

    @property
    def algorithm(self) -> str: ...

    @property
    def chunk_rows(self) -> int | None: ...


Record = TypeVar("Record", bound=Options)


def _check_integer(value: object, name: str) -> None:
    check_size(abs(integer(value, f"{name} must be an integer")), name)


def _check_text(value: object, name: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a text; got {value!r}")


class _Kind(NamedTuple):
    """A type of options: its name in schemas of torch, and its check."""

    schema: str
    check: Callable[[Any, str], object]


_KINDS: Mapping[Any, _Kind] = {
    int: _Kind("SymInt", _check_integer),
    int | None: _Kind("SymInt?", _check_integer),
    Sequence[int] | None: _Kind("SymInt[]?", integers),
    Sizes: _Kind("SymInt[]?", integers),
    bool: _Kind("bool", lambda value, name: None),
    str: _Kind("str", _check_text),
    str | None: _Kind("str?", _check_text),
    float | None: _Kind("float?", lambda value, name: check_timeout(value)),
    torch.dtype | None: _Kind("ScalarType?", check_dtype),
}


@lru_cache
def _kinds(record: type[Options]) -> Mapping[str, _Kind]:
    """The types of a record's fields."""
    return {name: _KINDS[kind] for name, kind in get_type_hints(record).items()}


def schema(record: type[Options]) -> str:
    """The options of a record as arguments in the schema of an operator of torch."""
    return ", ".join(f"{kind.schema} {name}" for name, kind in _kinds(record).items())


def check_types(options: Options) -> None:
    """Raise `TypeError` or `ValueError` for an option that does not match the type in its
    schema.
    """
    for each, kind in _kinds(type(options)).items():
        value = getattr(options, each)
        if value is not None or not kind.schema.endswith("?"):
            kind.check(value, each)


def made(record: type[Record], **values: Any) -> Record:
    """A record with those of these values of which it has fields."""
    return record(**{name: value for name, value in values.items() if name in _kinds(record)})


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
    """The workload of a call; several weights count as one of all their columns. Rows with
    companions count as staged, since companions are in separate memory.
    """
    a, weights, _, _ = operands
    columns, dtypes = sum([b.shape[1] for b in weights]), (name(a.dtype), name(out_dtype))
    kernel = kernel_of(weights[0])
    return Workload(
        operator,
        rows,
        a.shape[-1],
        columns,
        *dtypes,
        packed(weights),
        symmetric and not kernel.companions,
        kernel="" if kernel is MATMUL else kernel.name,
    )
