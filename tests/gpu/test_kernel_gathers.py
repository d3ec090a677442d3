"""The all-gather by a kernel, under Triton's interpreter: ranks that are threads, and processes.

Functions that run on a rank import kernels only after they have selected the interpreter.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.interpreter import interpreted, triton_world
from support.ranks import on_ranks

import weft
from weft.engines import engine
from weft.engines.recording import record
from weft.plan import Copy, Instruction, Notify, Region, Signal, Wait
from weft.schedules.all_gather import all_gather
from weft.world import World, current

pytest.importorskip("triton", "3.6")

LAUNCH = weft.Launch(comm_sms=2, tile_bytes=1024, warps=1)
SMALL: dict[str, Any] = {"algorithm": "kernel", "launch": LAUNCH}


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float32, call: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randint(-128, 128, shape, generator=generator).to(dtype)


def poisoned(out: torch.Tensor) -> torch.Tensor:
    """`out` with other contents; peers do not write to it before they all have called this."""
    out.fill_(True if out.dtype == torch.bool else 77)
    weft.barrier()
    return out


@contextlib.contextmanager
def accesses() -> Iterator[list[Any]]:
    """The accesses of all launches of this thread's rank."""
    from weft.gpu.kernels.all_gather import GatherKernel

    made, put, rank = list[Any](), GatherKernel._put, current().rank

    def noted(self: GatherKernel, access: Any, *arguments: Any) -> None:
        if self.rank == rank:
            made.append((access.width, access.rows))
        put(self, access, *arguments)

    GatherKernel._put = noted  # type: ignore[method-assign]
    try:
        yield made
    finally:
        GatherKernel._put = put  # type: ignore[method-assign]


def every_layout(
    rows: tuple[int, ...], dtype: torch.dtype, columns: int, launch: weft.Launch = LAUNCH
) -> None:
    """Shards of these rows, contiguous and a part of wider rows, to symmetric rows of both kinds,
    and to a new tensor.
    """
    world = current()
    shards = [data(r, n, columns, dtype=dtype) for r, n in enumerate(rows)]
    exact, own = torch.cat(shards), shards[world.rank]
    wider = torch.zeros(len(own), columns + 5, dtype=dtype)
    wider[:, 2 : columns + 2] = own
    options = SMALL | {"shard_rows": rows, "launch": launch}
    flat = world.empty(sum(rows), columns, dtype=dtype)
    margin = world.empty(sum(rows), columns + 3, dtype=dtype)
    for a in (own, wider[:, 2 : columns + 2]):
        for out in (flat, margin[:, 1 : columns + 1], torch.empty(sum(rows), columns, dtype=dtype)):
            poisoned(margin)
            assert weft.all_gather(a, out=poisoned(out), **options) is out
            assert torch.equal(out, exact), (rows, dtype, columns, a.stride(), out.stride())
            assert (margin[:, :1] == margin[:1, :1]).all()  # columns beside it are not written
            assert (margin[:, columns + 1 :] == margin[:1, :1]).all()
    assert torch.equal(weft.all_gather(own, **options), exact)
    assert torch.equal(weft.all_gather_async(own, **options).wait(), exact)


def layouts() -> None:
    for rows, dtype, columns in (
        ((4, 4, 4), torch.float32, 40),
        ((0, 5, 2), torch.bfloat16, 3),
        ((3, 1, 7), torch.int8, 5),
        ((2, 2, 2), torch.float64, 1),
        ((2, 2, 2), torch.bool, 0),
    ):
        every_layout(rows, dtype, columns)


def tiles() -> None:
    """The smallest tile of a warp, the largest, and one of two warps; shards of several tiles, of
    which the last is not full, and of less than one.
    """
    for tile_bytes, warps in ((512, 1), (8192, 1), (2048, 2)):
        launch = weft.Launch(comm_sms=2, tile_bytes=tile_bytes, warps=warps)
        every_layout((5, 3, 9), torch.float32, 700, launch)
        every_layout((1, 0, 2), torch.bfloat16, 12, launch)


