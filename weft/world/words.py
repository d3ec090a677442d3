"""What ranks tell each other of themselves: JSON of a fixed form.

It comes from a store or over the network, where others may be able to write, so nothing of it is
run, and what has another form is refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist

Kind = TypeVar("Kind")


def words(value: object) -> bytes:
    """A value in words: a string, a number, bytes, or a list, set, dictionary, named tuple or
    dataclass of such.
    """
    return json.dumps(value, default=_plain, allow_nan=False, separators=(",", ":")).encode()


def meant(said: bytes, kind: type[Kind]) -> Kind:
    """The value of this kind that somebody put in words. Raises `ValueError` for anything else."""
    try:
        return cast(Kind, fitted(kind, json.loads(said, parse_constant=_refused)))
    except RecursionError:
        raise ValueError("lists in lists, too many of them") from None


def everyones(own: Kind, kind: type[Kind], group: dist.ProcessGroup | None = None) -> list[Kind]:
    """What each rank of a process group has of this kind; collective. Raises `ValueError` if one
    has something else.
    """
    said = torch.frombuffer(bytearray(words(own)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(said)]), group=group)
    parts = [torch.zeros(int(max(sizes)), dtype=torch.uint8) for _ in sizes]
    parts[dist.get_rank(group)][: len(said)] = said
    dist.all_gather(parts, parts[dist.get_rank(group)].clone(), group=group)
    return [
        meant(part[: int(size)].numpy().tobytes(), kind)
        for part, size in zip(parts, sizes, strict=True)
    ]


def fitted(kind: Any, said: Any) -> Any:
    """A value of JSON as one of this kind: a class, or several of one. Raises `ValueError` if it is
    none.
    """
    of, parts = get_origin(kind) or kind, get_args(kind)
    if of is Any:
        return said
    if of is bytes:
        return bytes.fromhex(fitted(str, said))
    if of is float and type(said) is int:
        return float(said)
    if of in (str, int, float, bool):
        if type(said) is not of or (of is int and not -(2**63) <= said < 2**63):
            raise ValueError(f"{said!r:.100} is no {of.__name__}")
        return said
    if of in (dict, Mapping):
        whole = isinstance(said, dict) and parts[0] is int  # JSON's keys are strings
        return {
            int(key) if whole else key: fitted(parts[1], value)
            for key, value in _a(dict, said).items()
        }
    several = _a(list, said)
    if of in (list, frozenset, tuple):
        return of(fitted(parts[0], each) for each in several)
    fields: Mapping[str, Any] = get_type_hints(kind)
    return of(*(fitted(field, each) for field, each in zip(fields.values(), several, strict=True)))


def _plain(value: object) -> object:
    match value:
        case bytes():
            return value.hex()
        case frozenset():
            return sorted(value)
    return dataclasses.astuple(cast(Any, value))


def _a(kind: type[Kind], said: object) -> Kind:
    if not isinstance(said, kind):
        raise ValueError(f"{said!r:.100} is no {kind.__name__}")
    return said


def _refused(constant: str) -> float:
    raise ValueError(f"{constant} is no number")
