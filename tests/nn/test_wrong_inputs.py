"""Inputs that do not fit a sharded layer: the message states the layer's features and the remedy."""

from __future__ import annotations

import re

import pytest
import torch
from torch.distributed.tensor import Shard

import weft
import weft.nn
from weft.nn.layout import Layout


def layer(sequence_dim):
    """A layer of 8 features whose inputs are sharded along a dimension."""
    made = weft.nn.ColumnParallelLinear(8, 4)
    made._connect(made.world, Layout(Shard(sequence_dim), Shard(-1)))
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
