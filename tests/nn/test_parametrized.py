"""Layers whose weight or bias is no parameter compute what torch's styles do."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed.tensor.parallel as torch_styles
from support.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn.utils import parametrizations, parametrize, prune

import weft.nn


class Double(nn.Module):
    def forward(self, tensor):
        return tensor * 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.twin, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)) * self.twin(x))


def attribute(layer, name):
    tensor = getattr(layer, name).detach()
    delattr(layer, name)
    setattr(layer, name, tensor)


def buffer(layer):
    tensor = layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", tensor)


def old_weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(layer)


CHANGES = {
    "a function": lambda layer: parametrize.register_parametrization(layer, "weight", Double()),
    "of the bias": lambda layer: parametrize.register_parametrization(layer, "bias", Double()),
    "weight norm": parametrizations.weight_norm,
    "weight norm by hooks": old_weight_norm,
    "pruned": lambda layer: (
        prune.l1_unstructured(layer, "weight", 0.5)
        if not hasattr(layer.weight, "to_local")
        else prune.identity(layer, "weight")
    ),
    "an attribute": lambda layer: attribute(layer, "weight"),
    "a bias that is an attribute": lambda layer: attribute(layer, "bias"),
    "no bias": lambda layer: setattr(layer, "bias", None),
    "a buffer": buffer,
}


WITHOUT_GRADIENT = "weight norm", "weight norm by hooks"  # of DTensors, in torch


@pytest.mark.data
def test_weights_in_the_place_of_parameters():
    on_ranks(_compared, 2)


def _compared(world):
    mesh = init_device_mesh("cpu", (world.ranks,))
    for shared in (False, True):
        for name, change in CHANGES.items():
            for layer in ("up", "down"):
                for training in (False,) if name in WITHOUT_GRADIENT else (True, False):
                    ours, theirs = (
                        _result(mesh, styles, change, layer, training, shared)
                        for styles in (weft.nn, torch_styles)
                    )
                    torch.testing.assert_close(
                        ours, theirs, msg=lambda text, name=name: f"{name}: {text}"
                    )


def _result(mesh, styles, change, changed, training, shared):
    """The output, and the gradient of the input."""
    torch.manual_seed(0)
    model, x = Model().train(training), torch.randn(2, 6, 16)
    rows = {"input_layouts": Shard(1)}
    if shared and styles is weft.nn:
        plan = {"": weft.nn.SharedColwiseParallel("up", "twin", **rows)}
    else:
        plan = dict.fromkeys(("up", "twin"), styles.ColwiseParallel(**rows))
    plan["down"] = styles.RowwiseParallel(output_layouts=Shard(1))
    torch_styles.parallelize_module(model, mesh, plan)
    change(getattr(model, changed))
    x = x.chunk(mesh.size(), 1)[mesh.get_local_rank()].requires_grad_(training)
    with torch.set_grad_enabled(training):
        y = model(x)
    if training:
        y.square().sum().backward()
    return y.detach(), x.grad
