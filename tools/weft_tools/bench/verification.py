"""Verification of measured products: the expected results, and bounds of their rounding errors.

Inputs are random and differ in every verified run; outputs are filled with NaN before a run; every
rank checks every element. So the check fails for results of an earlier run, and for results that
are right only for constant data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft_tools.bench.between_ranks import number_of_ranks, sum_over_ranks

Reference = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[int]], Sequence[Tensor]]
"""The results of all ranks, from the inputs, the weights and the result rows of all ranks."""

CPU = torch.device("cpu")
RUNS = 32
"""The number of runs with different rows."""


class Check(NamedTuple):
    """The outcome of a comparison: the number of elements beyond their bound, the largest error,
    and the largest bound.
    """

    wrong: int
    max_error: float = 0.0
    bound: float = 0.0

    def plus(self, wrong: int) -> Check:
        """The check with `wrong` more wrong elements."""
        return self._replace(wrong=self.wrong + wrong)

    def worse(self, other: Check) -> Check:
        """The maxima of both checks."""
        return Check(
            max(self.wrong, other.wrong),
            max(self.max_error, other.max_error),
            max(self.bound, other.bound),
        )


class Problem:
    """Random rows (m, k) of all ranks together, this rank's random weight (k, n), and their exact
    product. With a `bias_seed` there is a random `bias` (n,) too; `own_bias` is what this rank adds
    to its product: the bias, or None.

    The rows of run 0, 1, … are a window onto a longer random matrix that moves by one row, so each
    row differs from the one at its index in the run before, and one product in float64 serves
    `RUNS` runs. Every rank draws the same rows from `seed`, and its own weight.
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
        device: torch.device = CPU,
        bias_seed: int | None = None,
    ) -> None:
        self.m = m
        self.device = device
        self.all_rows = self.random(m + RUNS, k, dtype, seed)
        self.weight = self.random(k, n, dtype, seed + 1 + rank)
        self.bias = None if bias_seed is None else self.random(1, n, dtype, bias_seed)[0]
        self.own_bias = self.bias if self.adds_bias(rank) else None
        a, b = self.all_rows.double(), self.weight.double()
        self.exact = a @ b
        self.magnitude = a.abs() @ b.abs()
        if self.own_bias is not None:  # as one more row of the weight, times ones
            k = k + 1
            self.exact = self.exact + self.own_bias
            self.magnitude = self.magnitude + self.own_bias.abs()
        self.bound = error_bound(self.magnitude, self.exact, k, dtype, out_dtype)
        self.baseline_bound = self.bound
        if self.own_bias is not None:
            rounded = _unit(out_dtype) * (self.magnitude + self.bound)
            self.baseline_bound = self.bound + rounded

    def random(self, rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
        """A random matrix on the device, the same on every device and rank."""
        wide = torch.promote_types(dtype, torch.float32)
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, columns, dtype=wide, generator=generator, device="cpu").to(
            self.device, dtype
        )

    @staticmethod
    def adds_bias(rank: int) -> bool:
        """Whether a rank adds the bias to its product."""
        return True

    def rows(self, run: int) -> Tensor:
        """The rows of all ranks in this run."""
        return self.all_rows[run : run + self.m]

    def check_rows(self, gathered: Tensor, run: int) -> Check:
        """Compare gathered rows with the run's: they must be equal."""
        return compare(gathered, self.rows(run).double(), torch.zeros((), device=self.device))

    def check_product(self, out: Tensor, run: int) -> Check:
        """Compare a product with the run's exact one."""
        return _compare_rows(out, self.exact, self.bound, run)

    def check_product_of_baseline(self, out: Tensor, run: int) -> Check:
        """The same comparison for a baseline that rounds the product before it adds the bias."""
        return _compare_rows(out, self.exact, self.baseline_bound, run)


class Definition(Problem):
    """Random inputs and a random weight of each rank, and an operator's results by its definition.

    `input_rows` and `result_rows` are the numbers of rows of each rank's input and result. Every
    rank draws the operands of all ranks. `product_rows` is the number of rows that this rank
    multiplies: its product alone is of so many other `rows`.
    """

    def __init__(
        self,
        reference: Reference,
        input_rows: Sequence[int],
        product_rows: int,
        result_rows: Sequence[int],
        shape: tuple[int, int],
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        *,
        seed: int,
        rank: int,
        device: torch.device = CPU,
    ) -> None:
        k, n = shape
        seeds = [seed + 1000 * r for r in range(len(input_rows))]
        where = {"seed": seeds[rank], "rank": rank}
        super().__init__(product_rows, k, n, dtype, out_dtype, **where, device=device)
        self.reference = reference
        self.rank = rank
        self.input_rows = input_rows
        self.result_rows = result_rows
        self.dtype = dtype
        self.out_dtype = out_dtype
        self.inputs = [
            self.random(rows + RUNS, k, dtype, seeds[r]) for r, rows in enumerate(input_rows)
        ]
        self.weights = [self.random(k, n, dtype, seeds[r] + 1 + r) for r in range(len(input_rows))]

    def given(self, rank: int, run: int) -> Tensor:
        """The input of a rank in this run."""
        return self.inputs[rank][run : run + self.input_rows[rank]]

    def check_result(self, out: Tensor, run: int) -> Check:
        """Compare this rank's result with the run's exact one; each product may be rounded to the
        dtype of the result before it is added.
        """
        inputs = [self.given(rank, run).double() for rank in range(len(self.inputs))]
        weights = [b.double() for b in self.weights]
        exact = self.reference(inputs, weights, self.result_rows)[self.rank]
        sizes = [a.abs() for a in inputs], [b.abs() for b in weights]
        magnitude = self.reference(*sizes, self.result_rows)[self.rank]
        k = self.weight.shape[0] * len(inputs)
        bound = error_bound(magnitude, exact, k, self.dtype, self.out_dtype)
        return compare(out, exact, bound + _unit(self.out_dtype) * len(inputs) * magnitude)