def other_shapes() -> None:
    """Any number of dimensions, any dimension, strided elements, and this rank's part of `out`."""
    world = current()
    rank, ranks = world.rank, world.ranks
    for shape, dim in (((5,), 0), ((2, 3, 4), 0), ((2, 3, 4), 1), ((2, 3, 4), -1)):
        shards = [data(r, *shape) for r in range(ranks)]
        assert torch.equal(
            weft.all_gather(shards[rank], dim=dim, **SMALL), torch.cat(shards, dim=dim)
        )
    shards = [data(r, 6, 4) for r in range(ranks)]
    for view in (
        lambda x: x[:, 1],
        lambda x: x.t(),
        lambda x: x[::2],
        lambda x: x[:1].expand(3, 4),
    ):
        assert torch.equal(
            weft.all_gather(view(shards[rank]), **SMALL), torch.cat([*map(view, shards)])
        )
    whole = world.empty(6 * ranks, 7)
    for out in (whole, whole[:, :4], torch.empty(6 * ranks, 4)):
        own = poisoned(out)[6 * rank : 6 * rank + 6]
        own.copy_(data(rank, *own.shape))
        weft.all_gather(own, out=out, **SMALL)
        assert torch.equal(out, torch.cat([data(r, *own.shape) for r in range(ranks)]))


def widths() -> None:
    """The widest accesses that all addresses and distances permit, by each rank for itself."""
    world = current()
    out = world.empty(8 * world.ranks, 8, dtype=torch.bfloat16)
    memory = torch.zeros(4096, dtype=torch.bfloat16)
    begin = -memory.data_ptr() // 2 % 8

    def shard(at: int, stride: int) -> torch.Tensor:
        return memory[begin + at :].as_strided((8, 8), (stride, 1))

    for at, stride, expected in (
        (0, 8, (16, False)),
        (0, 16, (16, True)),
        (4, 8, (2, True)),
        (8 * world.rank + 1 - world.rank, 24, (2, True) if world.rank != 1 else (16, True)),
    ):
        with accesses() as made:
            weft.all_gather(shard(at, stride), out=out, **SMALL)
        assert made == [expected], (at, stride)
        weft.barrier()
    with accesses() as made:
        weft.all_gather(torch.zeros(3, 2, dtype=torch.bfloat16), **SMALL)
    assert made == [(4, False)]  # 12 bytes of each rank


def rejected() -> None:
    """Options that the kernel does not have are rejected before anything is sent."""
    world = current()
    a, out = torch.ones(4, 4), world.empty(4 * world.ranks, 8)
    for options, why in (
        ({"comm_sms": 0}, "comm_sms must be at least 1; got 0"),
        ({"comm_sms": 2.5}, "comm_sms must be an integer; got 2.5"),
        ({"warps": 3}, "warps must be 1, 2, 4, 8, 16 or 32, with at most 1024 threads"),
        ({"tile_bytes": 3000}, "tile_bytes must be a power of two from 4096 to 65536"),
        ({"tile_bytes": 512, "warps": 2}, "from 1024 to 16384, 16 to 256 for each of 64 threads"),
        ({"gluon": True}, "Gluon has no interpreter: use gluon=False under TRITON_INTERPRET=1"),
    ):
        with pytest.raises(ValueError, match=re.escape(why)):
            weft.all_gather(a, algorithm="kernel", launch=weft.Launch(**options))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk_rows has no effect with algorithm='kernel'"):
        weft.all_gather(a, algorithm="kernel", chunk_rows=2)
    with pytest.raises(ValueError, match="out must be contiguous"):
        weft.all_gather(a, algorithm="kernel", out=out[:, ::2])
    with pytest.raises(TypeError, match=r"launch must be a weft\.Launch; got int"):
        weft.all_gather(a, algorithm="kernel", launch=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="launch has no effect with algorithm='push'"):
        weft.all_gather(a, algorithm="push", launch=LAUNCH)
    assert torch.equal(weft.all_gather(a, algorithm="kernel"), torch.ones(4 * world.ranks, 4))


def recorded() -> None:
    """All instructions of a launch have the same span."""
    world = current()
    with record(world) as recording:
        weft.all_gather(torch.ones(6, 16), **SMALL)
    ((plan, _, spans),) = recording.executions
    lane = plan.lanes[world.rank]["compute"]
    assert [at for _, at, _, _ in spans] == [*range(len(lane))]
    launched = {tuple(span[2:]) for span in spans[:-2]}
    assert len(launched) == 1
    assert len({tuple(span[2:]) for span in spans}) == 3  # then the copy, and the notify


def different() -> None:
    world = current()
    weft.all_gather(torch.ones(2, 16), **SMALL)
    with pytest.raises(weft.MismatchError, match="comm_sms differs"):
        launch = LAUNCH._replace(comm_sms=1 + world.rank)
        weft.all_gather(torch.ones(2, 16), algorithm="kernel", launch=launch, timeout=5)
        weft.barrier(timeout=5)


