"""transformers' own tests of parallel models, on a tiny model of a dense family and one of experts:
tensor, expert and fully sharded parallelism; forward, backward, generation, int8 and float8.
"""

from __future__ import annotations

import unittest
from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from .test_expert_parallel_mixin import ExpertParallelTesterMixin
from .test_fsdp_mixin import FSDPTesterMixin
from .test_tensor_parallel_mixin import TensorParallelTesterMixin

_SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


class _Tester:
    def __init__(self, model: type, config: type, **more: Any) -> None:
        self.causal_lm_class, self._config, self._more = model, config, more

    def get_config(self) -> Any:
        return self._config(**_SIZES, **self._more)


class TestDense(TensorParallelTesterMixin, FSDPTesterMixin, unittest.TestCase):
    model_tester = _Tester(Qwen3ForCausalLM, Qwen3Config)


class TestExperts(
    ExpertParallelTesterMixin, TensorParallelTesterMixin, FSDPTesterMixin, unittest.TestCase
):
    model_tester = _Tester(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
    )
