"""The commands that measure a saved result again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Annotated, Any, get_origin, get_type_hints

from weft.cli import conditions
from weft.cli.values import parse_shape
from weft_tools.bench.benchmarks import BENCHMARKS


def command(result: dict[str, Any]) -> str | None:
    """The command ``weft bench`` with all options of a result that are not the defaults; None for a
    result whose options this version lacks.
    """
    benchmark, options = BENCHMARKS.get(result["benchmark"]), dict(result.get("options", {}))
    if not benchmark or not options:
        return None
    if isinstance(options.get("shape"), str):
        options["shape"] = parse_shape(options["shape"])
    try:
        settings = benchmark.settings(**options)
    except TypeError:
        return None
    return shlex.join(["weft", "bench", result["benchmark"], *_words(settings)])


def _words(settings: Any) -> Iterator[str]:
    """The options that differ from the defaults and have an effect."""
    kind = type(settings)
    hints = get_type_hints(kind, include_extras=True)
    given = [
        name
        for name, field in kind.__dataclass_fields__.items()
        if get_origin(hints[name]) is Annotated and getattr(settings, name) != field.default
    ]
    without_effect = {name for name, _ in conditions.ignored(settings, given)}
    for name in given:
        if name not in without_effect:
            yield conditions.option(kind, name)
            if (value := getattr(settings, name)) is not True:
                yield str(value)
