"""Save a small model with experts and random weights: checkpoint.py NAME FOLDER."""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers

COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4000,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
    "dtype": "bfloat16",
}
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "mixtral": (
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        {"intermediate_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    # ten experts: three or two on each of four ranks; and a shared one
    "qwen2": (
        transformers.Qwen2MoeConfig,
        transformers.Qwen2MoeForCausalLM,
        {
            "intermediate_size": 512,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 256,
            "num_experts": 10,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
        },
    ),
    # on two times two ranks vLLM splits the tokens of this one over the ranks
    "qwen3": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {
            "intermediate_size": 512,
            "moe_intermediate_size": 128,
            "num_experts": 16,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "head_dim": 32,
        },
    ),
}


if __name__ == "__main__":
    name, folder = sys.argv[1:]
    config, model, options = MODELS[name]
    torch.manual_seed(0)
    model(config(**COMMON, **options)).to(torch.bfloat16).save_pretrained(folder)
