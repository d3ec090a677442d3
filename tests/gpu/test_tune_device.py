"""``weft tune`` on devices, by the same code on a CPU: what is measured, stored and used by auto."""

import contextlib
import json
import os
import sys
from typing import Any

import pytest
import torch
from support.caches import own_cache
from support.ranks import on_ranks, stream_world
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft.engines import engine
from weft.gpu import tuning
from weft.measure import tune
from weft.ops import all_gather_matmul, stored
from weft.ops.options import Operands
from weft.ops.records import AllGatherMatmul
from weft.schedules.device_options import DEFAULT, DeviceOptions
from weft.schedules.workload import Variant, Workload
from weft.world import current

CASE = Workload(
    "all_gather_matmul", (96, 96, 96), 16, 64, "float32", "float32", packed=False, symmetric=False
)


def explained() -> str:
    return weft.explain(torch.ones(96, 16), torch.ones(16, 64))


def called(rank: int) -> None:
    """A call by auto has the result of all."""
    y = weft.all_gather_matmul(torch.full((96, 16), 1.0 + rank), torch.ones(16, 64))
    assert torch.equal(y[::96, 0], torch.tensor([16.0, 32.0, 48.0]))


def measured_and_used(
    _: None, place: dict[str, Any], kept: DeviceOptions, shared: str
) -> list[DeviceOptions]:
    """The options that were measured. A stored variant is used by auto in a new world of the same
    hardware, on all ranks though rank 0 alone has it.
    """
    own_cache(f"{shared}/{os.environ['RANK']}")
    sys.setswitchinterval(1e-4)
    tune._PIECES, tuning._COPYING = (1, 2), (2,)
    tuning.TILES, tuning._SHARES = ((64, 64), (64, 128)), (4,)
    ((found, name, *_),) = tune.measure_streams([CASE], 1, place)
    assert [each.median for each in found] == sorted(each.median for each in found)
    products = "triton" if place["engine"] == "interpreter" else "torch"
    made = {"products": products, "streams": True, "timeout": 20}
    with weft.init(**made) as world:
        assert name == stored.key(CASE, engine(world).setting)
        if world.rank == 0:
            best = Variant("push", 2, device=kept)
            stored.remember(name, stored.Measured(best, 1.0))
            other = stored.key(CASE, "another GPU")
            stored.remember(other, stored.Measured(Variant("pull"), 1.0))
        called(world.rank)
        text = explained()
        assert f"push ({kept}), at most 48 rows per transfer: it was measured" in text
        world.configure(DeviceOptions(links=2))  # the caller's own options come first
        assert "the world's options ask for 2 links" in explained()
        called(world.rank)
    with weft.init(timeout=20):  # another engine
        assert "it was measured" not in explained()
    return [each.variant.device for each in found]


def candidates(world: weft.World) -> list[Variant]:
    a, b = torch.ones(512, 16), torch.ones(16, 64)
    call = all_gather_matmul.check(world, Operands(a, [b], [None], [None]), AllGatherMatmul())
    return call.candidates(call.rule().variant)


def test_pieces_of_what_streams_move_are_measured():
    found, _ = on_ranks(candidates, 2, context=stream_world)
    assert {each.algorithm for each in found} == {"push", "direct", "sequential"}
    assert {each.pieces for each in found if each.algorithm == "push"} >= {2, 4, 8, 16}


def rank_alone() -> Any:
    return contextlib.nullcontext()


def test_links_are_measured_and_used(tmp_path):
    found, *_ = on_ranks(
        measured_and_used,
        3,
        {"engine": "streams"},
        DeviceOptions(links=2),
        str(tmp_path),
        context=rank_alone,
    )
    assert {*found} == {DEFAULT, DeviceOptions(links=2)}


@pytest.mark.slow
def test_tiles_and_sms_are_measured_and_used(tmp_path):
    pytest.importorskip("triton", "3.6")
    kept = DeviceOptions(tile=(64, 64), comm_sms=2, compute_sms=1)
    found, *_ = on_ranks(
        measured_and_used,
        3,
        {"engine": "interpreter"},
        kept,
        str(tmp_path),
        context=rank_alone,
        limit=300,
    )
    assert {each.tile for each in found} >= {None, (64, 64), (64, 128)}
    assert {each.comm_sms for each in found} == {0, 2}
    assert {each.links for each in found} == {1, 2}
    assert any(each.compute_sms for each in found)


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    words = ["tune", "all-gather-matmul", "-n", "3", "--shape", "96x16x24", "--engine", "streams"]
    outcome = CliRunner().invoke(app, [*words, "--iterations", "1", "--json", "-"])
    assert outcome.exit_code == 0, outcome.output
    (made,) = json.loads(outcome.stdout)["tuned"]
    ms = [row["measured_ms"] for row in made["ways"]]
    assert ms == sorted(ms)
    assert any(row.get("device", {}).get("links") == 2 for row in made["ways"])
    assert "predicted ms" not in outcome.stderr
    (entry,) = json.loads(next(tmp_path.glob("variants-*.json")).read_text()).items()
    assert ", threads of a CPU, " in entry[0]
    assert entry[1]["algorithm"] == made["ways"][0]["algorithm"]


def test_the_fastest_so_far_is_kept_by_each_group():
    """Groups of options start from the fastest variant, and copies from one that honours them."""
    with weft.local_world(3, streams=True) as local:

        def groups() -> None:
            call = tune._fused(CASE, current())
            direct, push = Variant("direct"), Variant("push", 2)
            found = [*tuning.transfers(call, [direct, push])]
            assert found == [direct, push._replace(device=DeviceOptions(links=2))]
            assert not [*tuning.tiles(call, [push])], "torch has no tiles"
            assert not [*tuning.sms(call, [push])]

        local.run(groups)
