"""Weights of float8, for rows that carry their scales."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.weights import PreparedWeight


class ScaledWeight(PreparedWeight):
    """A float8 weight (K, N) with its scales (1, N), for rows that carry theirs after their K
    columns; see `weft.ops.float8`.

    `shape` counts the columns of such rows: K, filled up to a multiple of 4, and the 4 bytes of a
    scale in float32.
    """

    packed = False
    words = "float8 with scales"

    def __init__(self, b: Tensor, scales: Tensor) -> None:
        self.plain, self.scales, self.k = b, scales, b.shape[0]
        self.tensors = (b, scales)
        super().__init__((-(-self.k // 4) * 4 + 4, b.shape[1]), b.dtype)

    def multiply(self, x: Tensor, out: Tensor, bias: Tensor | None, rows: int) -> None:
        """Sums in float32 of the scaled numbers, rounded once to the dtype of `out`."""
        scales = x[:, -4:].view(torch.float32).contiguous()
        if self.k and out.numel():
            # scaled afterwards: no slower, closer to the exact sums, and torch 2.9's takes no
            # scales of rows on a CPU
            one = torch.ones((), dtype=torch.float32, device=x.device)
            product = torch._scaled_mm(
                x[:, : self.k], self.plain, one, one, out_dtype=torch.float32
            )
            product.mul_(scales).mul_(self.scales)
        else:
            product = torch.zeros(out.shape, device=x.device, dtype=torch.float32)
        out.copy_(product if bias is None else product.add_(bias))

    def check(self, k: int) -> None:
        if k != self.shape[0]:
            raise ValueError(
                "float8 inputs cannot be gathered along K, their last dimension, since each "
                "part has "
                "scales of its own: choose another dim"
            )

    def as_tensor(self) -> Tensor:
        raise ValueError(
            "products of float8 cannot be scattered along their last dimension: choose another dim"
        )
