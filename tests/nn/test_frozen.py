"""Layers multiply by what their weights hold, whatever has changed it, unless they are frozen."""

from __future__ import annotations

import copy
import itertools
import os

import pytest
import torch
from support.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import weft
import weft.nn

K, N = 128, 160


def plain(kind):
    layers = {
        "column": weft.nn.ColumnParallelLinear,
        "row": weft.nn.RowParallelLinear,
    }
    return layers[kind](K, N, bias=False).eval()


def styled(kind):
    styles = {"column": weft.nn.ColwiseParallel, "row": weft.nn.RowwiseParallel}
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    return parallelize_module(nn.Linear(K, N, bias=False).eval(), mesh, styles[kind]())


def own(parameter):
    """A view of this rank's part of a weight; torch counts writes to it."""
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def trained(layer, **how):
    parameter = nn.Parameter(own(layer.weight))  # of the same memory
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], **how).step()


def received(layer):
    weft.broadcast(own(layer.weight)[9], 0)


COUNTED = {
    "by an optimizer": trained,
    "by a fused optimizer": lambda layer: trained(layer, fused=True),
    "in a batch": lambda layer: torch._foreach_add_([own(layer.weight)], 1.0),
    "by its state": lambda layer: layer.load_state_dict({"weight": layer.weight.detach() * 3}),
}
REPLACED = {
    "by a new state": lambda layer: layer.load_state_dict(
        {"weight": layer.weight.detach() * 3}, assign=True
    ),
    "by a parameter": lambda layer: setattr(
        layer, "weight", nn.Parameter(layer.weight.detach() * 2)
    ),
}
NOT_COUNTED = {
    "through data": lambda layer: own(layer.weight.data).data[7].zero_(),
    "one element": lambda layer: own(layer.weight.data).data[7, 3].fill_(9.0),
    "by NumPy": lambda layer: own(layer.weight).numpy()[7].fill(3.0),
    "by DLPack": lambda layer: torch.from_dlpack(own(layer.weight)).data[11].fill_(1.0),
    "by a peer": received,
}


@pytest.mark.data
def test_changes_of_any_kind_are_used():
    on_ranks(_changed, 2)


@torch.no_grad()
def _changed(world):
    for make, kind in itertools.product((plain, styled), ("column", "row")):
        for name, change in (COUNTED | REPLACED | NOT_COUNTED).items():
            layer, x = make(kind), torch.randn(2, K)
            x = x if kind == "column" else x[:, : K // 2].contiguous()
            for _ in range(3):
                before = layer(x)
            change(layer)
            product = x @ own(layer.weight).t()
            product = product if kind == "column" else weft.all_reduce(product)
            torch.testing.assert_close(
                layer(x), product, rtol=1e-4, atol=1e-3, msg=lambda text, name=name: name + text
            )
            assert name == "by a peer" or not torch.equal(product, before)


def test_frozen_weights_that_change_are_refused():
    on_ranks(_frozen, 1)


@torch.no_grad()
def _frozen(_):
    x = torch.randn(2, K)
    for make in (plain, styled):
        for change in (COUNTED | REPLACED).values():
            layer = make("column")
            weft.nn.freeze(layer)
            layer(x)
            change(layer)
            with pytest.raises(ValueError, match=r"changed after weft\.nn\.freeze\(model\)"):
                layer(x)
            weft.nn.freeze(layer)  # a new promise, for the weight as it is
            torch.testing.assert_close(layer(x), x @ own(layer.weight).t())
        layer.double().float()
        with pytest.raises(ValueError, match="call it again after every change"):
            layer(x)
        layer.train()  # ends the promise
        torch.testing.assert_close(layer(x), x @ own(layer.weight).t())
    _explained_and_copied(x)


def _explained_and_copied(x):
    model = nn.Sequential(plain("column"), nn.Linear(N, K), plain("column"))
    weft.nn.freeze(model)
    twin = copy.deepcopy(model)
    assert weft.nn.explain(model).count("; frozen") == 2
    assert "frozen" not in weft.nn.explain(twin)
    model.eval()
    assert model[0].frozen, "eval() again is no end of the promise"
    nn.utils.parametrizations.weight_norm(model[2])
    weft.nn.freeze(model)
    assert "frozen" not in weft.nn.explain(model).splitlines()[1]
    assert torch.equal(model(x), model(x))
    with pytest.raises(ValueError, match=r"in training mode, .* call model\.eval\(\) first"):
        weft.nn.freeze(model.train())
    with pytest.raises(ValueError, match=r"Linear has no layer of weft\.nn"):
        weft.nn.freeze(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model"):
        weft.nn.freeze(torch.ones(2))


def test_frozen_and_current_weights_give_the_same():
    on_ranks(_same, 2)


def _same(world):
    """Also those made in inference mode, whose writes torch does not count."""
    for dtype in (torch.float32, torch.bfloat16):
        for inference in (False, True):
            with torch.inference_mode(inference):
                layer = weft.nn.RowParallelLinear(K, N, dtype=dtype).eval()
            for rows in (1, 4, 40):
                x = torch.randn(rows, K // 2).to(dtype)
                with torch.inference_mode():
                    layer.train().eval()
                    current = layer(x)
                    weft.nn.freeze(layer)
                    near = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
                    torch.testing.assert_close(layer(x), current, **near)
