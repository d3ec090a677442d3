"""Sharded layers compute the results of unsharded ones, and weft's styles the results of torch's,
with the same parameters and gradients.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed._functional_collectives as functional
import torch.distributed.tensor.parallel as torch_styles
from support.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import weft.nn
from weft.nn import ColumnParallelLinear, RowParallelLinear
from weft.nn.layout import local

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 5e-2}


class Model(nn.Module):
    """One of each layer type that the styles support."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 24)
        self.norm = nn.RMSNorm(24)
        self.up = nn.Linear(24, 36)
        self.down = nn.Linear(36, 24)
        self.layer_norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 12, bias=False)

    def forward(self, x):
        x = x + self.down(self.up(self.norm(x)).square())
        return self.head(self.layer_norm(x))


def sharded(model, mesh, styles, rows, local=True):
    """A copy of the model under torch's or weft's styles; `rows` is the placement of activations
    between the layers.
    """
    model = copy.deepcopy(model)
    plan = {
        "up": styles.ColwiseParallel(input_layouts=rows, use_local_output=local),
        "down": styles.RowwiseParallel(output_layouts=rows, use_local_output=local),
        "head": styles.ColwiseParallel(input_layouts=rows, output_layouts=Replicate()),
        "embed": styles.RowwiseParallel(input_layouts=Replicate()),
    }
    if isinstance(rows, Shard):
        plan["norm"] = plan["layer_norm"] = styles.SequenceParallel(
            sequence_dim=rows.dim, use_local_output=local
        )
    parallelize_module(model, mesh, plan)
    return model if local else distribute_module(model, mesh)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_near(ours, theirs, label=""):
    """Different by rounding alone, relative to the largest element."""
    assert ours.shape == theirs.shape
    scale = torch.cat([theirs.flatten(), theirs.new_ones(1)]).abs().max()
    assert ((ours - theirs).abs() <= TOLERANCE[ours.dtype] * scale).all(), label


def placements(model):
    return {
        name: getattr(parameter, "placements", None) for name, parameter in model.named_parameters()
    }


def model_and_input(world, dtype=torch.float32, seed=0):
    """A model and an input, equal on all ranks."""
    torch.manual_seed(seed)
    return (
        Model().to(dtype),
        torch.randn(2, 6, 24, dtype=dtype),
        init_device_mesh("cpu", (world.ranks,)),
    )


@pytest.mark.data
@pytest.mark.parametrize("ranks", [1, 2])
def test_styles_equal_torchs(ranks):
    on_ranks(_every_style, ranks)


def _every_style(world):
    for rows in (Replicate(), Shard(1), Shard(0)):
        _compare_styles(world, rows, [torch.float32, torch.float64, torch.bfloat16], True)
    for rows in (Replicate(), Shard(1)):
        _compare_styles(world, rows, [torch.float32], False)


def _compare_styles(world, rows, dtypes, local):
    for dtype in dtypes:
        model, x, mesh = model_and_input(world, dtype)
        if isinstance(rows, Shard):
            x = x.chunk(world.ranks, rows.dim)[world.rank]
        results = {}
        for styles in (torch_styles, weft.nn):
            shards = sharded(model, mesh, styles, rows, local)
            x_own = x.clone().requires_grad_()
            y = shards(x_own if local else DTensor.from_local(x_own, mesh, [rows]))
            y.square().sum().backward()
            gradients = {
                name: whole(parameter.grad)
                for name, parameter in shards.named_parameters()
                if parameter.grad is not None
            }
            results[styles] = {"y": y.detach(), "x": x_own.grad, **gradients}
        assert results[weft.nn].keys() == results[torch_styles].keys()
        assert len(results[weft.nn]) == 2 + 8
        for name, theirs in results[torch_styles].items():
            assert_near(results[weft.nn][name], theirs, name)


@pytest.mark.data
def test_styles_accept_the_arguments_of_torchs():
    on_ranks(
        _run_checks,
        2,
        [
            _redistributed_inputs,
            _uneven_sequence,
            _state_dicts,
            _autocast_and_copies,
            _shared_gather,
            _explained,
            _second_derivatives,
            _one_dimension,
        ],
    )


def _run_checks(world, checks):
    for check in checks:
        check(world)


