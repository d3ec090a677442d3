"""NCCL as a baseline, without a GPU: what it is given, what a result says of its SMs, and several
results as one.
"""

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from weft.cli import app
from weft_tools.bench import baselines, gathers, nccl, plots, saved
from weft_tools.bench.fused_baselines import call_of, rejection

RESULTS = Path(__file__).parents[1] / "fixtures/results"


class Pools:
    """In place of torch's pools of memory and of its NCCL: what was made in a registered pool."""

    def __init__(self):
        self.open, self.made, self.registered, self.gathered = False, [], [], []
        self.mem_allocator = None

    @contextmanager
    def use(self, pool):
        self.open = True
        yield
        self.open = False

    def recording(self, make):
        def made(*arguments, **options):
            tensor = make(*arguments, **options)
            if self.open:
                self.made.append(tensor)
            return tensor

        return made

    def eager_connect_single_device(self, device):
        pass

    def register_mem_pool(self, pool, symm):
        assert symm
        self.registered = [*self.made]

    def gather(self, out, source, group):
        self.gathered = [source, out]


def with_pools(monkeypatch, pools):
    """A world whose tensors are made in these pools."""
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: object())
    monkeypatch.setattr(torch.cuda, "use_mem_pool", pools.use)
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, pools.recording(getattr(torch, name)))
    return SimpleNamespace(device=torch.device("cpu"), ranks=2, keepalive=[])


def test_a_linear_layer_is_reduced_in_registered_memory(monkeypatch):
    pools, reduced = Pools(), []
    group = SimpleNamespace(_get_backend=lambda device: pools)
    monkeypatch.setattr(baselines, "group_of", lambda backend: group)
    monkeypatch.setattr(
        baselines, "collective", lambda name, source, out, group: lambda: reduced.append(out)
    )
    world = with_pools(monkeypatch, pools)
    a, b, out = torch.ones(4, 3), torch.ones(3, 2), torch.zeros(4, 2)
    call = call_of("nccl-registered", "matmul_all_reduce", a, b, out, [4], world)
    result = call()
    assert result is reduced[0] is pools.registered[0]
    assert torch.equal(result, torch.full((4, 2), 3.0))
    assert out.count_nonzero() == 0
    why = rejection("nccl-registered", "all_gather_matmul", 4, 2)
    assert why == "nccl-registered reduces results in registered memory: use it with " + (
        "matmul-all-reduce"
    )


def test_nccl_without_sms_copies_between_tensors_that_are_both_registered(monkeypatch):
    pools = Pools()
    config = SimpleNamespace(cta_policy=None)
    options = SimpleNamespace(
        NCCL_CTA_POLICY_ZERO=2, Options=lambda: SimpleNamespace(config=config)
    )
    group = SimpleNamespace(_get_backend=lambda device: pools)
    dist = SimpleNamespace(
        ProcessGroupNCCL=options,
        new_group=lambda **_: group,
        all_gather_into_tensor=pools.gather,
    )
    monkeypatch.setattr(gathers, "dist", dist)
    world = with_pools(monkeypatch, pools)
    way = gathers._zero_cta(world, torch.ones(4))
    way.gather()
    assert config.cta_policy == 2
    assert pools.gathered[0] is way.source is pools.registered[0]
    assert pools.gathered[1] is way.gathered is pools.registered[1]
    assert (way.source.shape, way.gathered.shape) == ((4,), (8,))
    assert way.comm_sms == 0


@pytest.mark.parametrize(("size", "sms"), [(16, 1), (16 << 10, 1), (17 << 10, 2), (64 << 20, 8)])
def test_the_programs_of_a_multicast(size, sms):
    assert gathers.multicast_sms(size) == sms


def test_a_limit_of_channels_is_part_of_the_name(monkeypatch):
    monkeypatch.delenv(nccl.MOST, raising=False)
    assert (nccl.channels(), nccl.named("nccl")) == (None, "nccl")
    monkeypatch.setenv(nccl.MOST, "1")
    assert (nccl.channels(), nccl.named("nccl")) == (1, "nccl, 1 channel")
    monkeypatch.setenv(nccl.MOST, "16")
    assert (nccl.channels(), nccl.named("nccl")) == (16, "nccl, 16 channels")


@pytest.fixture
def of_channels(tmp_path):
    """Three results of a sweep, as with 4, 8 and 16 channels."""
    made = json.loads((RESULTS / "gather.json").read_text())
    files = []
    for channels in (4, 8, 16):
        result = json.loads(json.dumps(made))
        for row in result["rows"]:
            if row["implementation"] == "gloo":
                row |= {"implementation": f"nccl, {channels} channels", "channels": channels}
                row["busbw_gbps"] = float(channels)
        files.append(tmp_path / f"{channels}.json")
        files[-1].write_text(json.dumps(result))
    return files


def test_several_results_are_one_curve_over_channels(of_channels, tmp_path, monkeypatch):
    figures, opened = [], plots.picture

    @contextmanager
    def kept(*arguments, **options):
        with opened(*arguments, **options) as figure:
            yield figure
            figures.append(figure)

    monkeypatch.setattr(plots, "picture", kept)
    picture = tmp_path / "sweep.png"
    done = CliRunner().invoke(app, ["show", *map(str, of_channels), "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    assert all(f"nccl, {number} channels" in done.output for number in (4, 8, 16))
    assert "vs weft" not in done.output
    for axes in figures[0].axes:
        [line] = [line for line in axes.lines if line.get_label() == "nccl"]
        assert [*line.get_xdata()] == [*line.get_ydata()] == [4, 8, 16]
        labels = [line.get_label() for line in axes.lines]
        assert {"weft", "weft (8)", "weft (16)"} < {*labels}
        assert len({line.get_color() for line in axes.lines}) == len(labels)


def test_names_of_files_are_shown_as_they_are(of_channels):
    later = of_channels[1].rename(of_channels[1].with_name("[later].json"))
    shown = CliRunner().invoke(app, ["show", str(of_channels[0]), str(later)])
    assert shown.exit_code == 0, shown.output
    assert "weft ([later])" in shown.output


def test_results_that_do_not_compare_are_refused(of_channels, tmp_path):
    other = json.loads(of_channels[0].read_text()) | {"ranks": 7}
    file = tmp_path / "other.json"
    file.write_text(json.dumps(other))
    with pytest.raises(ValueError, match="is of ranks 7, and"):
        saved.load_together([of_channels[0], file])
    first = json.loads(of_channels[0].read_text())
    for key, found, why in (
        ("machine", {"cpu": "another"}, "on another machine"),
        ("versions", {"torch": "1.0"}, "by other versions"),
    ):
        file.write_text(json.dumps(first | {key: first[key] | found}))
        with pytest.raises(ValueError, match=f"was measured {why} than .*: show them one by one"):
            saved.load_together([of_channels[0], file])
    one = RESULTS / "streaming.json"
    with pytest.raises(ValueError, match="no result of a collective over sizes"):
        saved.load_together([one, one])
