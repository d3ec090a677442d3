"""`weft.warmup` makes all that first calls of a model's layers would make."""

from __future__ import annotations

import pytest
import torch
from support.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import weft
import weft.nn
from weft.kernels import fastest, methods

WIDTH, HIDDEN = 256, 768


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, x):
        return self.head(self.down(self.gate(x) * self.up(x)))


def sharded(world, rows):
    torch.manual_seed(0)
    block = Block().eval()
    plan = {
        "": weft.nn.SharedColwiseParallel("gate", "up", input_layouts=rows),
        "down": weft.nn.RowwiseParallel(output_layouts=rows),
        "head": weft.nn.ColwiseParallel(input_layouts=rows, output_layouts=Replicate()),
    }
    return parallelize_module(block, init_device_mesh("cpu", (world.ranks,)), plan)


@pytest.mark.data
@pytest.mark.parametrize("rows", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_first_requests_find_all_that_they_need(rows):
    on_ranks(_warmed_up, 2, rows)


def _warmed_up(world, rows):
    """No kernel or form of a weight is made by a request of a prepared number of tokens, and its
    results are those of a model that was not prepared.
    """
    kernel, made = methods._kernel, set()

    def recorded(x, w, bias):
        made.add((*x.shape, w.shape[0], bias is None))
        return kernel(x, w, bias)

    methods._kernel, fastest.method = recorded, lambda *_: "onednn"
    block, other = sharded(world, rows), sharded(world, rows)
    weft.nn.freeze(block)
    weft.nn.freeze(other)
    weft.warmup(block, [1, 5, 64])
    sequence = isinstance(rows, Shard)
    linear = [block.gate, block.up, block.down, block.head]
    weights = [layer.frozen.packed for layer in linear]
    forms, kernels = [[*w._forms] for w in weights], {*made}
    assert all(forms)
    assert not block.gate.gather.results
    for tokens in (1, 5, 64):
        shape = [1, 1, WIDTH]
        # a sharded sequence is rounded up
        shape[rows.dim if sequence else 1] = -(-tokens // 2) if sequence else tokens
        x = torch.randn(shape, generator=torch.Generator().manual_seed(world.rank * sequence))
        with torch.inference_mode():
            y = block(x)
        assert made == kernels
        assert [layer.frozen.packed for layer in linear] == weights
        assert [[*w._forms] for w in weights] == forms
        with torch.no_grad():
            assert torch.equal(y, other(x))


@pytest.mark.data
def test_bad_arguments_are_refused():
    on_ranks(_refused, 2)


def _refused(world):
    block = sharded(world, Replicate())
    for tokens in (0, [], [4, -1]):
        with pytest.raises(ValueError, match="each at least 1; got"):
            weft.warmup(block, tokens)
    with pytest.raises(ValueError, match=r"Linear has no layer of weft\.nn"):
        weft.warmup(nn.Linear(2, 2), 1)
    with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
        weft.warmup(block.train(), 1)


@pytest.mark.data
def test_layers_without_a_style():
    on_ranks(_layers, 2)


def _layers(world):
    for dim in (None, 0, 1):
        layers = nn.Sequential(
            weft.nn.ColumnParallelLinear(WIDTH, HIDDEN, sequence_dim=dim),
            weft.nn.RowParallelLinear(HIDDEN, WIDTH, sequence_dim=dim),
        ).eval()
        before = world.executor.calls
        weft.warmup(layers, 7)
        assert world.executor.calls > before


class Sparse(nn.Module):
    """A block as those of transformers, whose router says how many experts a token chooses."""

    def __init__(self, own_tokens):
        super().__init__()
        self.router = nn.Linear(8, 5)
        self.router.top_k = 3
        self.experts = weft.nn.ParallelExperts(5, 8, 6, own_tokens=own_tokens)


def _warmed_experts(world, own_tokens):
    """Frozen experts are laid out, and calls of these tokens are repeated ones."""
    sparse = Sparse(own_tokens).eval()
    layer = weft.nn.MoE(5, 8, 6, top=3, own_tokens=own_tokens).eval()
    model = nn.ModuleDict({"sparse": sparse, "moe": layer})
    weft.nn.freeze(model)
    with pytest.raises(ValueError, match="at least 1"):
        weft.warmup(model, [4, 0])
    weft.warmup(model, [4, 16])
    packed = [each.frozen.packed for each in (sparse.experts, layer.experts)]
    assert all(each._forms for each in packed)
    forms = [{**each._forms} for each in packed]
    with torch.no_grad():
        layer(torch.randn(16, 8, generator=torch.Generator().manual_seed(0)))
    assert [each.frozen.packed for each in (sparse.experts, layer.experts)] == packed
    assert [each._forms for each in packed] == forms
    weft.warmup(layer.experts, 4)  # by themselves
    with pytest.raises(ValueError, match="training mode"):
        weft.warmup(model.train(), 4)


@pytest.mark.data
@pytest.mark.parametrize("own_tokens", [False, True])
def test_experts_are_warmed_up(own_tokens):
    on_ranks(_warmed_experts, 2, own_tokens)
