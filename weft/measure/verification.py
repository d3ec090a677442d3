"""What must come out of a measured product, and how far rounding may take it from there.

Inputs are random and every run that is verified gets others; whatever a run writes is poisoned with
NaN before; every rank checks every element. So a result that an earlier run left behind, or that
only looks right on constant data, does not pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Reference = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[int]], Sequence[Tensor]]
"""The results of all ranks, from the input, the weight and the rows of the result of each."""

RUNS = 32
"""Runs that get rows of their own."""


class Check(NamedTuple):
    """What a comparison found: elements beyond their bound, the largest error, and the largest
    bound.
    """

    wrong: int
    max_error: float = 0.0
    bound: float = 0.0

    def plus(self, wrong: int) -> Check:
        """The check with so many more elements wrong."""
        return self._replace(wrong=self.wrong + wrong)

    def worse(self, other: Check) -> Check:
        """The worst of both."""
        return Check(
            max(self.wrong, other.wrong),
            max(self.max_error, other.max_error),
            max(self.bound, other.bound),
        )


class Problem:
    """Random rows (m, k) of all ranks together, this rank's random weight (k, n), and their exact
    product.

    The rows of run 0, 1, … are a window onto a longer random matrix that moves by one row, so each
    of them differs from what lay in its place before, and one product in float64 serves `RUNS`
    runs. Every rank draws the same rows from `seed`, and a weight of its own.
    """

    def __init__(
        self,
        m: int,
        k: int,
        n: int,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        *,
        seed: int,
        rank: int,
    ) -> None:
        self.m = m
        self.everything = _random(m + RUNS, k, dtype, seed)
        self.weight = _random(k, n, dtype, seed + 1 + rank)
        a, b = self.everything.double(), self.weight.double()
        self.exact = a @ b
        self.bound = error_bound(a.abs() @ b.abs(), self.exact, k, dtype, out_dtype)

    def rows(self, run: int) -> Tensor:
        """The rows of all ranks in this run."""
        return self.everything[run : run + self.m]

    def check_rows(self, gathered: Tensor, run: int) -> Check:
        """Compare gathered rows with the run's: they must be equal."""
        return compare(gathered, self.rows(run).double(), torch.zeros(()))

    def check_product(self, out: Tensor, run: int) -> Check:
        """Compare a product with the run's exact one."""
        return _compare_rows(out, self.exact, self.bound, run)


class Definition(Problem):
    """Random rows and a random weight of each rank, and an operator's results by its definition.

    `given` and `kept` are the rows of each rank's input and result. Every rank draws the operands
    of all.
    """

    def __init__(
        self,
        reference: Reference,
        given: Sequence[int],
        kept: Sequence[int],
        shape: tuple[int, int],
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        *,
        seed: int,
        rank: int,
    ) -> None:
        k, n = shape
        super().__init__(given[rank], k, n, dtype, out_dtype, seed=seed + 1000 * rank, rank=rank)
        self.reference, self.given, self.kept, self.rank = reference, given, kept, rank
        self.dtype, self.out_dtype = dtype, out_dtype
        self.inputs = [
            _random(rows + RUNS, k, dtype, seed + 1000 * r) for r, rows in enumerate(given)
        ]
        self.weights = [_random(k, n, dtype, seed + 1000 * r + 1 + r) for r in range(len(given))]

    def check_result(self, out: Tensor, run: int) -> Check:
        """Compare this rank's result with the run's exact one; each product may be rounded to the
        dtype of the result before it is added.
        """
        shown = zip(self.inputs, self.given, strict=True)
        inputs = [a[run : run + rows].double() for a, rows in shown]
        weights = [b.double() for b in self.weights]
        exact = self.reference(inputs, weights, self.kept)[self.rank]
        sizes = [a.abs() for a in inputs], [b.abs() for b in weights]
        magnitude = self.reference(*sizes, self.kept)[self.rank]
        k = self.weight.shape[0] * len(inputs)
        bound = error_bound(magnitude, exact, k, self.dtype, self.out_dtype)
        return compare(out, exact, bound + _unit(self.out_dtype) * len(inputs) * magnitude)


