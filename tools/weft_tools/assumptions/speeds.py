"""How fast is the GPU, compared with what predictions assume?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from weft_tools.assumptions.question import Answer, Finding, Question
from weft_tools.events import milliseconds
from weft_tools.predict import machine

PROFILE = "h100-nvlink-8"
"""The profile of predictions for the GPUs of this generation, by their names."""
_NAMES = "H100", "H200"
_NEAR = 0.75
"""The least part of the profile's speed that does not mislead predictions."""
_ROUNDS = 10


def copy() -> Answer:
    """A copy within the GPU's memory is as fast as predictions assume.

    Else they promise too much of algorithms that move rows once more.
    """
    size = 1 << 30
    one, other = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    return {"gpu": torch.cuda.get_device_name(), "gbs": _rate(lambda: one.copy_(other), size, 1e9)}


def product() -> Answer:
    """A product of large matrices of bfloat16 is as fast as predictions assume.

    Else they promise too much overlap, or too little.
    """
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    rate = _rate(lambda: torch.mm(a, b, out=out), 2 * size**3, 1e12)
    return {"gpu": torch.cuda.get_device_name(), "tflops": rate}


def _rate(work: Callable[[], object], amount: int, unit: float) -> float:
    """The median rate of a work, after three rounds that do not count."""
    return round(1e3 * amount / median(milliseconds(work, 3, _ROUNDS)) / unit, 1)


def as_predicted(key: str, unit: str, expected: float, answer: Answer) -> Finding:
    """What a rate means beside the `expected` one of predictions."""
    measured = f"{answer[key]:g} {unit}"
    if not any(name in answer["gpu"] for name in _NAMES):
        return Finding("unknown", f"{measured}; predictions have no profile of this GPU")
    near = _NEAR < answer[key] / expected < 1 / _NEAR
    return Finding("fine" if near else "bad", f"{measured}; predictions assume {expected:g}")


_PROFILE = machine.load(PROFILE)
_REMEDY = "Do not rely on weft predict for this GPU"
QUESTIONS = (
    Question(
        "speeds/copy",
        "A copy in the GPU's memory is as fast as predictions assume.",
        f"predict/machines/{PROFILE}.toml",
        copy,
        partial(as_predicted, "gbs", "GB/s copied", _PROFILE.memory_gbs),
        _REMEDY,
    ),
    Question(
        "speeds/product",
        "A product of bfloat16 is as fast as predictions assume.",
        f"predict/machines/{PROFILE}.toml",
        product,
        partial(as_predicted, "tflops", "TFLOP/s", _PROFILE.products["bfloat16"].tflops),
        _REMEDY,
    ),
)