class Sums(Problem):
    """A `Problem` with different rows and a different weight on each rank, and the exact sum of all
    ranks' products.

    There are also random `products` to sum, in the dtype of partial products. A bias is the same on
    all ranks; rank 0 adds it to its product, as weft does. The constructor is collective.
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
        device: torch.device = CPU,
        bias_seed: int | None = None,
    ) -> None:
        # the relative rounding error of the sum of each host, which is sent
        self.host_partial = _unit(product) if host_partial else 0.0
        where: dict[str, Any] = {"rank": rank, "device": device, "bias_seed": bias_seed}
        super().__init__(m, k, n, dtype, out_dtype, seed=seed + 1000 * rank, **where)
        self.all_products = self.random(m + RUNS, n, product, seed + 1000 * rank + 500)
        terms = k if self.bias is None else k + 1
        rounded = error_bound(self.magnitude, self.exact, terms, dtype, product)
        self.sum, self.sum_bound = self._summed(self.exact, rounded, out_dtype)
        self.baseline_bound = self._rounded_sum_bound(self.bound, out_dtype)
        ranks = number_of_ranks()
        magnitude = sum_over_ranks(self.magnitude)
        self.whole_bound = error_bound(magnitude, self.sum, terms * ranks, dtype, out_dtype)
        products = self.all_products.double()
        no_error = torch.zeros_like(products)
        self.products_sum, self.products_bound = self._summed(products, no_error, out_dtype)

    @staticmethod
    def adds_bias(rank: int) -> bool:
        return rank == 0

    def products(self, run: int) -> Tensor:
        """This rank's products to sum in this run."""
        return self.all_products[run : run + self.m]

    def check_product_sum(self, out: Tensor, run: int, start: int) -> Check:
        """Compare rows of the sum of all ranks' products, from row `start` on, with the run's exact
        ones.
        """
        return _compare_rows(out, self.sum, self.sum_bound, run + start)

    def check_baseline(self, out: Tensor, run: int, start: int) -> Check:
        """The same comparison for a baseline that rounds each product and each partial sum to the
        dtype of `out`.
        """
        return _compare_rows(out, self.sum, self.baseline_bound, run + start)

    def check_whole(self, out: Tensor, run: int) -> Check:
        """The same comparison for all rows of the sum, as one product of the rows of all ranks side
        by side.
        """
        return _compare_rows(out, self.sum, self.whole_bound, run)

    def check_sum(self, out: Tensor, run: int, start: int) -> Check:
        """Compare rows of the sum of all ranks' `products`, from row `start` on, with the run's
        exact ones.
        """
        return _compare_rows(out, self.products_sum, self.products_bound, run + start)

    def _summed(
        self, terms: Tensor, errors: Tensor, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The exact sum over ranks of terms, and the error bound of a sum of terms with errors of
        at most `errors`, as of a product with K = ranks.
        """
        ranks = number_of_ranks()
        exact, error, size = (
            sum_over_ranks(tensor) for tensor in (terms, errors, terms.abs() + errors)
        )
        error = error + self.host_partial * size
        rounding = error_bound(size, exact, ranks, self.weight.dtype, out_dtype)
        return exact, error + rounding + _unit(out_dtype) * error

    def _rounded_sum_bound(self, errors: Tensor, dtype: torch.dtype) -> Tensor:
        """The error bound of a sum over ranks that is rounded to `dtype` after each addition, in
        any order of the additions.

        For terms p of ranks, each with an error of at most e, it is ``Σe + γ·Σ(|p| + e)``, where γ
        is that of `error_bound` for ranks - 1 additions and the unit roundoff of `dtype`. The exact
        sum to compare with has such an error too, with the unit roundoff of float64. A bias is
        added last: one more term, without an error.
        """
        ranks = number_of_ranks()
        error = sum_over_ranks(errors)
        size = sum_over_ranks(self.exact.abs() + errors)
        if self.bias is not None:  # the exact product of rank 0 has it, so it may hide there
            ranks = ranks + 1
            size = size + 2 * self.bias.abs()
        return error + (_gamma(ranks - 1, dtype) + _gamma(ranks, torch.float64)) * size


def compare(actual: Tensor, exact: Tensor, bound: Tensor) -> Check:
    """Compare `actual` with `exact` (float64) by element; the error of a NaN is infinite."""
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

    `magnitude` is ``|A| @ |B|`` and `exact` ``A @ B``, both in float64. If k products are summed in
    any order with unit roundoff u, the error is at most ``γ·(|A| @ |B|)`` with ``γ = k·u / (1 −
    k·u)`` (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.5);
    u is that of float32, or of float64 for float64 inputs. The float64 product to compare with has
    such an error too, with its own u. Rounding once to `out_dtype` adds its unit roundoff times the
    value, or half its smallest number.
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
