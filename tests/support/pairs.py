"""Tests of all pairs of two parameters, of which the fast ones have each value once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def pairs(
    names: tuple[str, str],
    one: Sequence[Any],
    other: Sequence[Any],
    fast: Sequence[tuple[Any, Any]],
) -> Any:
    """The parameters of a test for all pairs; those that are not `fast` are slow."""
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(*pair, marks=() if pair in fast else pytest.mark.slow)
            for pair in itertools.product(one, other)
        ],
        ids=str,
    )
