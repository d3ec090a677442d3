"""The environment variable that selects what of vLLM runs on weft."""

from __future__ import annotations

VARIABLE = "WEFT_VLLM"
COMMUNICATOR, LAYERS = "communicator", "layers"


def setting(value: str | None) -> str:
    """The checked value of ``WEFT_VLLM``: ``communicator``, or ``layers`` (default)."""
    if value not in (None, "", COMMUNICATOR, LAYERS):
        raise ValueError(f"{VARIABLE} is {COMMUNICATOR} or {LAYERS}; got {value!r}")
    return value or LAYERS