def late() -> None:
    world = current()
    weft.all_gather(torch.ones(2, 16), **SMALL)
    if world.rank == 0:
        with pytest.raises(
            weft.PeerTimeout,
            match=r'rank 0 waited too long for signal "\w+" from rank 1 in all_gather or before',
        ):
            weft.all_gather(torch.ones(2, 16), timeout=0.05, **SMALL)


def in_local_worlds(_: World) -> None:
    interpreted()
    with weft.local_world(3, products="triton", timeout=10) as local:
        for check in (layouts, tiles, other_shapes):
            local.run(check)
    with weft.local_world(1, products="triton", timeout=10) as local:
        local.run(other_shapes)
    for check in (rejected, recorded, different, late):
        with weft.local_world(2, products="triton", timeout=10) as local:
            local.run(check)


@pytest.mark.slow
def test_local_worlds() -> None:
    on_ranks(in_local_worlds, 1)


def between_processes(world: World) -> None:
    widths()
    out = world.empty(5 * world.ranks, 64)
    for call in range(3):  # counters of earlier calls, and data of none
        shards = [data(r, 5, 64, call=call) for r in range(world.ranks)]
        weft.all_gather(shards[world.rank], out=poisoned(out), **SMALL)
        assert torch.equal(out, torch.cat(shards))
        assert torch.equal(weft.all_reduce(torch.ones(3)), torch.full((3,), float(world.ranks)))


def test_processes() -> None:
    on_ranks(between_processes, 2, context=triton_world)


def test_worlds_without_kernels_refuse_them() -> None:
    """They say what would do, and the plan itself is rejected as well."""
    for streams in (False, True):
        with weft.local_world(1, streams=streams) as local:
            local.run(without_kernels)


def without_kernels() -> None:
    world, a = current(), torch.ones(4, 4)
    instead = (
        r'weft.init\(device="cuda"\), or by weft.init\(products="triton"\) under TRITON_INTERPRET=1'
    )
    with pytest.raises(ValueError, match=instead):
        weft.all_gather(a, algorithm="kernel")
    with pytest.raises(ValueError, match="launch has no effect with algorithm='auto'"):
        weft.all_gather_async(a, launch=weft.Launch(comm_sms=4))
    with pytest.raises(weft.PlanError, match="all_gather by kernel is a plan for kernels"):
        engine(world).execute(all_gather(1, 1, "kernel"), {"a": a[:1], "gathered": a[:1].clone()})


def test_parts_of_a_lane_that_a_kernel_executes() -> None:
    from weft.gpu.gathers import fan_outs

    for symmetric in (True, False):
        lane = all_gather(3, 1, "kernel", symmetric_gathered=symmetric).lanes[1]["compute"]
        (found,) = fan_outs(lane, 1, 3)
        kinds = [type(lane[at]) for at in found.part]
        assert (
            kinds == [Notify] * 2 * symmetric + [Wait] * 2 + [Copy] * 3 + [Notify] * 2 + [Wait] * 2
        )
        assert found[1:4] == (("open", "open", 1) if symmetric else (None, "free", 0))
        for at in found.part:  # one instruction less is no such part any more
            if not (isinstance(lane[at], Notify) and lane[at].signal.name == "open"):
                with pytest.raises(weft.PlanError, match="cannot execute this instruction: copy"):
                    fan_outs([*lane[:at], *lane[at + 1 :]], 1, 3)


def test_two_kernels_execute_no_instruction_twice() -> None:
    """The waits that end one part of a lane do not begin the next."""
    from weft.gpu.gathers import fan_outs

    def gather(opened: str, buffer: str, arrived: str) -> list[Instruction]:
        copies = [Copy(Region(0, "a", 0, 1), Region(rank, buffer, 0, 1)) for rank in (0, 1)]
        return [
            Notify(1, Signal(opened, 0)),
            Wait(Signal(opened, 1), 1),
            *copies,
            Notify(1, Signal(arrived, 0)),
            Wait(Signal(arrived, 1), 1),
        ]

    lane = gather("open", "x", "there")
    parts = [found.part for found in fan_outs(lane + gather("again", "y", "done"), 0, 2)]
    assert parts == [range(6), range(6, 12)]
    with pytest.raises(weft.PlanError, match=r"cannot execute this instruction: copy .* -> y@1"):
        fan_outs(lane + gather("there", "y", "done")[2:], 0, 2)
