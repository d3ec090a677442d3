"""The public interface as text: `make api` writes it to tests/api.txt, in which every change of a
name, a signature, a command or a variable is a change of a line.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import weft
from weft.cli import app

ROOT = Path(__file__).parents[2]
LISTED = ROOT / "tests/api.txt"
PLAIN = int | float | str | bool | tuple | type(None)  # whose docstrings are those of their types
PROPERTIES = property | functools.cached_property


def interface() -> str:
    """Python's names, weft's own commands with their options, and the environment variables."""
    command = typer.main.get_command(app)
    return "\n".join([*names(), "", *commands("weft", command), "", *variables(), ""])


def names() -> Iterator[str]:
    """Those that the reference documents, and those of the packages among them."""
    for name in documented():
        thing = found(name)
        if inspect.ismodule(thing):
            for each in sorted(thing.__all__):
                yield from described(f"{name}.{each}", getattr(thing, each))
        else:
            yield from described(name, thing)


def documented() -> list[str]:
    pages = (path.read_text() for path in (ROOT / "docs/reference").glob("*.md"))
    return sorted(re.findall(r"^::: (weft\.[\w.]+)", "\n".join(pages), re.MULTILINE))


def found(name: str) -> Any:
    package, _, last = name.rpartition(".")
    if package == "weft" and last in weft.__all__:
        return getattr(weft, last)
    return getattr(importlib.import_module(package), last)


def described(name: str, thing: Any) -> Iterator[str]:
    """The lines on a function; or on a class, with those of its members that have docstrings or are
    named in that of the class.
    """
    if not inspect.isclass(thing):
        yield f"{name}{signature(thing)}" if callable(thing) else f"{name}: {type(thing).__name__}"
        return
    bases = ", ".join(each.__name__ for each in thing.__bases__)
    yield f"class {name}({bases})"
    own = [each for each in thing.__mro__ if each.__module__.startswith("weft")]
    texts = " ".join(vars(each).get("__doc__") or "" for each in own)
    members = {each: None for each in re.findall(r"`([a-z]\w*)`", texts) if each in assigned(own)}
    members |= dict.fromkeys(getattr(thing, "__dataclass_fields__", getattr(thing, "_fields", ())))
    for member in {member for each in own for member in vars(each)}:
        value = inspect.getattr_static(thing, member)
        public = not member.startswith("_") and value.__doc__ and not isinstance(value, PLAIN)
        if public or member == ("__new__" if issubclass(thing, tuple) else "__init__"):
            members[member] = value
    for member, value in sorted(members.items()):
        kind = ": property" if isinstance(value, PROPERTIES) else ": attribute"
        method = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        yield f"{name}.{member}{signature(method) if callable(method) else kind}"


def assigned(classes: list[type]) -> set[str]:
    """The attributes that classes give to their objects."""
    sources = "\n".join(inspect.getsource(each) for each in classes)
    return {*re.findall(r"^ +(?:self\.)?([a-z]\w*)(?:: [^=\n]+)?(?: =|$)", sources, re.MULTILINE)}


class Bare(str):
    """The text of an annotation, which is shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def signature(function: Any) -> str:
    """The parameters and the result, with the annotations as they are in the source."""
    whole = inspect.signature(function)
    parameters = [shown(each) for each in whole.parameters.values()]
    result = whole.return_annotation
    return str(whole.replace(parameters=parameters, return_annotation=bare(result)))


def shown(parameter: inspect.Parameter) -> inspect.Parameter:
    """A parameter whose text is the same in every process: a function's has its address."""
    given = Bare("...") if inspect.isfunction(parameter.default) else parameter.default
    return parameter.replace(annotation=bare(parameter.annotation), default=given)


def bare(annotation: Any) -> Any:
    text = getattr(annotation, "__forward_arg__", annotation)
    return Bare(text) if isinstance(text, str) else annotation


def commands(name: str, command: Any) -> Iterator[str]:
    """A command with the names of its arguments and options, and those below it."""
    words = ("/".join(each.opts + each.secondary_opts) for each in command.params)
    own = sorted(each for each in words if not each.endswith("-completion"))  # typer's
    yield " ".join([name, *own])
    for each in sorted(getattr(command, "commands", {})):
        yield from commands(f"{name} {each}", command.commands[each])


def variables() -> list[str]:
    page = (ROOT / "docs/reference/environment.md").read_text()
    return sorted(re.findall(r"^\| `(WEFT_[A-Z_]+)`", page, re.MULTILINE))


if __name__ == "__main__":
    LISTED.write_text(interface())
