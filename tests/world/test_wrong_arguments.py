"""Arguments and variables of the wrong kind: each is refused at once by a message that states it."""

from __future__ import annotations

import math
import os
import re
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

import weft
from weft.bootstrap import shared_store
from weft.launchers.variables import launcher_variables

TWO_RANKS = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (
            ValueError,
            "timeout must be a positive number of seconds; got datetime.timedelta(seconds=5)",
            lambda: weft.init(timeout=timedelta(seconds=5)),
        ),
        (
            weft.WeftError,
            "weft supports the devices cpu and cuda; got tpu",
            lambda: weft.init(device="tpu"),
        ),
        (
            weft.WeftError,
            "weft supports the devices cpu and cuda; got meta",
            lambda: weft.local_world(2, "meta"),
        ),
        (
            TypeError,
            "group must be a process group of torch.distributed; got int: weft run -n 4 script.py "
            "starts 4 ranks",
            lambda: weft.init(4),
        ),
        (
            ValueError,
            "this process is not a member of the group: only members call weft.init(group)",
            lambda: weft.init(dist.GroupMember.NON_GROUP_MEMBER),
        ),
        (
            TypeError,
            "verify takes one or more objects of weft.Plan; got int, str",
            lambda: weft.verify(3, "plan"),
        ),
        (TypeError, "objects of weft.Plan; got none", lambda: weft.verify()),
        (
            TypeError,
            "group must be a process group of torch.distributed; got str",
            lambda: weft.enable_async_tp("tp"),
        ),
        (TypeError, "ranks must be an integer; got str", lambda: weft.local_world("2")),
        (TypeError, "ranks must be an integer; got str", lambda: weft.launch(len, "2")),
        (TypeError, "define it at the top level of a module", lambda: weft.launch(lambda: 1, 2)),
    ],
)
def test_arguments_of_the_wrong_kind(kind, message, call):
    with pytest.raises(kind, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (
            TypeError,
            "sizes must be integers; got ('four',)",
            lambda: weft.init().empty("four"),
        ),
        (TypeError, "sizes must be integers; got (4.5, 2)", lambda: weft.init().empty(4.5, 2)),
        (
            TypeError,
            "dtype must be a torch.dtype, such as torch.float32; got <class 'numpy.float32'>",
            lambda: weft.init().empty(8, dtype=np.float32),
        ),
        (
            TypeError,
            "dtype must be a torch.dtype, such as torch.float32; got 'float32'",
            lambda: weft.init().empty(8, dtype="float32"),
        ),
        (TypeError, "gbps must be a number; got '10'", lambda: weft.init().emulate_link("10")),
        (
            TypeError,
            "latency_us must be a number; got '5'",
            lambda: weft.init().emulate_link(10, "5"),
        ),
        *(
            (
                ValueError,
                "bandwidth and latency must be finite and not negative; got",
                lambda link=link: weft.init().emulate_link(*link),
            )
            for link in ((-1.0,), (math.nan,), (math.inf,), (1.0, -1.0), (1.0, math.nan))
        ),
        (
            TypeError,
            "rank must be the number of a rank; got str",
            lambda: weft.init().peer(weft.init().empty(1), "0"),
        ),
        (
            TypeError,
            "world must be a weft.World, as weft.init(group) makes it; got int",
            lambda: weft.barrier(5),
        ),
        (
            AttributeError,
            "'World' object has no attribute 'size'; use world.ranks",
            lambda: weft.init().size(),
        ),
        (
            AttributeError,
            "'World' object has no attribute 'world_size'; use world.ranks",
            lambda: weft.init().world_size,
        ),
        (
            TypeError,
            "out must have dtype float32; got float64",
            lambda: weft.all_reduce(torch.ones(2), out=torch.ones(2).double()),
        ),
    ],
)
def test_arguments_of_a_world(kind, message, call):
    def refused():
        with pytest.raises(kind, match=re.escape(message)):
            call()
        return weft.all_reduce(torch.ones(1)).item()

    with weft.local_world(1) as local:
        assert local.run(refused) == [1]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "RANK is set, but WORLD_SIZE is not: set both on every rank"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but RANK is not: set both on every rank"),
        ({**TWO_RANKS, "RANK": "first"}, "RANK must be a number; got 'first'"),
        ({**TWO_RANKS, "RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE must be a number; got ''"),
        ({**TWO_RANKS, "RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2: ranks are counted from 0"),
        (
            {**TWO_RANKS, "RANK": "0", "MASTER_PORT": "80000"},
            "MASTER_PORT must be a port from 0 to 65535; got '80000'",
        ),
    ],
)
def test_variables_that_no_launcher_sets(variables, message):
    with pytest.raises(weft.WeftError, match=re.escape(message)):
        launcher_variables(variables)


@pytest.mark.parametrize("variable", ["WEFT_BIND", "WEFT_READ_PEERS"])
def test_a_switch_is_0_or_1(variable, monkeypatch):
    monkeypatch.setenv(variable, "off")
    with pytest.raises(ValueError, match=f"{variable} is 0 or 1; got 'off'"):
        weft.init()


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("address", ["nowhere.invalid", "no..name"])
def test_an_address_that_cannot_be_resolved(monkeypatch, caplog, rank, address):
    """It ends long before the limit of the ranks' start."""
    monkeypatch.setattr(shared_store, "_NAMED", 0.2)
    for name, value in {**TWO_RANKS, "RANK": rank, "MASTER_ADDR": address}.items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(weft.WeftError, match=rf"MASTER_ADDR is '{address}', which cannot be"):
        shared_store.launched(300.0)
    # a warning at once where the name may come later
    assert len(caplog.messages) == (address == "nowhere.invalid")