def _redistributed_inputs(world):
    model, x, mesh = model_and_input(world)
    theirs = sharded(model, mesh, torch_styles, Replicate(), local=False)
    expected = (
        theirs.down(theirs.up(DTensor.from_local(x, mesh, [Replicate()]))).to_local().detach()
    )
    # torch 2.9's own styles do not accept Shard(1)
    for placement in (
        Replicate(),
        Shard(0),
        Shard(1),
        Shard(2),
    ):
        shards = sharded(model, mesh, weft.nn, Replicate(), local=False)
        y = shards.down(
            shards.up(
                DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[placement])
            )
        )
        assert y.placements == (Replicate(),)
        assert_near(y.to_local().detach(), expected, str(placement))
    # the result of a functional collective, which may not be there yet
    pending = functional.all_reduce(x / world.ranks, "sum", mesh)
    assert type(pending) is functional.AsyncCollectiveTensor
    plain = sharded(model, mesh, weft.nn, Replicate())
    assert_near(plain.down(plain.up(pending)).detach(), expected)
    results = []
    # a layer whose local input is the unsharded one, and whose output is sharded
    for styles in (
        torch_styles,
        weft.nn,
    ):
        linear = copy.deepcopy(model.up)
        parallelize_module(
            linear,
            mesh,
            styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1)),
        )
        results.append(linear(x).detach())
    assert_near(*results)


def _uneven_sequence(world):
    model, _, mesh = model_and_input(world)
    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1))
    expected = model.down(model.up(x).square())
    shards = sharded(model, mesh, weft.nn, Shard(1), local=False)
    spread = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(1)])
    y = shards.down(shards.up(spread).square())
    assert y.shape == x.shape
    assert y.to_local().shape[1] == (4, 3)[world.rank]
    assert_near(y.full_tensor(), expected)
    y.sum().backward()
    expected.sum().backward()
    assert_near(shards.up.weight.grad.full_tensor(), model.up.weight.grad)
    assert_near(shards.down.weight.grad.full_tensor(), model.down.weight.grad)


def _one_token(world):
    """A dimension of size 1 is sharded so that rank 0 has all of it, and rank 1 nothing."""
    model, _, mesh = model_and_input(world)
    for dim, shape in ((0, (1, 24)), (0, (1, 3, 24)), (1, (3, 1, 24))):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
        expected = model.down(model.up(x).square())
        shards = sharded(model, mesh, weft.nn, Shard(dim), local=False)
        spread = distribute_tensor(x, mesh, [Shard(dim)])
        y = shards.down(shards.up(spread).square())
        assert_near(y.full_tensor(), expected)
        given, wanted = (
            torch.autograd.grad(out.sum(), to) for out, to in ((y, spread), (expected, x))
        )
        assert_near(given[0].full_tensor(), wanted[0])
    shared = SimpleSharing(model.up)
    parallelize_module(
        shared, mesh, weft.nn.SharedColwiseParallel("one", "other", input_layouts=Shard(1))
    )
    for part in shared.one(spread), shared.other(spread):
        assert_near(part, model.up(x).chunk(world.ranks, -1)[world.rank])
    # features, of which rank 0 has the only one
    one = parallelize_module(nn.Linear(1, 4), mesh, weft.nn.ColwiseParallel(input_layouts=Shard(1)))
    feature = distribute_tensor(torch.ones(3, 1), mesh, [Shard(1)])
    full = DTensor.from_local(torch.ones(3, 1), mesh, [Replicate()])
    assert_near(one(feature), one(full))


