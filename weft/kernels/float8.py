"""Products of float8, by weights and rows that have scales beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.kernels.weights import PreparedWeight, WeightKernel
from weft.plan.kernel import Load, Rates


class ScaledProduct(WeightKernel):
    """The product of float8 rows, each with a scale in float32, by a `ScaledWeight`.

    Scales make it no linear function of its rows.
    """

    name = "scaled_product"
    companions = ("scales",)

    def compute(self, sources: Sequence[Tensor], weight: Any) -> Tensor:
        rows, scales = sources
        wide: Tensor = (rows.double() @ weight.plain.double()) * scales * weight.scales
        return wide.float()

    def seconds(self, machine: Rates, load: Load) -> float:
        k, _, n = load.columns
        return machine.product(load.rows, k, n, load.dtype, load.packed)


class ScaledWeight(PreparedWeight):
    """A float8 weight (K, N) with its scales (1, N); see `weft.ops.float8`."""

    kernel = ScaledProduct()
    packed = False
    words = "float8 with scales"

    def __init__(self, b: Tensor, scales: Tensor) -> None:
        self.plain, self.scales = self.tensors = b, scales
        super().__init__(b.shape, b.dtype)

    def multiply(
        self, sources: Sequence[Tensor], out: Tensor, bias: Tensor | None, rows: int
    ) -> None:
        """Sums in float32 of the scaled numbers, rounded once to the dtype of `out`."""
        x, scales = sources
        if x.shape[1] and out.numel():
            # scaled afterwards: no slower, closer to the exact sums, and torch 2.9's takes no
            # scales of rows on a CPU
            one = torch.ones((), dtype=torch.float32, device=x.device)
            product = torch._scaled_mm(x, self.plain, one, one, out_dtype=torch.float32)
            product.mul_(scales).mul_(self.scales)
        else:
            product = torch.zeros(out.shape, device=x.device, dtype=torch.float32)
        out.copy_(product if bias is None else product.add_(bias))

    def as_tensor(self) -> Tensor:
        raise ValueError(
            "products of float8 cannot be scattered along their last dimension: choose another dim"
        )
