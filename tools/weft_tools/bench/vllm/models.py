"""Small random checkpoints that vLLM loads: a Llama in bfloat16 and in int8, and a Mixtral.

They are saved, as vLLM's ``load_format="dummy"`` draws other weights for other numbers of ranks.
Greedy tokens do not depend on how sums are rounded: the row of `lm_head` for a token's successor,
by a random permutation, is the token's own embedding, and all layers together add about as much to
the residual stream as the embedding is. So with a hidden size of 512 or more the successor's logit
is 16 or more standard deviations of the others' (of 16000, the largest is near 4), hundreds of
times the noise of bfloat16. The runners-up depend on every layer, and show a wrong one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SEED, HEAD, VOCABULARY, POSITIONS = 20, 64, 16000, 4096
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _INT8 | {"strategy": "channel", "dynamic": False},
            "input_activations": _INT8 | {"strategy": "token", "dynamic": True},
        }
    },
}
"""int8 weights with a scale for each output channel; inputs are quantised token by token."""

MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | COMMON,
    "llama-int8": LLAMA | COMMON | {"quantization_config": W8A8},
    "mixtral": MIXTRAL | COMMON,
}
"""The configurations by the names of the models."""


def save(name: str, folder: Path) -> Path:
    """Write the checkpoint of a model of `MODELS` into a new folder in `folder`; its path."""
    from safetensors.torch import save_file  # vLLM brings it, weft does not need it

    config = MODELS[name]
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config, indent=2))
    save_file(dict(tensors(config)), path / "model.safetensors", metadata={"format": "pt"})
    return path


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint by name."""
    drawn = _drawn(config)
    return _quantised(drawn) if "quantization_config" in config else drawn


def _drawn(config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    draw = torch.Generator().manual_seed(SEED)
    hidden = config["hidden_size"]
    embedding = torch.randn(VOCABULARY, hidden, generator=draw).bfloat16()
    successor = torch.randperm(VOCABULARY, generator=draw)
    head = torch.empty_like(embedding)
    head[successor] = embedding * hidden**-0.5
    yield "model.embed_tokens.weight", embedding
    yield "lm_head.weight", head
    yield "model.norm.weight", torch.ones(hidden).bfloat16()
    for layer in range(config["num_hidden_layers"]):
        for name, (rows, columns) in _linears(config).items():
            weight = torch.randn(rows, columns, generator=draw) * columns**-0.5
            yield f"model.layers.{layer}.{name}.weight", weight.bfloat16()
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{name}.weight", torch.ones(hidden).bfloat16()


def _linears(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The linear layers of a block by name: output and input features."""
    hidden, between = config["hidden_size"], config["intermediate_size"]
    heads, kv = (HEAD * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    attention = {"q": (heads, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, heads)}
    found = {f"self_attn.{name}_proj": shape for name, shape in attention.items()}
    up, down = (between, hidden), (hidden, between)
    if config["model_type"] == "llama":
        return found | {"mlp.gate_proj": up, "mlp.up_proj": up, "mlp.down_proj": down}
    experts = config["num_local_experts"]
    found["block_sparse_moe.gate"] = experts, hidden
    for expert in range(experts):
        names = {"w1": up, "w2": down, "w3": up}
        found |= {f"block_sparse_moe.experts.{expert}.{n}": shape for n, shape in names.items()}
    return found


def _quantised(drawn: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors with int8 in place of the weights of linear layers, and their scales."""
    for name, tensor in drawn:
        if "_proj." not in name:
            yield name, tensor
            continue
        scale = tensor.float().abs().amax(dim=1, keepdim=True) / 127
        yield name, (tensor / scale).round().to(torch.int8)
        yield f"{name}_scale", scale
