"""The wire format of messages in which ranks describe themselves: JSON of a fixed form.

Messages come from a store or over the network, where others may be able to write. So nothing in
them is executed, and a message of any other form is rejected.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

Kind = TypeVar("Kind")
Convert = Callable[[Any], Any]
LONGEST = 64 << 20
"""Bytes of a message."""


def encode(value: object) -> bytes:
    """The JSON of a value: a string, a number, bytes, or a list, set, dictionary, named tuple or
    dataclass of these.
    """
    return json.dumps(value, default=_plain, allow_nan=False, separators=(",", ":")).encode()


def decode(message: bytes, kind: type[Kind]) -> Kind:
    """The value of type `kind` in a message. Raises `ValueError` for anything else."""
    if len(message) > LONGEST:
        raise ValueError(f"a message of {len(message)} bytes is longer than {LONGEST >> 20} MiB")
    try:
        return cast(Kind, convert(kind, _decoder().decode(message.decode())))
    except RecursionError:
        raise ValueError("lists are nested too deeply") from None


def convert(kind: Any, value: Any) -> Any:
    """A JSON value as an instance of `kind`, a class or a container of one. Raises `ValueError` if
    it does not fit.
    """
    return _converter(kind)(value)


@functools.cache
def _converter(kind: Any) -> Convert:
    """The function that converts values to a type."""
    container, parts = get_origin(kind) or kind, get_args(kind)
    if container is Any:
        return lambda value: value
    if container is bytes:
        return lambda value: bytes.fromhex(_checked(str, value))
    if container in (str, int, float, bool):
        return functools.partial(_number_or_text, container)
    if container in (dict, Mapping):
        key = int if parts[0] is int else str  # the keys of JSON are strings
        element = _converter(parts[1])
        return lambda value: {
            key(name): element(each) for name, each in _checked(dict, value).items()
        }
    if container in (list, frozenset, tuple):
        element = _converter(parts[0])
        return lambda value: container([element(each) for each in _checked(list, value)])
    return functools.partial(
        _instance, container, [_converter(field) for field in get_type_hints(kind).values()]
    )


def _number_or_text(kind: type[Any], value: Any) -> Any:
    if type(value) is kind and (kind is not int or -(2**63) <= value < 2**63):
        return value
    if kind is float and type(value) is int:
        return float(value)
    raise ValueError(f"{value!r:.100} is not of type {kind.__name__}")


def _instance(kind: Any, fields: list[Convert], value: Any) -> Any:
    values = _checked(list, value)
    return kind(*[field(each) for field, each in zip(fields, values, strict=True)])


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


@functools.cache
def _decoder() -> json.JSONDecoder:
    return json.JSONDecoder(parse_constant=_reject)


def _reject(constant: str) -> float:
    raise ValueError(f"{constant} is not a number")
