"""The environment variable that selects what of vLLM runs on weft."""

from __future__ import annotations

VARIABLE = "WEFT_VLLM"
OFF, COMMUNICATOR, LAYERS = "off", "communicator", "layers"


def setting(value: str | None) -> str:
    """The checked value of ``WEFT_VLLM``: ``off``, ``communicator``, or ``layers`` (default)."""
    if value not in (None, "", OFF, COMMUNICATOR, LAYERS):
        raise ValueError(f"{VARIABLE} is {OFF}, {COMMUNICATOR} or {LAYERS}; got {value!r}")
    return value or LAYERS
