"""Inputs that do not fit a sharded layer: the message states the layer's features and the remedy."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import weft
import weft.nn
from weft.nn.layout import TensorLayout


def layer(sequence_dim):
    """A layer of 8 features whose inputs are sharded along a dimension."""
    made = weft.nn.ColumnParallelLinear(8, 4)
    made._connect(made.world, TensorLayout(Shard(sequence_dim), Shard(-1)))
    return made


@pytest.mark.parametrize(
    ("shape", "sequence_dim", "message"),
    [
        (
            (4, 8),
            1,
            "input must have 8 features in its last dimension; got 16, since "
            "input_layouts=Shard(1) makes the last dimension of shape (4, 8) a part of the "
            "features: for inputs (tokens, features) use Shard(0)",
        ),
        ((2, 4, 6), 1, "input must have 8 features in its last dimension; got shape (2, 4, 6)"),
        ((4, 6), 0, "input must have 8 features in its last dimension; got shape (4, 6)"),
    ],
)
def test_the_features_of_a_sharded_input(shape, sequence_dim, message):
    with (
        torch.no_grad(),
        weft.local_world(2) as local,
        pytest.raises(ValueError, match=re.escape(message)),
    ):
        local.run(lambda: layer(sequence_dim)(torch.ones(shape)))


@pytest.mark.parametrize(
    ("kind", "style"),
    [
        (weft.nn.ColumnParallelLinear, "ColwiseParallel"),
        (weft.nn.RowParallelLinear, "RowwiseParallel"),
    ],
)
def test_a_layer_in_place_of_its_features(kind, style):
    message = f"{kind.__name__} takes in_features and out_features; got a layer: .*weft.nn.{style}$"
    with pytest.raises(TypeError, match=message):
        kind(torch.nn.Linear(32, 64))
    assert [*inspect.signature(kind).parameters][:3] == ["in_features", "out_features", "bias"]
    with weft.local_world(1) as local:
        made = local.run(lambda: torch.nn.utils.skip_init(kind, 32, 64, dtype=torch.float64))[0]
    assert (made.weight.shape, made.weight.dtype) == ((64, 32), torch.float64)
    assert made.weight.device.type == "cpu"


def test_models_without_a_layer_of_weft():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    sentence = "Sequential has no layer of weft.nn; apply a style first"
    assert weft.nn.explain(model) == sentence
    with pytest.raises(ValueError, match=sentence):
        weft.warmup(model, 1)


def test_a_tensor_in_place_of_a_model():
    for call in (weft.nn.explain, lambda model: weft.warmup(model, 1)):
        with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module; got Tensor"):
            call(torch.ones(2))


@pytest.mark.parametrize(
    ("kind", "features", "message"),
    [
        (
            weft.nn.RowParallelLinear,
            8,
            "RowParallelLinear (style RowwiseParallel): input must have this rank's part of the "
            "features in its last dimension, 4 of 8; got shape (3, 8): is the layer before it "
            "column-parallel?",
        ),
        (
            weft.nn.ColumnParallelLinear,
            4,
            "ColumnParallelLinear (style ColwiseParallel): input must have 8 features in its last "
            "dimension; got shape (3, 4): the input is that of all ranks, as of a row-parallel layer",
        ),
    ],
)
def test_the_features_of_an_input_of_another_layer(kind, features, message):
    with weft.local_world(2) as local, pytest.raises(ValueError, match=re.escape(message)):
        local.run(lambda: kind(8, 8)(torch.ones(3, features)))


@pytest.mark.parametrize("argument", ["input_layouts", "output_layouts"])
@pytest.mark.parametrize("style", [weft.nn.ColwiseParallel, weft.nn.RowwiseParallel])
def test_a_layout_that_is_no_placement(style, argument):
    with pytest.raises(TypeError, match=r"such as Shard\(1\) or Replicate\(\); got 'shard'"):
        style(**{argument: "shard"})._apply(nn.Linear(2, 2), None)
