"""Where the options of a command have an effect: an option that has none is rejected, not ignored.

A command's settings are a dataclass. The annotation of a field may have, beside its `Option`:

- `Also`, the modes in which the option has an effect. `modes` of the settings names those that the
  user has chosen, by the option that does so; without one every option has an effect.
- `Unless`, the reason why the option has no effect on these settings.

Imports neither torch nor ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, get_type_hints


class Also(frozenset[str]):
    """The modes in which the option has an effect, too."""


@dataclass(frozen=True)
class Unless:
    """The option has an effect unless `reason` returns why it has none on these settings, and what
    would do.
    """

    reason: Callable[[Any], str]


def ignored(settings: Any, given: Collection[str]) -> Iterator[tuple[str, str]]:
    """The fields among those `given` by the user that have no effect on these settings, each with
    the reason.
    """
    hints = get_type_hints(type(settings), include_extras=True)
    for name in given:
        found = getattr(hints[name], "__metadata__", ())
        modes = frozenset[str]().union(*(each for each in found if isinstance(each, Also)))
        for mode in getattr(settings, "modes", ()):
            if mode not in modes:
                yield name, f"has no effect with {mode}: omit it"
        for each in found:
            if isinstance(each, Unless) and (reason := each.reason(settings)):
                yield name, reason


def option(kind: type[Any], name: str) -> str:
    """The option of a field of settings as users give it."""
    declared = get_type_hints(kind, include_extras=True)[name].__metadata__[0].param_decls or ()
    return next((each for each in declared if each.startswith("--")), f"--{name.replace('_', '-')}")
