"""Expert parallelism for vLLM's experts on CPUs, whose kernels only take ids of local experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsModular
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner


def register() -> None:
    """Let all of vLLM's experts on CPUs take a map of the experts that are on this rank, and graphs
    call layers of experts as one operator: how many rows are local is not known before.
    """
    MoERunner._select_forward = _opaque_forward
    for experts in vars(cpu_moe).values():
        if isinstance(experts, type) and issubclass(experts, FusedMoEExpertsModular):
            apply = vars(experts).get("apply")
            if apply is not None and not hasattr(apply, "__wrapped__"):
                setattr(experts, "apply", of_local_experts(apply))  # noqa: B010


def _opaque_forward(runner: MoERunner) -> Any:
    operators = torch.ops.vllm
    return operators.moe_forward if runner._shared_experts is None else operators.moe_forward_shared


def of_local_experts(apply: Callable[..., None]) -> Callable[..., None]:
    """vLLM's method ``apply(self, *, output, hidden_states, topk_weights, topk_ids, …)``, with an
    `expert_map` that it reads: the local number of each expert, -1 for those of other ranks.

    Each token's local experts are computed as rows of one expert each, so a rank computes nothing
    for experts of others; the rows of a token are added up in float32, and rounded once.
    """

    @functools.wraps(apply)
    def run(
        self: Any,
        *,
        output: Tensor,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        **others: Any,
    ) -> None:
        call = functools.partial(apply, self, expert_map=None, **others)
        if expert_map is None:
            call(
                output=output,
                hidden_states=hidden_states,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                a1q_scale=a1q_scale,
            )
            return
        local = expert_map[topk_ids].to(topk_ids.dtype)
        chosen = (local >= 0).nonzero(as_tuple=True)
        tokens, _ = chosen
        rows = output.new_empty(len(tokens), output.shape[1])
        per_token = a1q_scale is not None and a1q_scale.shape[:1] == hidden_states.shape[:1]
        if len(tokens):
            call(
                output=rows,
                hidden_states=hidden_states[tokens],
                topk_weights=topk_weights[chosen].unsqueeze(1),
                topk_ids=local[chosen].unsqueeze(1),
                a1q_scale=a1q_scale[tokens] if per_token and a1q_scale is not None else a1q_scale,
            )
        sums = torch.zeros(output.shape, dtype=torch.float32)
        output.copy_(sums.index_add_(0, tokens, rows.float()))

    return run
