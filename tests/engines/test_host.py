"""The host engine: how it compiles, binds and repeats plans of ranks that share memory."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import weft
from weft.engines import engine
from weft.engines.host import HostEngine
from weft.engines.recording import record
from weft.errors import PlanError
from weft.plan import Buffer, Copy, Plan, Region, Term
from weft.schedules import all_gather, all_reduce
from weft.schedules.workload import Request


@contextmanager
def two():
    with weft.local_world(2, timeout=20) as local:
        yield local


def test_a_plan_is_compiled_once_for_all_sizes_and_once_for_each_dtype():
    plan = all_gather.all_gather(2, 2, "pull")

    def call():
        world = weft.init()
        own = engine(world)
        assert isinstance(own, HostEngine)
        for rows in ((3, 5), (0, 4), (6, 1)):
            a = torch.full((rows[world.rank], 7), 1.0 + world.rank)
            out = torch.empty(sum(rows), 7)
            own.execute(plan, {"a": a, "gathered": out}, rows=rows)
            assert out[:, 0].tolist() == [1.0] * rows[0] + [2.0] * rows[1]
        programs = len(own.programs)
        whole = torch.ones(2, 7, dtype=torch.int8)
        own.execute(plan, {"a": whole, "gathered": whole.new_empty(4, 7)}, rows=(2, 2))
        return programs, len(own.programs)

    with two() as local:
        assert local.run(call) == [(1, 2)] * 2


def test_programs_survive_a_workspace_that_grows():
    """Each program finds the new workspace, in its next execution, without being compiled again."""
    small, large = (all_reduce.all_reduce(2, pieces, "two_shot") for pieces in (1, 2))

    def call():
        world = weft.init()
        own, found = engine(world), []
        for plan, columns in ((small, 8), (large, 1 << 19), (small, 8), (large, 1 << 19)):
            a = torch.full((4, columns), 1.0 + world.rank)
            out = torch.empty_like(a)
            own.execute(plan, {"a": a, "out": out}, rows=(2, 2))
            assert torch.equal(out, torch.full_like(a, 3.0))
            found.append((own.segment.size, len(own.programs)))
        return found

    with two() as local:
        for (first, _), (grown, programs), *later in local.run(call):
            assert grown > first
            assert later == [(grown, programs)] * 2


def test_started_executions_of_one_plan_have_programs_of_their_own():
    def call():
        world = weft.init()
        tensors = [torch.full((1000,), float(i + world.rank)) for i in range(3)]
        handles = [weft.all_reduce_async(tensor) for tensor in tensors]
        found = [handle.wait()[0].item() for handle in handles]
        weft.all_reduce_async(tensors[0]).wait()
        return found, len(engine(world).programs)

    with two() as local:
        assert local.run(call) == [([1.0, 3.0, 5.0], 3)] * 2


def test_a_lane_that_it_does_not_run_is_refused_before_anything_is_sent():
    plan = Request(3, 2, "push", links=2)

    def call():
        from weft.schedules.all_gather_matmul import all_gather_matmul

        world = weft.init()
        tensors = {"a": torch.ones(2, 4), "out": torch.empty(6, 4)}
        with pytest.raises(PlanError, match="engines have the lanes compute and comm"):
            engine(world).execute(all_gather_matmul(plan), tensors, {"out": torch.ones(4, 4)})
        return weft.all_reduce(torch.ones(2)).tolist()

    with weft.local_world(3, timeout=20) as local:
        assert local.run(call) == [[3.0, 3.0]] * 3


def test_an_execution_records_a_span_of_each_instruction():
    row = [Region(0, name, 0, 1) for name in ("a", "out")]
    blocks = {"a": Buffer("input", (1,)), "out": Buffer("output", (1,))}
    plan = Plan("copy", "x", blocks, ({"compute": (Copy(*row),)},), {row[1]: (Term(0, "a", 0),)})

    def call():
        world = weft.init()
        with record(world) as recording:
            engine(world).execute(plan, {"a": torch.ones(1, 3), "out": torch.empty(1, 3)})
        [(recorded, _, spans)] = recording.executions
        [(lane, at, begin, end)] = spans
        return recorded.operator, lane, at, begin <= end

    with weft.local_world(1) as local:
        assert local.run(call) == [("copy", "compute", 0, True)]


def test_a_repeated_call_moves_the_binding_to_the_tensors_of_each_call():
    """The same layouts in other memory: neither a compilation nor a binding, and the right rows."""

    def call():
        world = weft.init()
        kept, own = [], engine(world)
        for i in range(5):
            a = torch.full((64, 3), float(i + world.rank))
            kept.append((a, weft.all_reduce(a)))  # kept, so that each has memory of its own
        assert [found[0, 0].item() for _, found in kept] == [1.0, 3.0, 5.0, 7.0, 9.0]
        return len(own.calls), len(own.programs)

    with two() as local:
        assert local.run(call) == [(1, 1)] * 2
