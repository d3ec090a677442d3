"""Checks and words that all layers share: what was given, and what would do."""

from __future__ import annotations

import torch


def name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def check_timeout(timeout: float | None) -> None:
    """Raise `ValueError` unless `timeout` is None or a positive number of seconds."""
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds; got {timeout}")
