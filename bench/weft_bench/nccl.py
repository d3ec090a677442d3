"""NCCL's channels, each of which takes an SM."""

from __future__ import annotations

import os

MOST = "NCCL_MAX_NCHANNELS"
"""The variable that limits the channels, of RCCL too."""


def channels() -> int | None:
    """The most channels of a call in this process, None where NCCL selects them."""
    limit = os.environ.get(MOST)
    return int(limit) if limit else None


def named(name: str) -> str:
    """The name of a baseline by NCCL in results, with the channels if they are limited."""
    limit = channels()
    return name if limit is None else f"{name}, {limit} channel{'s' if limit > 1 else ''}"
