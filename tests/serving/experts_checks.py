"""vLLM's own experts on CPUs, those of several ranks in one process, against all on one rank.

Prints, for each kind of experts, the worst of many random routings: the largest difference over
the largest magnitude of the layer's output.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEQuantConfig,
    int8_w8a8_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.experts import cpu_moe

from weft.vllm import experts

HIDDEN, INNER, EXPERTS = 128, 64, 10
Layer = Callable[..., None]


def unquantized(mine: Tensor, dtype: torch.dtype) -> Layer:
    generator = torch.Generator().manual_seed(0)
    w1 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) / INNER**0.5
    kind = cpu_moe.CPUUnquantizedExperts
    packed = [
        cpu_moe.cpu_prepack_moe_weight(w[mine].to(dtype).contiguous(), kind.isa) for w in (w1, w2)
    ]
    return layer(kind, FUSED_MOE_UNQUANTIZED_CONFIG, *packed)


def int8(mine: Tensor, dtype: torch.dtype) -> Layer:
    generator = torch.Generator().manual_seed(0)
    weights, scales = [], []
    for rows, columns in ((2 * INNER, HIDDEN), (HIDDEN, INNER)):
        w = torch.randint(-127, 128, (EXPERTS, rows, columns), generator=generator)
        weights.append(torch.ops._C.convert_weight_packed(w[mine].to(torch.int8).contiguous()))
        scale = torch.rand(EXPERTS, rows, generator=generator) / 64 / columns**0.5
        scales.append(scale[mine].contiguous())
    config = int8_w8a8_moe_quant_config(*scales, a1_scale=None, a2_scale=None)
    return layer(cpu_moe.CPUExpertsInt8, config, *weights)


def layer(kind: Any, config: FusedMoEQuantConfig, w1: Tensor, w2: Tensor) -> Layer:
    """The experts' method `apply` with these weights, without the rest of an engine."""
    self = kind.__new__(kind)
    self.quant_config, self._use_zentorch = config, False
    nothing = torch.empty(0)
    return functools.partial(
        self.apply,
        w1=w1,
        w2=w2,
        activation=MoEActivation.SILU,
        global_num_experts=EXPERTS,
        a1q_scale=None,
        a2_scale=None,
        workspace13=nothing,
        workspace2=nothing,
        expert_tokens_meta=None,
    )


def difference(make: Callable[..., Layer], dtype: torch.dtype, seed: int) -> float:
    """Of all ranks' parts, summed, from the layer; one random routing."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens, chosen, ranks = draw.choice((1, 2, 7, 40)), draw.randint(1, 6), draw.randint(2, 5)
    on_input = make is unquantized and chosen == 1 and draw.random() < 0.5
    owners = torch.randint(ranks, (EXPERTS,), generator=generator)
    # some of the experts only, so that some ranks have none
    likely = torch.rand(EXPERTS, generator=generator) * draw.choice((0, 4))
    ids = (likely + torch.rand(tokens, EXPERTS, generator=generator)).topk(chosen).indices.int()
    call = functools.partial(
        dict,
        hidden_states=torch.randn(tokens, HIDDEN, generator=generator).to(dtype),
        topk_weights=torch.rand(tokens, chosen, generator=generator),
        topk_ids=ids,
        apply_router_weight_on_input=on_input,
    )
    whole = torch.empty(tokens, HIDDEN, dtype=dtype)
    make(torch.arange(EXPERTS), dtype)(output=whole, expert_map=None, **call())
    total = torch.zeros(tokens, HIDDEN)
    for rank in range(ranks):
        (mine,) = (owners == rank).nonzero(as_tuple=True)
        if not len(mine):
            continue
        expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        expert_map[mine] = torch.arange(len(mine), dtype=torch.int32)
        part = torch.full((tokens, HIDDEN), float("nan"), dtype=dtype)
        make(mine, dtype)(output=part, expert_map=expert_map, **call())
        total += part.float()
    return float((total - whole.float()).abs().max() / whole.abs().max())


def main() -> None:
    torch.set_num_threads(1)
    experts.register()
    experts.register()  # the plug-in is called more than once in a process
    assert not hasattr(cpu_moe.CPUUnquantizedExperts.apply.__wrapped__, "__wrapped__")
    kinds = {
        "float32": (unquantized, torch.float32),
        "bfloat16": (unquantized, torch.bfloat16),
        "int8": (int8, torch.bfloat16),
    }
    for name, (make, dtype) in kinds.items():
        worst = max(difference(make, dtype, seed) for seed in range(60))
        print("DIFFERENCE", json.dumps([name, worst]), flush=True)


if __name__ == "__main__":
    main()
