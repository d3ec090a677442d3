"""The fastest method to compute packed experts, timed once on a machine and stored."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import weft.cache as cache
from weft.checks import name
from weft.experts.methods import METHODS, NATIVE
from weft.kernels import half
from weft.kernels.fastest import least_times

if TYPE_CHECKING:
    from weft.experts.weights import Experts

_ROWS = (1, 4, 16, 64)
"""Rows of each expert at which the methods are timed."""
_WIDTHS = {"small": 256, "large": 1024}
"""Widths of the timed experts, both of tokens and between the products."""
_LARGE = 512 * 512
"""The number of elements of a matrix from which an expert counts as large."""
_TIMED = 4  # experts
_WORTH = 1.25
"""How many times as fast as ``native`` another method must be: it has other bits for other numbers
of rows.
"""


def fastest(experts: Experts) -> str:
    """The name of the fastest method for packed experts. It depends neither on the number of rows
    nor on what the router has chosen, so with ``native`` the bits of a token do not, either.
    """
    if experts.dtype not in NATIVE or not half.COLUMNS:
        return "each"
    _, width, inner = experts.shape
    size = "large" if width * inner >= _LARGE else "small"
    pack: Any = type(experts)
    return _table(pack, experts.dtype, torch.get_num_threads())[size]


@functools.cache
def _table(pack: Any, dtype: torch.dtype, threads: int) -> dict[str, str]:
    """The fastest method by the size of an expert, for those that `pack` makes."""
    software = f"torch {torch.__version__} {threads} threads"

    def fits(found: dict[str, str]) -> bool:
        return all(found[size] in METHODS for size in _WIDTHS)

    table: dict[str, str] = cache.once(
        cache.of_this_machine(f"experts-{name(dtype)}", software),
        lambda: _measure(pack, dtype),
        fits,
    )
    return table


@torch.inference_mode(False)
def _measure(pack: Callable[[Tensor, Tensor], Experts], dtype: torch.dtype) -> dict[str, str]:
    def timed(width: int) -> str:
        experts = pack(
            torch.randn(_TIMED, 2 * width, width, dtype=dtype, device="cpu"),
            torch.randn(_TIMED, width, width, dtype=dtype, device="cpu"),
        )
        return _fastest([_times(experts, rows) for rows in _ROWS])

    with torch.no_grad():
        return {size: timed(width) for size, width in _WIDTHS.items()}


def _fastest(seconds: Sequence[dict[str, float]]) -> str:
    """The method with the greatest geometric mean speed-up over ``native``; `seconds` are the times
    for each number of rows.
    """

    def gain(method: str) -> float:
        return statistics.geometric_mean(timed["native"] / timed[method] for timed in seconds)

    best = max(METHODS, key=gain)
    return best if gain(best) >= _WORTH else "native"


def _times(experts: Any, rows: int) -> dict[str, float]:
    """The least time of each method for this number of rows per expert."""
    tokens = rows * experts.shape.number
    x = torch.randn(tokens, experts.shape.width, dtype=experts.dtype, device="cpu")
    chosen = (torch.arange(tokens, device="cpu") % experts.shape.number).unsqueeze(1)
    scores, out = torch.ones(tokens, 1, device="cpu"), torch.empty_like(x)
    operands = experts, x, chosen, scores, out
    return least_times(
        {name: partial(run, experts.form(name), *operands) for name, (_, run) in METHODS.items()}
    )
