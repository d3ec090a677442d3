"""Custom operators of weft, which compiled graphs call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("weft", "FRAGMENT")


def define(schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """A custom operator of weft on CPUs, ``name(…)`` or ``name.overload(…)``: `run` computes,
    `shapes` gives results without data.
    """
    name = schema[: schema.index("(")]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CPU")
    torch.library.register_fake(f"weft::{name}", shapes, lib=_library)
    operator, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.weft, operator), overload or "default")
