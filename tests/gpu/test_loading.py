"""Everything that a call launches is loaded before anything waits, on all ranks that share a GPU:
on a CPU, whose world is told to load as a GPU's does.
"""

import threading

import pytest
import torch

import weft
from weft.gpu import loading
from weft.gpu.counters import HostCounters
from weft.gpu.loading import Loading

FUSED = [
    *(("all_gather_matmul", each) for each in ("direct", "pull", "push", "ring", "sequential")),
    *(("matmul_reduce_scatter", each) for each in ("direct", "push", "put", "ring", "sequential")),
    *(("matmul_all_reduce", each) for each in ("one_shot", "two_shot", "push", "put", "ring")),
]


@pytest.fixture
def local():
    """A world of two ranks that load as ranks on one GPU do."""
    with weft.local_world(2, streams=True) as made:
        for world in made.worlds:
            world.backend.loads_kernels = True
        yield made


def operands(world):
    """Rows of this rank, and a weight, of small whole numbers."""
    generator = torch.Generator().manual_seed(world.rank)
    return [torch.randint(-2, 3, s, generator=generator).float() for s in ((8, 6), (6, 4))]


class Log:
    """What each rank does, in order: loads, notifies and waits."""

    def __init__(self, monkeypatch):
        self.events = []
        for cls, name in ((Loading, "_load"), (HostCounters, "notify"), (HostCounters, "wait")):
            monkeypatch.setattr(cls, name, self.logged(getattr(cls, name), name))

    def logged(self, function, name):
        """The function, which logs the end of a load, and the begin of a notify or a wait."""

        def load(of, *args):
            function(of, *args)
            self.events.append((of.program.world.rank, name))

        def others(of, *args):
            self.events.append((of.world.rank, name))
            return function(of, *args)

        return load if name == "_load" else others

    def taken(self):
        found, self.events = self.events, []
        return found


@pytest.mark.parametrize(("operator", "algorithm"), FUSED)
def test_no_rank_waits_before_all_have_loaded(local, monkeypatch, operator, algorithm):
    """The first call of a kind loads, also if it is the first on one rank only: by another layout
    of its weight, a bias, or another address of the result.
    """
    log, together, taken = Log(monkeypatch), threading.Barrier(2), []

    def calls():
        world = weft.init()
        a, b = operands(world)
        call = getattr(weft, operator)
        y = call(a, b, algorithm=algorithm)
        memory = torch.empty(y.numel() + 1)
        apart = memory[1:].view(y.shape)  # 4 bytes after a multiple of 16
        for own in ({}, {"b": b.t().contiguous().t()}, {"bias": torch.ones(4)}, {"out": apart}):
            if together.wait() == 0:
                taken.append(log.taken())
            together.wait()
            arguments = {"a": a, "b": b, "algorithm": algorithm}
            if world.rank == 1 or "bias" in own:
                arguments |= own
            call(**arguments)
        if together.wait() == 0:
            taken.append(log.taken())

    local.run(calls)
    first, again, transposed, with_bias, apart = taken
    # a sum of products has one bias, which one of the ranks adds
    of_bias = {rank for rank, name in with_bias if name == "_load"} or {"none"}
    assert of_bias <= {0, 1}
    for events, ranks in (
        (first, {0, 1}),
        (again, set()),
        (transposed, {1}),
        (with_bias, of_bias),
        (apart, {1}),
    ):
        loaded = [at for at, (_, name) in enumerate(events) if name == "_load"]
        waiting = [at for at, (_, name) in enumerate(events) if name != "_load"]
        assert {events[at][0] for at in loaded} == ranks
        assert not loaded or not waiting or max(loaded) < min(waiting)


@pytest.mark.parametrize(("operator", "algorithm"), FUSED)
def test_a_rehearsal_writes_nothing_that_anybody_reads(local, monkeypatch, operator, algorithm):
    """Neither operands nor results, nor the workspaces of any rank."""
    load, together = Loading._load, threading.Barrier(2)

    def compared(self, given, *others):
        world, engine = self.program.world, self.program.engine
        every = [*given.tensors.values(), *given.weights.values(), *given.bias.values()]
        if engine.segment is not None:
            every.append(engine.segment.bytes(world.rank))
        before = [each.clone() for each in every]
        together.wait()  # peers have copies of theirs
        load(self, given, *others)
        together.wait()  # peers have loaded
        for one, other in zip(before, every, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))

    monkeypatch.setattr(Loading, "_load", compared)

    def call():
        a, b = operands(weft.init())
        return getattr(weft, operator)(a, b, algorithm=algorithm)

    found = local.run(call)
    monkeypatch.setattr(Loading, "_load", load)
    with weft.local_world(2) as host:
        assert all(map(torch.equal, found, host.run(call)))


def test_what_is_not_loaded_is_not_captured(local, monkeypatch):
    def calls():
        world = weft.init()
        a, b = operands(world)
        weft.all_gather_matmul(a, b, algorithm="push")
        together.wait()
        if world.rank == 0:
            monkeypatch.setattr(loading, "_capturing", lambda: True)
        together.wait()
        weft.all_gather_matmul(a, b, algorithm="push")
        with pytest.raises(weft.WeftError, match="call it once before you capture it in a graph"):
            weft.all_gather_matmul(a, b.t().contiguous().t(), algorithm="push")

    together = threading.Barrier(2)
    local.run(calls)
