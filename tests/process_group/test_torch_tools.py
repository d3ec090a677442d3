"""Tools of torch see calls on weft as they see those on gloo."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import tempfile
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks import group, on_ranks
from torch._C import _distributed_c10d as c10d
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ExecutionTraceObserver

from weft.process_group.worlds import operations_of

CPU = torch.device("cpu")
RECENT = torch.__version__ >= "2.14"


def traced(pg):
    def program(x):
        y = x * 2
        dist.all_reduce(y, group=pg)
        dist.broadcast(y, 0, group=pg)
        return y + 1

    return [node.name for node in make_fx(program)(torch.ones(3)).graph.nodes]


def counted(pg):
    with CommDebugMode() as counts:
        x = torch.ones(2)
        dist.all_reduce(x, group=pg)
        dist.all_gather_into_tensor(torch.empty(4), x, group=pg)
    return {str(op): count for op, count in counts.get_comm_counts().items()}


def executed(pg):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        observer = ExecutionTraceObserver().register_callback(path)
        observer.start()
        dist.all_reduce(torch.ones(2), group=pg)
        dist.all_to_all_single(torch.empty(4), torch.ones(4), group=pg)
        dist.barrier(pg)
        observer.stop()
        observer.unregister_callback()
        with open(path) as file:
            nodes = json.load(file)["nodes"]
    return sorted(node["name"] for node in nodes if node["name"].startswith("c10d::"))


def profiled(pg):
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(2), group=pg)
    return sorted(event.name for event in profile.events() if event.name.startswith("c10d::"))


def without_memory(pg):
    x, y = torch.ones(4, device="meta"), torch.ones(2, device="meta")
    shapes = []
    for mode in (contextlib.nullcontext(), FakeTensorMode()):
        with mode:
            fake = torch.ones(4) if isinstance(mode, FakeTensorMode) else x
            try:
                dist.all_reduce(fake, group=pg)
                shapes.append((tuple(fake.shape), fake.device.type, type(fake).__name__))
            except (RuntimeError, NotImplementedError) as error:
                shapes.append(type(error).__name__)
    return shapes, tuple(y.shape)


def by_operators(pg):
    boxed, x = pg.boxed(), torch.full((3,), float(dist.get_rank()))
    outs, work = torch.ops.c10d.broadcast_([x], boxed, 1, 0, True, -1)
    work.wait()
    y, work = torch.ops.c10d._allgather_base_(torch.empty(6), x, boxed, True, -1)
    work.wait()
    return outs[0].tolist(), y.tolist()


TOOLS = {
    traced: "allreduce_",
    counted: "c10d",
    executed: "c10d::allreduce_",
    profiled: "c10d::allreduce_",
    without_memory: "FakeTensor",
    by_operators: "1.0",
}


def see_the_same(world):
    gloos = dist.new_group(backend="gloo")
    for tool, words in TOOLS.items():
        gloo, own = tool(gloos), tool(world)
        assert gloo == own, tool.__name__
        assert words in str(own), (tool.__name__, own)


def test_tools_see_what_they_see_of_gloo():
    on_ranks(see_the_same, 2, context=group)


@pytest.mark.skipif(not RECENT, reason="earlier torches record calls of their own backends alone")
def test_the_flight_recorder_has_the_calls():
    on_ranks(recorded, 2, context=recorded_group)


def recorded(world):
    dist.all_reduce(torch.ones(2))
    dist.broadcast(torch.ones(3), 0, async_op=True).wait()
    entries = pickle.loads(c10d._dump_fr_trace())["entries"]
    assert [entry["profiling_name"] for entry in entries] == ["c10d:allreduce", "c10d:broadcast"]


@contextlib.contextmanager
def recorded_group():
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    with group() as made:
        yield made


def numbers(world):
    backend = world._get_backend(CPU)
    before = backend._get_sequence_number_for_group()
    for later in (False, True):
        x = torch.ones(2)
        for _ in range(3):  # the second time as a repetition
            if (work := dist.all_reduce(x, async_op=later)) is not None:
                work.wait()
    assert backend._get_sequence_number_for_group() == before + 6
    if RECENT:
        assert world._get_sequence_number_for_group() == before + 6


def test_groups_have_sequence_numbers():
    on_ranks(numbers, 2, context=group)


def options(_):
    for wrong in (dist.ProcessGroupGloo._Options(), object()):
        with pytest.raises(TypeError, match=r"no options of type .*: pass timeout="):
            dist.new_group(pg_options=wrong)
    own = c10d.Backend.Options("weft", timeout=timedelta(seconds=7))
    made = operations_of(dist.new_group(pg_options=own))
    assert made.world.timeout == 7


def test_options_are_honoured_or_refused():
    on_ranks(options, 2, context=group)


def works(world):
    """A work of an asynchronous call has all that torch's works have."""
    rank = dist.get_rank()
    x = torch.full((2,), float(rank))
    work = dist.all_reduce(x, async_op=True)
    assert work.wait(timedelta(seconds=20))
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0].tolist() == [1.0, 1.0]
    assert work.get_future().wait()[0].tolist() == [1.0, 1.0]
    if rank == 0:
        work = dist.irecv(x)
        work.wait()
        assert work._source_rank() == 1
        assert dist.recv(x) == 1
    else:
        for work in [dist.isend(x, 0) for _ in range(2)]:
            work.wait()
    wrong = dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG, async_op=True)
    with pytest.raises(TypeError, match="no avg of bool"):
        wrong.wait()
    with pytest.raises(TypeError, match="no avg of bool"):
        wrong.get_future().wait()


def test_works_are_complete():
    on_ranks(works, 2, context=group)


@pytest.mark.skipif(not RECENT, reason="an operation of torch 2.14")
def test_gathers_into_one_tensor():
    on_ranks(gathers, 2, context=group)


def gathers(_):
    rank = dist.get_rank()
    out = torch.zeros(2, 3) if rank == 1 else None
    dist.gather_single(torch.full((3,), float(rank)), out, dst=1)
    if out is not None:
        assert out.tolist() == [[0.0] * 3, [1.0] * 3]


def on_a_gpu(world):
    """torch gives the tensors of all devices to one backend if it knows none of a group's."""
    backend = world._get_backend(CPU)
    with pytest.raises(ValueError, match="on meta, but weft's backend takes CPU tensors only"):
        backend.allreduce([torch.ones(2, device="meta")])
    with pytest.raises(ValueError, match="on meta, but weft's backend takes CPU tensors only"):
        backend.send([torch.ones(2, device="meta")], 1 - dist.get_rank(), 0)


def test_tensors_on_other_devices_are_refused():
    on_ranks(on_a_gpu, 2, context=group)
