"""The differences between two calls, as errors show calls, and what would make them equal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple


def difference(one: str, other: str) -> str:
    """A phrase for how two calls differ, each ``operator(shape dtype, option=value, …)``."""
    if one.partition("(")[0] != other.partition("(")[0]:
        return "operators differ"
    found = [
        part
        for part, pattern in _PARTS.items()
        if re.findall(pattern, one) != re.findall(pattern, other)
    ]
    options, others = [dict(re.findall(r"(\w+)=([^=]*)(?:, |\))", call)) for call in (one, other)]
    dtypes = {
        name for name, value in (options | others).items() if re.search(_PARTS["dtypes"], value)
    }
    found += [
        name
        for name in options | others
        if name not in dtypes and options.get(name) != others.get(name)
    ]
    one_option = len(found) == 1 and found[0] not in _PARTS
    return f"{' and '.join(found) or 'arguments'} differ{'s' if one_option else ''}"


_PARTS = {
    "shapes": r"\(\d*,[\d, ]*\)|\[[\d, ]*\] rows x \d+|\(\) ",
    "dtypes": r"\b(?:b?float|u?int|bool|complex)\w*",
}

_GATHERING = ("all_gather", "all_gather_matmul")
"""Operators to which ranks may give different numbers of rows, by `shard_rows`."""


class _Tensor(NamedTuple):
    """The tensor of a call."""

    operator: str
    shape: list[int]
    dtype: str
    dim: int


def cure(calls: Mapping[int, str], ranks: int) -> str:
    """What would make the calls of two of so many ranks equal, "" if it is not known."""
    (one_rank, one), (other_rank, other) = calls.items()
    mine, theirs = _tensor(one), _tensor(other)
    if one.partition("(")[0] != other.partition("(")[0]:
        return "look for a branch, or a loop of another length, that depends on the rank"
    if re.match(r"\w*matmul\w*\(.*, plan \w+\)$", one):
        return (
            "pass one chunk_rows= and one order= on all ranks, and b packed, or requiring "
            "gradients, on all or on none"
        )
    if "experts_of_ranks" in _options(one) | _options(other):
        return "pass the number of weights of each rank as experts_of_ranks= on all ranks"
    if mine is None or theirs is None:
        return ""
    if mine.shape != theirs.shape:
        return _of_shapes({one_rank: mine, other_rank: theirs}, ranks)
    if mine.dtype != theirs.dtype:
        return f"convert one of them, as by .to(torch.{mine.dtype}) on rank {other_rank}"
    names = [name for name in _options(one) if _options(one)[name] != _options(other).get(name)]
    return f"pass one {names[0]}= on all ranks" if names else ""


def _of_shapes(tensors: Mapping[int, _Tensor], ranks: int) -> str:
    operator, _, _, dim = next(iter(tensors.values()))
    shapes = [each.shape for each in tensors.values()]
    differing = [*_axes(*shapes)]
    if operator in _GATHERING and differing == [dim]:
        rows = {rank: each.shape[dim] for rank, each in tensors.items()}
        if ranks == len(rows):
            return f"pass shard_rows={[*rows.values()]} on all ranks, if their rows differ"
        shown = " and ".join(f"{count} on rank {rank}" for rank, count in rows.items())
        return f"pass the rows of every rank as shard_rows= on all ranks, here {shown}"
    if operator == "all_gather_matmul" and len(shapes[0]) - 1 in differing:
        return "pass rows of one K, the columns of a and the rows of b, on all ranks"
    return "pass tensors of one shape on all ranks, such as batches of one length"


def _axes(one: list[int], other: list[int]) -> Iterator[int]:
    """The dimensions in which two shapes differ, all if their numbers do."""
    for axis in range(max(len(one), len(other))):
        if len(one) != len(other) or one[axis] != other[axis]:
            yield axis


def _tensor(call: str) -> _Tensor | None:
    found = re.match(r"(\w+)\((?:\w+=)?\(([\d, ]*)\) (\w+)", call)
    if not found:
        return None
    shape = [int(size) for size in found[2].split(",") if size.strip()]
    dim = int(_options(call).get("dim", "0"))
    return _Tensor(found[1], shape, found[3], dim % max(1, len(shape)))


def _options(call: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=([^=]*?)(?:, (?=\w+=)|\)$)", call))
