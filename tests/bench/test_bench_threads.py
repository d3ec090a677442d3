"""Benchmarks of ranks that are threads of one process, as they are where ranks share a GPU: here on
a CPU, with streams that are threads.
"""

from functools import partial, wraps

import pytest
import torch
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft.cli.values import Shape
from weft_tools.bench import between_ranks, fused, graphs, overlap, p2p, report, sweep, threads
from weft_tools.bench.benchmarks import BENCHMARKS
from weft_tools.bench.settings.copies import CopySettings
from weft_tools.bench.settings.overlap import OverlapSettings
from weft_tools.bench.settings.sweeps import AllGather
from weft_tools.bench.subjects import subject

QUICK = {"engine": "streams", "warmup": 1, "iterations": 2, "threads": 1}
MORE = {"all-gather-matmul": {"return_gathered": True, "ablate": True, "bias": True}}
ALGORITHMS = {
    "all-gather-matmul": "push",
    "matmul-reduce-scatter": "put",
    "matmul-all-reduce": "two_shot",
}


def fused_of_threads(name, **options):
    """The result of a fused operator of three ranks as a JSON object."""
    more = {"algorithm": ALGORITHMS[name], "baseline": "none", **MORE.get(name, {}), **options}
    settings = BENCHMARKS[name].settings(shape=Shape(60, 32, 48), ranks=3, **QUICK, **more)
    measure = partial(fused.measure, subject(settings.operator))
    return report.to_json(threads.in_threads(measure, settings))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_fused_operators_are_measured_and_verified(name, monkeypatch):
    found = fused_of_threads(name)
    assert found["verified"]
    assert found["ranks"] == 3
    assert {"compute", "communicate", "sequential", "pipelined"} <= {*found["times_ms"]}
    operator = name.replace("-", "_")
    monkeypatch.setattr(weft, operator, spoiled(getattr(weft, operator)))
    assert not fused_of_threads(name)["verified"]


def spoiled(operator):
    """The operator, which does nothing where it overlaps."""

    @wraps(operator)
    def nothing(a, b, *, out, algorithm, **options):
        if algorithm not in ALGORITHMS.values():
            return operator(a, b, out=out, algorithm=algorithm, **options)
        return (out, torch.zeros(60, a.shape[1])) if options.get("return_gathered") else out

    return nothing


@pytest.mark.parametrize(
    ("measure", "settings"),
    [
        (
            overlap.measure,
            OverlapSettings(shape=Shape(8, 8, 8), size="4K", ranks=3, baseline="none", **QUICK),
        ),
        (p2p.measure, CopySettings(sizes="4K:16K:4", ranks=2, **QUICK)),
    ],
    ids=["overlap", "p2p"],
)
def test_overlap_and_copies_are_measured_and_verified(measure, settings):
    found = threads.in_threads(measure, settings)
    assert found["verified"]
    assert found["ranks"] == settings.ranks


def test_ranks_that_are_threads_tell_each_other_their_data():
    def tell():
        world = weft.init()
        own = torch.full((2, 3), 10.0**world.rank, dtype=torch.float64)
        summed = between_ranks.sum_over_ranks(own)
        return (
            between_ranks.everyones(world, f"rank {world.rank}"),
            summed.unique().tolist(),
            own.unique().tolist(),
            between_ranks.number_of_ranks(),
        )

    with weft.local_world(3) as local:
        found = local.run(tell)
    names = ["rank 0", "rank 1", "rank 2"]
    assert found == [(names, [111.0], [10.0**rank], 3) for rank in range(3)]
    assert not between_ranks._lent


class Captures:
    """Stands for CUDA graphs: counts them and their replays, which are further calls."""

    def __init__(self):
        self.number, self.replays = 0, 0

    def capture(self, call):
        self.number += 1

        def replay():
            self.replays += 1
            return call()

        return replay


GATHER = {"sizes": "4K", "ranks": 3, "baseline": "none", "graph": True, **QUICK}


def test_replays_of_graphs_are_timed_and_verified(monkeypatch):
    """Fused operators, each view once on each rank, and collectives."""
    captures = Captures()
    monkeypatch.setattr(graphs, "capture", captures.capture)
    found = fused_of_threads("matmul-reduce-scatter", graph=True)
    assert found["verified"]
    assert found["options"]["graph"]
    assert captures.number == 3 * len(found["times_ms"])
    assert captures.replays > captures.number
    captures.number = 0
    swept = threads.in_threads(sweep.measure, AllGather(**GATHER))
    assert swept["verified"]
    assert captures.number == 3 * len(swept["rows"])

    monkeypatch.setattr(graphs, "capture", lambda call: lambda: None)  # a replay of nothing
    assert not threads.in_threads(sweep.measure, AllGather(**GATHER))["verified"]
    assert not fused_of_threads("matmul-reduce-scatter", graph=True)["verified"]


def test_ranks_capture_in_turn(monkeypatch):
    """Rank 1 does not begin before rank 0 has captured, nor does any rank continue before all have."""
    order = []

    def capture(call):
        order.append(call())
        return call

    def work():
        world = weft.init()
        graphs.captured(world, lambda: world.rank)
        return len(order)

    monkeypatch.setattr(graphs, "capture", capture)
    with weft.local_world(3) as local:
        assert local.run(work) == [3, 3, 3]
    assert order == [0, 1, 2]


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


COMMANDS = "all-gather", "all-gather-matmul", "matmul-reduce-scatter", "overlap", "p2p"


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("command", COMMANDS)
def test_ranks_that_share_the_only_gpu_are_threads(command, monkeypatch):
    began = []

    def in_threads(measure, settings):
        began.append((settings.device, settings.ranks))
        raise weft.WeftError("this far")

    monkeypatch.setattr(threads, "in_threads", in_threads)
    result = CliRunner().invoke(app, ["bench", command, "--device", "cuda"])
    assert result.exit_code == 1
    assert began == [("cuda", 2)]


REFUSED = [
    ("all-gather", ["--baseline", "torch"], "threads of one process: omit it, or start"),
    ("all-gather", ["--neighbours", "1"], "threads of one process: omit it, or start"),
    ("p2p", ["--neighbours", "1"], "threads of one process: omit it, or start"),
    ("all-gather-matmul", ["--baseline", "torch"], "threads of one process: omit it, or start"),
    ("all-gather-matmul", ["--trace", "t.json"], "threads of one process: omit it, or start"),
    ("overlap", ["--gather", "multicast"], "multicast needs a GPU for each rank"),
    ("all-gather", ["--graph", "--baseline", "torch"], "weft's calls alone are captured"),
    ("all-gather-matmul", ["--graph", "--trace", "t.json"], "replays is not recorded: omit"),
    ("all-gather-matmul", ["--graph", "--return-gathered"], "omit --return-gathered"),
]


def test_graphs_are_of_gpus():
    result = CliRunner().invoke(app, ["bench", "all-gather", "--graph"])
    assert result.exit_code == 2
    assert "graphs are of GPUs: use --device cuda" in result.output


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("command", "options", "why"),
    REFUSED,
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_ranks_on_one_gpu_cannot_do_is_refused(command, options, why):
    result = CliRunner().invoke(app, ["bench", command, "--device", "cuda", *options])
    assert result.exit_code == 2
    assert why in " ".join(result.output.replace("│", " ").split())
