"""Which transport ranks on several hosts take, from what each of them offers."""

from __future__ import annotations

import pytest

import weft
import weft._native as _native
from weft.bootstrap import transports
from weft.bootstrap.transports import agreed, offered

MLX5 = ["self/memory", "tcp/eth0", "rc_mlx5/mlx5_0:1", "ud_mlx5/mlx5_0:1"]


@pytest.fixture
def devices(tmp_path, monkeypatch):
    """Let this host have devices, and UCX the resources, of the arguments."""

    def have(names, resources):
        def found():
            if isinstance(resources, str):
                raise RuntimeError(resources)
            return resources

        for name in names:
            (tmp_path / name).mkdir()
        monkeypatch.setattr(transports, "_DEVICES", tmp_path)
        monkeypatch.setattr(_native, "ucx_resources", found)

    monkeypatch.delenv("WEFT_TRANSPORT", raising=False)
    return have


@pytest.mark.parametrize(
    ("names", "resources", "told", "offer"),
    [
        (["mlx5_0"], MLX5, "", "either"),
        (["mlx5_0"], MLX5, "tcp", "tcp"),
        (["mlx5_0"], MLX5, "ucx", "ucx"),
        (["efa_0"], ["srd/efa_0:1"], "", "either"),
        (["mlx5_0"], ["tcp/eth0"], "", ""),  # a UCX that is built without InfiniBand
        (["mlx5_0"], "no library", "", ""),
        (["mlx5_0"], "no library", "ucx", "missing: no library"),
        ([], ["tcp/eth0"], "", ""),
        ([], ["tcp/eth0"], "ucx", "ucx"),
    ],
)
def test_what_a_rank_offers(devices, monkeypatch, names, resources, told, offer):
    devices(names, resources)
    if told:
        monkeypatch.setenv("WEFT_TRANSPORT", told)
    assert offered() == offer


def test_a_host_without_devices_does_not_load_ucx(devices, monkeypatch):
    devices([], "UCX was loaded")
    monkeypatch.setattr(_native, "ucx_resources", lambda: pytest.fail("UCX was loaded"))
    assert offered() == ""
    monkeypatch.setattr(transports, "_DEVICES", transports._DEVICES / "none")
    assert offered() == ""


@pytest.mark.parametrize(
    ("offers", "transport"),
    [
        (["either", "either"], "ucx"),
        (["either", "ucx"], "ucx"),
        (["ucx", "ucx", "ucx"], "ucx"),
        (["either", ""], "tcp"),
        (["either", "tcp"], "tcp"),
        (["", ""], "tcp"),
    ],
)
def test_all_ranks_take_one_transport(offers, transport):
    assert agreed(dict(enumerate(offers))) == transport


@pytest.mark.parametrize("other", ["tcp", ""])
def test_ranks_that_are_told_otherwise_are_named(other):
    with pytest.raises(weft.WeftError, match=r"is ucx on ranks \[1\], but not on ranks \[0, 2\]"):
        agreed({0: other, 1: "ucx", 2: other})


def test_a_rank_without_ucx_is_named():
    with pytest.raises(weft.WeftError, match="rank 1 cannot use UCX: no file; install a newer UCX"):
        agreed({0: "ucx", 1: "missing: no file"})
