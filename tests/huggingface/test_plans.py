"""Models that transformers shards by their own plans compute on weft's layers what one process
computes.
"""

from __future__ import annotations

import contextlib
import copy
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.ranks import group, on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import weft
from weft.huggingface.embedding import ShardedEmbedding, convert
from weft.nn import ColumnParallelLinear, RowParallelLinear

transformers = pytest.importorskip(
    "transformers", "5.23", reason="the plans are those of transformers 5.23 or newer"
)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,  # uneven parts
    "initializer_range": 0.3,  # results that differ from token to token
    "pad_token_id": 3,
}
# classes, not their names, so that ranks need not import their modules
MODELS = {
    "llama": (transformers.LlamaForCausalLM, {}),
    "biased": (transformers.LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (transformers.Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "phi3": (transformers.Phi3ForCausalLM, {}),
    "mixtral": (transformers.MixtralForCausalLM, {"num_local_experts": 4}),
    "qwen3 moe": (
        transformers.Qwen3MoeForCausalLM,
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 8},
    ),
    "by three": (
        transformers.LlamaForCausalLM,
        {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
}
IDS = torch.tensor([[5, 60, 2, 31, 17, 44], [1, 9, 40, 30, 12, 8]])


@pytest.fixture
def folder(tmp_path, request):
    """A saved random model; the parameter is its name in MODELS, and perhaps a dtype."""
    name, dtype = (*getattr(request, "param", ("llama",)), torch.float32)[:2]
    kind, more = MODELS[name]
    torch.manual_seed(0)
    model = kind(kind.config_class(**SIZES | more)).to(dtype)
    for parameter, values in model.named_parameters():
        if parameter.endswith("bias"):
            torch.nn.init.normal_(values)
    model.save_pretrained(tmp_path)
    return tmp_path


def alone(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def sharded(folder, **sizes):
    """The model by its own plan, on weft's layers."""
    weft.huggingface.enable()
    plan = transformers.distributed.DistributedConfig(**sizes or {"tp_plan": "auto"})
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", distributed_config=plan
    ).eval()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def generated(model):
    return model.generate(IDS, max_new_tokens=6, do_sample=False).tolist()


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def assert_near(ours, theirs, tolerance=1e-4, label=""):
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max(), label


@pytest.mark.data
@pytest.mark.parametrize(
    ("folder", "ranks"),
    [((name,), 3 if name == "by three" else 2) for name in MODELS],
    indirect=["folder"],
    ids=MODELS,
)
def test_tokens_equal_one_process(folder, ranks):
    model = alone(folder)
    expected = generated(model), logits(model)
    for tokens, found, _ in on_ranks(_tokens, ranks, folder, context=group):
        assert tokens == expected[0]
        assert_near(found, expected[1])


def _tokens(_, folder):
    model = sharded(folder)
    return generated(model), logits(model), weft.nn.explain(model)


@pytest.mark.data
def test_every_layer_of_a_llama_is_wefts(folder):
    _, _, explained = on_ranks(_tokens, 2, folder, context=group)[0]
    assert [line.split(maxsplit=1) for line in explained.splitlines()] == [
        ["model.embed_tokens", "weft: all_reduce"],
        *(
            [f"model.layers.{number}.{name}", f"weft: {operators}"]
            for number in range(2)
            for name, operators in {
                "self_attn.q_proj": "product without communication",
                "self_attn.k_proj": "product without communication",
                "self_attn.v_proj": "product without communication",
                "self_attn.o_proj": "matmul_all_reduce",
                "mlp.gate_proj": "product without communication",
                "mlp.up_proj": "product without communication",
                "mlp.down_proj": "matmul_all_reduce",
            }.items()
        ),
        ["lm_head", "weft: product without communication, then all_gather"],
    ]


EXPERTS = [("mixtral",), ("qwen3 moe",)]
DIVIDED = {"tp_size": 2, "ep_size": 2}


@pytest.mark.data
@pytest.mark.parametrize("implementation", ["weft", "auto"])
@pytest.mark.parametrize("folder", EXPERTS, indirect=True, ids=[name for (name,) in EXPERTS])
def test_divided_experts(folder, implementation):
    model = alone(folder)
    expected = generated(model), logits(model), _gradients(model)
    for tokens, found, grads, explained in on_ranks(
        _divided, 2, folder, implementation, context=group
    ):
        assert tokens == expected[0]
        assert_near(found, expected[1])
        assert "model.layers.0.mlp.experts" in explained
        assert explained.count("weft: moe") == SIZES["num_hidden_layers"]
        assert grads.keys() == expected[2].keys()
        for name, gradient in grads.items():
            assert_near(gradient, expected[2][name], label=name)


def _divided(_, folder, implementation):
    model = sharded(folder, **DIVIDED, ep_implementation=implementation)
    found = logits(model)
    weft.nn.freeze(model)
    return generated(model), found, _gradients(model), weft.nn.explain(model)


@pytest.mark.data
@pytest.mark.parametrize("folder", EXPERTS[:1], indirect=True)
def test_experts_whose_tokens_are_those_of_each_rank(folder):
    """Data parallelism with experts that are divided: results and gradients are transformers'."""
    expected = logits(alone(folder))
    for ours, theirs in on_ranks(_spread, 2, folder, context=group):
        for found, grads, _ in (ours, theirs):
            assert_near(found, expected)
            assert grads.keys() == theirs[1].keys()
            for name, gradient in grads.items():
                assert_near(gradient, theirs[1][name], label=name)
        of_layers = "weft: moe, 2 of 4 experts on this rank, tokens of its own"
        assert ours[2].count(of_layers) == SIZES["num_hidden_layers"]
        assert "ep_implementation='all_to_all' is asked for" in theirs[2]


def _spread(group, folder):
    found = []
    for implementation in ("weft", "all_to_all"):
        model = sharded(folder, fsdp_size=2, ep_size=2, ep_implementation=implementation)
        result, explained = logits(model), weft.nn.explain(model)
        model.train()
        ids = IDS[:, : IDS.shape[1] - torch.distributed.get_rank()]  # other tokens on each rank
        model(ids, labels=ids).loss.backward()
        named = {name: each.grad for name, each in model.named_parameters()}
        own = {name: each.to_local() for name, each in named.items() if isinstance(each, DTensor)}
        found.append((result, {**named, **own}, explained))
    return found


@pytest.mark.data
@pytest.mark.parametrize("folder", EXPERTS, indirect=True, ids=[name for (name,) in EXPERTS])
def test_experts_in_one_process(folder):
    expected = logits(alone(folder))
    [found] = on_ranks(_one_process, 1, folder, context=contextlib.nullcontext)
    assert_near(found, expected)


def _one_process(_, folder):
    weft.huggingface.enable()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", experts_implementation="weft"
    )
    return logits(model.eval())


@pytest.mark.data
@pytest.mark.parametrize("folder", [("qwen2", torch.bfloat16)], indirect=True)
def test_bfloat16(folder):
    expected = logits(alone(folder))
    for _, found, _ in on_ranks(_tokens, 2, folder, context=group):
        assert found.dtype == torch.bfloat16
        assert_near(found, expected, 5e-2)


@pytest.mark.data
@pytest.mark.parametrize("folder", [("biased",), ("qwen2",)], indirect=True, ids=["biased", "tied"])
def test_gradients_equal_one_process(folder):
    expected = _gradients(alone(folder))
    for found in on_ranks(_trained, 2, folder, context=group):
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            assert_near(gradient, expected[name], label=name)


def _gradients(model):
    model.train()
    ids = torch.cat([IDS, torch.tensor([[3] * IDS.shape[1]])])  # padding has no gradient
    model(ids, labels=ids).loss.backward()
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def _trained(_, folder):
    return _gradients(sharded(folder))


@pytest.mark.data
def test_changed_weights_are_used(folder):
    """Also by a model that was frozen, which must be promised anew."""
    model = alone(folder)
    logits(model)
    _change(model)
    for found in on_ranks(_changed, 2, folder, context=group):
        assert_near(found, logits(model))


@torch.no_grad()
def _change(model):
    for parameter in model.parameters():
        parameter.mul_(1.25)


def _changed(_, folder):
    current, frozen = sharded(folder), sharded(folder)
    weft.nn.freeze(frozen)
    for model in (current, frozen):
        logits(model)
        _change(model)
    with pytest.raises(ValueError, match="call it again after every change"):
        logits(frozen)
    weft.nn.freeze(frozen)
    assert_near(logits(frozen), logits(current))
    return logits(frozen)


@pytest.mark.data
def test_state_dict_is_transformers_own(folder):
    expected = alone(folder).state_dict()
    for found in on_ranks(_state, 2, folder, context=group):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


def _state(_, folder):
    return {name: whole(tensor) for name, tensor in sharded(folder).state_dict().items()}


@pytest.mark.data
def test_a_quantized_layer_goes_back_to_transformers(folder):
    """transformers marks it before or while it loads the weight."""
    expected = logits(alone(folder))
    for found, explained in on_ranks(_quantized, 2, folder, context=group):
        assert_near(found, expected)
        assert explained.count("transformers: the weight is quantized") == 2


def _quantized(_, folder):
    model = sharded(folder)
    for layer in (model.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.down_proj):
        layer._hf_quantized_needs_local_tp = True
        assert not isinstance(layer, ColumnParallelLinear | RowParallelLinear)
    return logits(model), weft.nn.explain(model)


@pytest.mark.data
def test_a_model_sharded_otherwise_too_remains_transformers(folder):
    expected = logits(alone(folder))
    for found, explained in on_ranks(_also_by_fsdp, 4, folder, context=group):
        assert_near(found, expected)
        assert "weft: " not in explained
        assert "transformers: 2 of 4 ranks share it" in explained


def _also_by_fsdp(_, folder):
    model = sharded(folder, tp_size=2, fsdp_size=2)
    return logits(model), weft.nn.explain(model)


@pytest.mark.data
@pytest.mark.parametrize("backend", [None, "gloo"])
def test_groups(folder, backend):
    """transformers makes a group of weft; a group that the program made stays as it is."""
    context = partial(group, backend) if backend else contextlib.nullcontext
    for found in on_ranks(_backend, 2, folder, context=context):
        assert found == (backend or "weft", True)


def _backend(_, folder):
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    model = sharded(folder)
    logits(model)
    found = dist.get_backend(), isinstance(model.model.embed_tokens, ShardedEmbedding)
    if found[0] == "weft":
        dist.destroy_process_group()
    return found


@pytest.mark.data
@pytest.mark.slow
def test_compiled(folder):
    expected = logits(alone(folder))
    for found in on_ranks(_compiled, 2, folder, context=group, limit=100):
        assert_near(found, expected)


def _compiled(_, folder):
    return logits(torch.compile(sharded(folder), backend="aot_eager", fullgraph=True))


def _copied(_):
    mesh, whole = init_device_mesh("cpu", (2,)), torch.nn.Embedding(6, 4)
    divided = copy.deepcopy(whole)
    divided.weight = torch.nn.Parameter(distribute_tensor(whole.weight, mesh, [Shard(0)]))
    twin = copy.deepcopy(convert(divided, mesh))
    assert twin.world is divided.world
    assert twin.layout.mesh is mesh
    return twin(torch.arange(6)).detach(), divided.weight.full_tensor().detach()


def test_a_copy_of_an_embedding():
    """It works on the same world: worlds and meshes belong to ranks."""
    for found, rows in on_ranks(_copied, 2, context=group):
        assert found.equal(rows)
