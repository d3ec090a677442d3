"""The names that snippets in documents use without defining them: ranks, tensors, a model, its
mesh.
"""

import contextlib
import io
import json
import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import weft
import weft.nn
import weft.plan.trace

MODULES = {
    "io": io,
    "json": json,
    "nn": nn,
    "torch": torch,
    "weft": weft,
    "Shard": Shard,
    "parallelize_module": parallelize_module,
}


def names(world):
    """New names for each snippet."""

    def linear():
        return nn.Linear(8, 8)

    attention, mlp = (
        nn.ModuleDict({name: linear() for name in names})
        for names in (("wq", "wk", "wv"), ("up", "down"))
    )
    model = nn.ModuleDict(
        {
            "norm": nn.RMSNorm(8),
            "up": linear(),
            "attention": attention,
            "down": linear(),
            "mlp": mlp,
        }
    )
    mesh, tensors = (
        init_device_mesh("cpu", (world.ranks,)),
        {"a": torch.randn(4, 8), "b": torch.randn(8, 8)},
    )
    return (
        MODULES
        | tensors
        | {"world": world, "mesh": mesh, "model": model, "block": model, "file": io.StringIO()}
    )


def run(world, snippets, folder):
    """Run each snippet as one of the ranks, in a folder for its files."""
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        for where, text in snippets:
            exec(compile(text, where, "exec"), names(world))
