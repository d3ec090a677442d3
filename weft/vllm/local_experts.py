"""This rank's part of a layer of experts, by a kernel that only knows the rank's own experts."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class ExpertKernel(Protocol):
    """Writes each row's weighted sum of its experts, numbered from 0 on this rank."""

    def __call__(
        self, *, output: Tensor, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> None: ...


def local_sums(
    kernel: ExpertKernel,
    output: Tensor,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor,
) -> None:
    """Write each token's weighted sum of its experts on this rank to `output` (T, H), zeros where
    it has none: all ranks' outputs add up to the layer's.

    `topk_weights` and `topk_ids` (T, K) choose the experts of each row of `hidden_states`;
    `expert_map` (experts) is an expert's number on this rank, -1 for those of other ranks. Each
    choice of a local expert is its own row for `kernel`, which thus computes nothing for other
    ranks; the rows of a token are added up in float32, and rounded once.
    """
    local = expert_map[topk_ids].to(topk_ids.dtype)
    here = local >= 0
    tokens, choices = here.nonzero(as_tuple=True)
    if not len(tokens):
        output.zero_()
        return
    rows = output.new_empty(len(tokens), output.shape[1])
    kernel(
        output=rows,
        hidden_states=hidden_states.index_select(0, tokens),
        topk_weights=topk_weights[tokens, choices].unsqueeze(1),
        topk_ids=local[tokens, choices].unsqueeze(1),
    )
    counts = here.sum(1)
    starts = counts.cumsum(0) - counts
    output.copy_(
        functional.embedding_bag(torch.arange(len(rows), device="cpu"), rows, starts, mode="sum")
    )