class SimpleSharing(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.one, self.other = copy.deepcopy(layer), copy.deepcopy(layer)


@pytest.mark.data
def test_the_only_token_is_one_ranks():
    on_ranks(_one_token, 2)


def _state_dicts(world):
    model, x, mesh = model_and_input(world)
    ours, theirs = (sharded(model, mesh, styles, Replicate()) for styles in (weft.nn, torch_styles))
    assert placements(ours) == placements(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    other, _, _ = model_and_input(world, seed=1)
    ours_of_other, theirs_of_other = (
        sharded(other, mesh, styles, Replicate()) for styles in (weft.nn, torch_styles)
    )
    with torch.no_grad():
        expected, expected_of_other = theirs(x), theirs_of_other(x)
        ours.eval()(x)
        ours.load_state_dict(theirs_of_other.state_dict())
        theirs.load_state_dict(ours_of_other.state_dict())
        assert_near(ours(x), expected_of_other)
        assert_near(theirs(x), expected_of_other)
        ours.load_state_dict(
            sharded(model, mesh, torch_styles, Replicate()).state_dict(), assign=True
        )
        assert_near(ours(x), expected)


@pytest.mark.data
def test_layers_are_trained_and_frozen_alternately():
    on_ranks(_trained_and_frozen, 2)


def _trained_and_frozen(world):
    for rows, how in itertools.product(
        (Replicate(), Shard(1)), ({}, {"fused": True}, {"foreach": True})
    ):
        _train_and_freeze(world, rows, how)


def _train_and_freeze(world, rows, how):
    model, x, mesh = model_and_input(world)
    x = x.chunk(world.ranks, rows.dim)[world.rank] if isinstance(rows, Shard) else x
    ours, theirs = (sharded(model, mesh, styles, rows) for styles in (weft.nn, torch_styles))
    layers = ours.up, ours.down, ours.head
    steps = [
        torch.optim.AdamW(
            [shards.up.weight, shards.up.bias, shards.down.weight, shards.head.weight],
            lr=0.1,
            **how,
        )
        for shards in (ours, theirs)
    ]
    for _ in range(2):
        for shards, optimizer in zip((ours, theirs), steps, strict=True):
            shards.train()
            shards(x).square().sum().backward()
            optimizer.step()
            shards.zero_grad()
        assert not any(layer.frozen for layer in layers)
        for shards in (ours, theirs):
            shards.eval()
        weft.nn.freeze(ours)
        forms = [layer.frozen.packed for layer in layers]
        assert_near(ours(x), theirs(x))
        assert not any(form._forms for form in forms), "with gradients no form is used"
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                y = ours.eval()(x)
                assert ours(x).equal(y)
                assert [layer.frozen.packed for layer in layers] == forms, "packed once"
                assert_near(y.clone(), theirs(x))


def _second_derivatives(world):
    model, x, mesh = model_and_input(world, torch.float64)
    found = []
    for each in (model, sharded(model, mesh, weft.nn, Replicate())):
        inputs = [x.clone().requires_grad_(), *each.parameters()]
        loss = each(inputs[0]).logsumexp(-1).square().sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
        total = sum(local(one).sin().sum() for one in first if one is not None)
        second = torch.autograd.grad(total, inputs, allow_unused=True)
        found.append([whole(one) for one in second if one is not None])
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert_near(ours, theirs)


def _one_dimension(world):
    model, x, mesh = model_and_input(world)
    shards = sharded(model, mesh, weft.nn, Replicate()).head
    compiled = torch.compile(shards, fullgraph=True, backend="aot_eager")
    found = []
    for call in (model.head, shards, compiled):
        model.zero_grad()
        shards.zero_grad()
        row = x[0, 0].clone().requires_grad_()
        y = call(row)
        y.square().sum().backward()
        found.append([y.detach(), row.grad, whole(call.weight.grad)])
    for ours in found[1:]:
        for one, other in zip(ours, found[0], strict=True):
            assert_near(one, other)


class _OwnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def _explained(world):
    model, x, mesh = model_and_input(world)
    shards = sharded(model, mesh, weft.nn, Shard(1))
    lines = dict(line.split(maxsplit=1) for line in weft.nn.explain(shards).splitlines())
    assert list(lines) == ["embed", "norm", "up", "down", "layer_norm", "head"]
    assert lines["up"] == "weft: all_gather_matmul over dimension 1"
    assert lines["down"] == "weft: matmul_reduce_scatter over dimension 1"
    assert "all_gather_matmul" in repr(shards.up)
    assert lines["embed"] == "torch: Embedding is not a plain nn.Linear"
    shards = sharded(model, mesh, weft.nn, Replicate())
    assert "weft: matmul_all_reduce" in weft.nn.explain(shards)
    own = parallelize_module(
        _OwnLinear(24, 36), mesh, weft.nn.ColwiseParallel(output_layouts=Replicate())
    )
    assert weft.nn.explain(own) == "_OwnLinear  torch: _OwnLinear is not a plain nn.Linear"
    same = parallelize_module(copy.deepcopy(own.float()), mesh, {})
    assert_near(own(x), same(x))
    for output, warned in ((Shard(-1), True), (Replicate(), False)):
        fused = nn.ModuleDict({"qkv_proj": nn.Linear(24, 36), "up_proj": nn.Linear(24, 36)})
        style = weft.nn.ColwiseParallel(output_layouts=output)
        parallelize_module(fused, mesh, {"qkv_proj": style, "up_proj": style})
        assert [
            "several layers in one" in line for line in weft.nn.explain(fused).splitlines()
        ] == [
            warned,
            False,
        ]
    dropout = parallelize_module(nn.Dropout(), mesh, weft.nn.SequenceParallel())
    assert weft.nn.explain(dropout).startswith("Dropout  torch: ")
    assert weft.nn.explain(nn.Linear(2, 2)) == "Linear has no layer of weft.nn; apply a style first"


class Attention(nn.Module):
    """Layers with a common input."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv = (
            nn.Linear(16, 24),
            nn.Linear(16, 8, bias=False),
            nn.Linear(16, 8),
        )
        self.wo = nn.Linear(24, 16)

    def forward(self, x):
        return self.wo(self.wq(x) * torch.cat([self.wk(x), self.wv(x), self.wk(x)], -1))


def _shared_gather(world):
    torch.manual_seed(0)
    mesh, model, x = init_device_mesh("cpu", (world.ranks,)), Attention(), torch.randn(2, 6, 16)
    x = x.chunk(world.ranks, 1)[world.rank]
    separate = {
        name: weft.nn.ColwiseParallel(input_layouts=Shard(1)) for name in ("wq", "wk", "wv")
    }
    shared = {"attention": weft.nn.SharedColwiseParallel("wq", "wk", "wv", input_layouts=Shard(1))}
    results = []
    for plan in ({f"attention.{name}": style for name, style in separate.items()}, shared):
        holder = nn.ModuleDict({"attention": copy.deepcopy(model)})
        parallelize_module(
            holder, mesh, plan | {"attention.wo": weft.nn.RowwiseParallel(output_layouts=Shard(1))}
        )
        shards = holder["attention"]
        for call in (
            shards,
            copy.deepcopy(shards),
            torch.compile(shards, fullgraph=True, backend="aot_eager"),
        ):
            shards.zero_grad()
            x_own = x.clone().requires_grad_()
            y = call(x_own)
            y.square().sum().backward()
            with torch.no_grad():
                assert_near(call(x_own), y.detach())
            gradients = [whole(p.grad) for p in call.parameters()]
            results.append([y.detach(), x_own.grad, *gradients])
    assert "one gather for 3 layers" in weft.nn.explain(shards)
    for found in results:
        for one, other in zip(found, results[0], strict=True):
            assert_near(one, other)
    frozen = shards.requires_grad_(False)
    assert_near(frozen(x), results[0][0])  # gradients are enabled, and no tensor requires any


@pytest.mark.data
def test_a_mesh_of_several_dimensions_uses_the_ranks_of_one():
    on_ranks(_two_dimensions, 4)


def _two_dimensions(world):
    model, x, _ = model_and_input(world)
    x = x + world.rank // 2  # each row of the mesh has its own data
    shards = sharded(
        model,
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["tensor"],
        weft.nn,
        Replicate(),
    )
    assert shards.up.world.ranks == 2
    assert shards.up.world is shards.down.world
    assert_near(shards(x), model(x))
    weft.barrier(world=world)  # rank 0 has the store by which the others meet


def _autocast_and_copies(world):
    for dtype, multiplied in ((torch.float64, torch.float64), (torch.float32, torch.bfloat16)):
        model, x, mesh = model_and_input(world, dtype)
        ours, theirs = (
            sharded(model, mesh, styles, Replicate()) for styles in (weft.nn, torch_styles)
        )
        with torch.autocast("cpu", torch.bfloat16):
            assert ours(x).dtype == multiplied
            assert_near(ours(x), theirs(x))
            with pytest.raises(TypeError, match=r"input (must have|has) dtype"):
                ours.up(x.to(torch.float32 if dtype is torch.float64 else torch.float64))
    with torch.no_grad():
        expected = ours.eval()(x)
        twin = copy.deepcopy(ours)
        twin.up.weight.zero_()
        assert twin.up.world is ours.up.world
        assert ours(x).equal(expected)
        assert not twin(x).equal(expected)


@pytest.mark.data
@pytest.mark.parametrize(("ranks", "features"), [(2, 8), (3, 7), (3, 2)])
def test_sharded_layers_equal_an_unsharded_one(ranks, features):
    on_ranks(_compare_layers, ranks, features)


def _compare_layers(world, features):
    for sequence_dim in (None, 0, 1):
        _compare_layer(world, features, sequence_dim)


def _compare_layer(world, features, sequence_dim):
    torch.manual_seed(0)
    whole_up, whole_down = nn.Linear(5, features), nn.Linear(features, 5)
    torch.manual_seed(0)
    up, down = (
        ColumnParallelLinear(5, features, sequence_dim=sequence_dim),
        RowParallelLinear(features, 5, sequence_dim=sequence_dim),
    )
    x = torch.randn(2 * world.ranks, 3 * world.ranks, 5, requires_grad=True)
    expected = whole_down(whole_up(x).relu())
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()

    def part(tensor):
        return (
            tensor if sequence_dim is None else tensor.chunk(world.ranks, sequence_dim)[world.rank]
        )

    x_own = part(x.detach()).clone().requires_grad_()
    y = down(up(x_own).relu())
    assert_near(y, part(expected))
    (y * part(weights)).sum().backward()
    assert_near(x_own.grad, part(x.grad))
    size = -(-features // world.ranks)
    own = slice(world.rank * size, (world.rank + 1) * size)
    assert_near(up.weight.grad, whole_up.weight.grad[own])
    assert_near(up.bias.grad, whole_up.bias.grad[own])
    assert_near(down.weight.grad, whole_down.weight.grad[:, own])
    assert_near(down.bias.grad, whole_down.bias.grad)
    with torch.no_grad():
        assert_near(down.eval()(up.eval()(part(x)).relu()), part(expected))
    assert "all_gather_matmul" in weft.nn.explain(up) or sequence_dim is None
