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

from weft.vllm.local_experts import local_sums
from weft.vllm.replace import replace


def register() -> None:
    """Let all of vLLM's experts on CPUs take a map of the experts that are on this rank, and graphs
    call layers whose experts or tokens are on several ranks as one operator.
    """
    replace(MoERunner, "_select_forward", opaque_if_spread)
    for experts in vars(cpu_moe).values():
        is_kind = isinstance(experts, type) and issubclass(experts, FusedMoEExpertsModular)
        if is_kind and "apply" in vars(experts):
            replace(experts, "apply", of_local_experts)


def opaque_if_spread(select: Callable[[MoERunner], Any]) -> Callable[[MoERunner], Any]:
    """vLLM's choice of what a graph calls for a layer. On CPUs it is traced, which takes the
    numbers of local rows, and of the tokens of other data-parallel ranks, for constants.
    """

    def run(runner: MoERunner) -> Any:
        parallel = runner.moe_config.moe_parallel_config
        if not parallel.use_ep and parallel.dp_size == 1:
            return select(runner)
        operators = torch.ops.vllm
        shared = runner._shared_experts is not None
        return operators.moe_forward_shared if shared else operators.moe_forward

    return run


def of_local_experts(apply: Callable[..., None]) -> Callable[..., None]:
    """vLLM's method ``apply(self, *, output, hidden_states, topk_weights, topk_ids, …)``, with an
    `expert_map` that it heeds.
    """

    def run(
        self: Any,
        *,
        output: Tensor,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
        **others: Any,
    ) -> None:
        kernel = functools.partial(apply, self, expert_map=None, **others)
        if expert_map is not None:
            local_sums(kernel, output, hidden_states, topk_weights, topk_ids, expert_map)
        else:
            kernel(
                output=output,
                hidden_states=hidden_states,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
            )

    return run
