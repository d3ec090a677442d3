"""Hints below exceptions that nobody catches: weft's way for torch's keywords, the name of a layer,
wrong variables.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import weft
import weft.nn
from weft.cli import app
from weft.launchers import hints
from weft.nn.layout import TensorLayout


def hinted(call):
    """The message of a call's exception once it is shown."""
    try:
        call()
    except Exception as error:
        for _ in range(2):  # once only
            hints.add(error, error.__traceback__)
        return str(error)
    raise AssertionError("no exception")


x = torch.ones(2)
OF_TORCH = {
    "async_op'; begin it by weft.all_reduce_async(...), and call wait() of the handle that it "
    "returns": lambda: weft.all_reduce(x, async_op=True),
    "src'; name the rank that sends by source=, or as the second argument: weft.broadcast(x, "
    "source)": lambda: weft.broadcast(x, src=0),
    "group'; make a world of the group once, world = weft.init(group), and pass "
    "world=world": lambda: weft.all_gather(x, group=None),
    "output_tensor'; pass the result as out=, or take the tensor that weft.all_gather "
    "returns": lambda: weft.all_gather(output_tensor=x, input_tensor=x),
    "given; name all but the first, as in weft.all_gather(x, out=y)": lambda: weft.all_gather(x, x),
}


@pytest.mark.parametrize("words", [*OF_TORCH])
def test_torchs_arguments_get_wefts_way(words):
    assert hinted(OF_TORCH[words]).endswith(words)


def test_other_exceptions_stay_as_they_are():
    def all_reduce(a):
        """A function of the user's that has the name of one of weft's; that is told apart only by
        its keywords.
        """

    for call, message in (
        (lambda: all_reduce(1, other=2), "unexpected keyword argument 'other'"),
        (lambda: weft.all_reduce(x, oop=2), "unexpected keyword argument 'oop'"),
        (lambda: [].index(3), "3 is not in list"),
        (lambda: {}["key"], "'key'"),
    ):
        assert hinted(call).endswith(message)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.ModuleDict(
            {"up": nn.Linear(4, 8), "down": weft.nn.ColumnParallelLinear(8, 4)}
        )
        layout = TensorLayout(torch.distributed.tensor.Shard(0), torch.distributed.tensor.Shard(-1))
        self.mlp["down"]._connect(self.mlp["down"].world, layout)

    def forward(self, x):
        return self.mlp["down"](self.mlp["up"](x)[:, :6])


def test_an_error_of_a_layer_names_it_within_the_model():
    with weft.init():
        model = nn.Sequential(nn.Identity(), Block())
        message = hinted(lambda: model(torch.ones(2, 4)))
    assert message.endswith("got shape (2, 6); in the layer 1.mlp.down of Sequential")


def test_ranks_of_a_local_world_get_hints():
    with weft.local_world(2) as local, pytest.raises(TypeError, match=r"weft\.all_reduce_async"):
        local.run(OF_TORCH[next(iter(OF_TORCH))])


@pytest.mark.parametrize(
    ("name", "given", "values"),
    [
        ("WEFT_STORES", "fast", "adaptive, cached or streaming"),
        ("WEFT_LOG", "verbose", "debug, info, warning or error"),
        ("WEFT_BIND", "no", "0 or 1"),
        ("WEFT_TRANSPORT", "rdma", "tcp or ucx"),
    ],
)
def test_a_wrong_variable_is_refused_by_the_command(name, given, values, monkeypatch):
    monkeypatch.setenv(name, given)
    done = CliRunner().invoke(app, ["run", __file__], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert f"{name} is {values}; got '{given}'" in done.stderr


def test_a_wrong_variable_is_an_error_of_weft_but_not_of_torch():
    program = (
        "import torch, weft; print('imported')\n"
        "try: weft.init()\n"
        "except ValueError as error: print(error)\n"
        "weft.all_reduce(torch.ones(1), async_op=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"WEFT_STORES": "fast"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == [
        "imported",
        "WEFT_STORES is adaptive, cached or streaming; got 'fast'",
    ]
    assert "ValueError: WEFT_STORES is" in done.stderr.splitlines()[-1]
