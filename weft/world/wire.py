"""The wire format of messages in which ranks describe themselves: JSON of a fixed form.

Messages come from a store or over the network, where others may be able to write. So nothing in
them is executed, and a message of any other form is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist

Kind = TypeVar("Kind")
_PLAIN = str, int, float, bool


def encode(value: object) -> bytes:
    """The JSON of a value: a string, a number, bytes, or a list, set, dictionary, named tuple or
    dataclass of these.
    """
    return json.dumps(value, default=_plain, allow_nan=False, separators=(",", ":")).encode()


def decode(message: bytes, kind: type[Kind]) -> Kind:
    """The value of type `kind` in a message. Raises `ValueError` for anything else."""
    try:
        return cast(Kind, convert(kind, json.loads(message, parse_constant=_refuse)))
    except RecursionError:
        raise ValueError("lists are nested too deeply") from None


def all_gather_values(
    own: Kind, kind: type[Kind], group: dist.ProcessGroup | None = None
) -> list[Kind]:
    """The value of each rank of a process group; collective. Raises `ValueError` if one is not of
    type `kind`.
    """
    message = torch.frombuffer(bytearray(encode(own)), dtype=torch.uint8)
    sizes = [
        torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(sizes, torch.tensor([len(message)], device="cpu"), group=group)
    parts = [torch.zeros(int(max(sizes)), dtype=torch.uint8, device="cpu") for _ in sizes]
    parts[dist.get_rank(group)][: len(message)] = message
    dist.all_gather(parts, parts[dist.get_rank(group)].clone(), group=group)
    return [
        decode(part[: int(size)].numpy().tobytes(), kind)
        for part, size in zip(parts, sizes, strict=True)
    ]


def convert(kind: Any, value: Any) -> Any:
    """A JSON value as an instance of `kind`, a class or a container of one. Raises `ValueError` if
    it does not fit.
    """
    container, parts = _form(kind)
    if container is Any:
        return value
    if container is bytes:
        return bytes.fromhex(convert(str, value))
    if container is float and type(value) is int:
        return float(value)
    if container in _PLAIN:
        if type(value) is not container or (container is int and not -(2**63) <= value < 2**63):
            raise ValueError(f"{value!r:.100} is not of type {container.__name__}")
        return value
    if container in (dict, Mapping):
        integers = parts[0] is int  # the keys of JSON are strings
        return {
            int(key) if integers else key: convert(parts[1], each)
            for key, each in _checked(dict, value).items()
        }
    values = _checked(list, value)
    if container in (list, frozenset, tuple):
        return container(convert(parts[0], each) for each in values)
    return container(*map(convert, parts, _as_many(values, parts)))


@functools.cache
def _form(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """The container or class of a type, and the types of its elements or fields."""
    if container := get_origin(kind):
        return container, get_args(kind)
    return kind, () if kind is Any or kind in _PLAIN else tuple(get_type_hints(kind).values())


def _as_many(values: list[Any], parts: tuple[Any, ...]) -> list[Any]:
    if len(values) != len(parts):
        raise ValueError(f"{len(values)} values for {len(parts)} fields")
    return values


def _plain(value: object) -> object:
    match value:
        case bytes():
            return value.hex()
        case frozenset():
            return sorted(value)
    return dataclasses.astuple(cast(Any, value))


def _checked(kind: type[Kind], value: object) -> Kind:
    if not isinstance(value, kind):
        raise ValueError(f"{value!r:.100} is not of type {kind.__name__}")
    return value


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a number")