class Sums(Problem):
    """A `Problem` whose rows and weight are both this rank's own, and whose exact products are
    summed over all ranks.

    There are also random `products` to sum, in the dtype that partial products are kept in. Made
    collectively.
    """

    def __init__(
        self,
        m: int,
        k: int,
        n: int,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        product: torch.dtype,
        *,
        seed: int,
        rank: int,
        host_partial: bool = False,
    ) -> None:
        self.host_partial = (
            _unit(product) if host_partial else 0.0
        )  # by how much the sum of each host is rounded before it is sent
        super().__init__(m, k, n, dtype, out_dtype, seed=seed + 1000 * rank, rank=rank)
        self.everything_made = _random(m + RUNS, n, product, seed + 1000 * rank + 500)
        magnitude = self.everything.double().abs() @ self.weight.double().abs()
        rounded = error_bound(magnitude, self.exact, k, dtype, product)
        self.sum, self.sum_bound = self._summed(self.exact, rounded, out_dtype)
        self.baseline_bound = self._added(
            error_bound(magnitude, self.exact, k, dtype, out_dtype), out_dtype
        )
        made = self.everything_made.double()
        self.made_sum, self.made_bound = self._summed(made, torch.zeros_like(made), out_dtype)

    def products(self, run: int) -> Tensor:
        """This rank's products to sum in this run."""
        return self.everything_made[run : run + self.m]

    def check_product_sum(self, out: Tensor, run: int, start: int) -> Check:
        """Compare rows of the sum of all ranks' products, from row `start` on, with the run's exact
        ones.
        """
        return _compare_rows(out, self.sum, self.sum_bound, run + start)

    def check_baseline(self, out: Tensor, run: int, start: int) -> Check:
        """The same where each product, and then each sum of some ranks', is rounded to the dtype of
        `out`.
        """
        return _compare_rows(out, self.sum, self.baseline_bound, run + start)

    def check_sum(self, out: Tensor, run: int, start: int) -> Check:
        """Compare rows of the sum of all ranks' `products`, from row `start` on, with the run's
        exact ones.
        """
        return _compare_rows(out, self.made_sum, self.made_bound, run + start)

    def _summed(
        self, terms: Tensor, errors: Tensor, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The exact sum over ranks, and the error of a sum of terms off by up to `errors`: as for a
        product of K = ranks.
        """
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        exact, off, size = (
            everyones_sum(tensor) for tensor in (terms, errors, terms.abs() + errors)
        )
        off = off + self.host_partial * size
        return exact, off + error_bound(size, exact, ranks, self.weight.dtype, out_dtype) + _unit(
            out_dtype
        ) * off

    def _added(self, errors: Tensor, dtype: torch.dtype) -> Tensor:
        """The error of a sum over ranks that is rounded to `dtype` by each of its additions, in
        whatever order they are made.

        With terms p of ranks, each off by at most e, and unit roundoff u of `dtype` it is at most
        ``Σe + γ·Σ(|p| + e)``: γ is that of `error_bound` with one addition less than there are
        ranks, which rounds terms that are themselves off. The exact sum to compare with is as far
        off with the u of float64.
        """
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        off, size = everyones_sum(errors), everyones_sum(self.exact.abs() + errors)
        return off + (_gamma(ranks - 1, dtype) + _gamma(ranks, torch.float64)) * size


def everyones_sum(tensor: Tensor) -> Tensor:
    """The sum over ranks, by way of torch."""
    total = tensor.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def compare(actual: Tensor, exact: Tensor, bound: Tensor) -> Check:
    """How far `actual` is from `exact` (float64), element by element; a NaN is infinitely far."""
    error = (actual.double() - exact).abs_().nan_to_num_(nan=torch.inf)
    if not error.numel():
        return Check(0)
    return Check(int((error > bound).sum()), error.max().item(), bound.max().item())


def _compare_rows(actual: Tensor, exact: Tensor, bound: Tensor, start: int) -> Check:
    rows = slice(start, start + len(actual))
    return compare(actual, exact[rows], bound[rows])


def error_bound(
    magnitude: Tensor, exact: Tensor, k: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> Tensor:
    """The largest error that rounding can cause in each element of a product of matrices of `dtype`
    with inner dimension `k`.

    `magnitude` is ``|A| @ |B|`` and `exact` ``A @ B``, both in float64. In whatever order k
    products are summed with unit roundoff u, the error is at most ``γ·(|A| @ |B|)`` with ``γ = k·u
    / (1 − k·u)`` (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition,
    section 3.5); u is that of float32, or float64 for float64 inputs. The float64 product to
    compare with is as far off with its own u. Rounding to `out_dtype` once adds its unit roundoff
    times the value, or half its smallest number.
    """
    accumulate = torch.promote_types(dtype, torch.float32)
    summed = (_gamma(k, accumulate) + _gamma(k, torch.float64)) * magnitude
    rounding = 0.0 if out_dtype == accumulate else _unit(out_dtype)
    return (
        summed
        + rounding * (exact.abs() + summed)
        + torch.finfo(out_dtype).smallest_normal * torch.finfo(out_dtype).eps / 2
    )


def _gamma(k: int, dtype: torch.dtype) -> float:
    ku = k * _unit(dtype)
    return ku / (1 - ku)


def _unit(dtype: torch.dtype) -> float:
    """The unit roundoff of a dtype."""
    return torch.finfo(dtype).eps / 2


def _random(rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    return torch.randn(rows, columns, dtype=wide, generator=torch.Generator().manual_seed(seed)).to(
        dtype
    )
