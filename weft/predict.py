"""Predicted times of plans on machine models, which the distribution of tools has."""

from __future__ import annotations

from typing import Any

from weft.installation import tool

_predict = tool("predict", "weft.predict")


def __getattr__(name: str) -> Any:
    return getattr(_predict, name)


def __dir__() -> list[str]:
    return dir(_predict)
