"""vLLM's RMS norm after a sum over ranks: in one pass, and of a rank's own rows where it has no
others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers import layernorm

from weft.vllm.row_shard import shard_among


class RMSNorm(layernorm.RMSNorm):  # type: ignore[misc]
    """vLLM's layer of this name, by vLLM's own kernel; in graphs its compiler fuses the layer."""

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if torch.compiler.is_compiling():
            return super().forward_native(x, residual)
        if (shard := shard_among(x, residual)) is not None:
            if residual is None:
                return shard.of(self._normed(shard.part(x)))
            normed, added = self._normed(shard.part(x), shard.part(residual))
            return shard.of(normed), shard.of(added)
        return self._normed(x, residual)

    def _normed(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if (
            not self.has_weight
            or self.variance_size_override is not None
            or x.dtype != self.weight.dtype
            or not x.is_contiguous()
        ):
            return super().forward_native(x, residual)
        if residual is None:
            out = torch.empty_like(x)
            torch.ops._C.rms_norm(out, x, self.weight, self.variance_epsilon)
            return out
        torch.ops._C.fused_add_rms_norm(x, residual, self.weight, self.variance_epsilon)
        return x, residual
