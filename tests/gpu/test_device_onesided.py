"""One-sided calls of worlds whose work is on streams: on lanes as threads, and with weft's kernels
under Triton's interpreter, for ranks that are threads and for real processes.
"""

import re

import pytest
import torch
from support.checks import onesided
from support.interpreter import interpreted, triton_world
from support.ranks import die, on_ranks, start, stream_world

import weft
from weft.engines import engine
from weft.gpu.signals import DeviceSignals
from weft.world import World

pytest.importorskip("triton", "3.6")

LAYOUTS = {  # rows of contiguous elements, or of single ones: what the kernel copies
    "contiguous": lambda t: t,
    "rows": lambda t: t[1:-1],
    "columns": lambda t: t[:, 3:70],
    "wide columns": lambda t: t[:, 16:64],
    "every other row": lambda t: t[::2],
    "one column": lambda t: t[:, 5],
    "one element": lambda t: t[2, 3],
    "transposed": lambda t: t.t(),
    "nothing": lambda t: t[:, 96:],
}


def in_order(world: World) -> None:
    """Each transfer reads the result of the one before it; the transfer keeps its source alive."""
    steps, peer = 300, 1 - world.rank
    memory = world.empty(steps + 1, dtype=torch.int64).zero_()
    weft.barrier()
    handles = [weft.put_async(memory[:1], torch.tensor([world.rank + 7]), peer)]
    for step in range(steps):
        source = world.peer(memory, peer)[step : step + 1]
        handles.append(weft.put_async(memory[step + 1 : step + 2], source, peer))
    handles[-1].wait()
    assert all(handle.done() for handle in handles)
    assert "put of 8 bytes" in repr(handles[0])
    weft.barrier()
    assert bool((memory == peer + 7).all())


def completed_by_close(world: World) -> None:
    memory = world.empty(1 << 20, dtype=torch.uint8).zero_()
    weft.barrier()
    last = [weft.put_async(memory, torch.full((1 << 20,), 3, dtype=torch.uint8), 0)] * world.rank
    world.close()
    assert all(transfer.done() for transfer in last)


def rejected(world: World) -> None:
    memory, plain, signals = world.empty(4, 4).fill_(7), torch.zeros(4, 4), world.signals(2, "s")
    kernels = world.backend.products == "triton"
    calls = [
        (ValueError, "dst is not in symmetric memory", lambda: weft.put(plain, plain, 1)),
        (ValueError, "src is on meta", lambda: weft.put(memory, plain.to("meta"), 1)),
        (TypeError, "dst is float32 and src float64", lambda: weft.put(memory, plain.double(), 1)),
        (ValueError, r"src has shape \(4, 4\) and dst \(4, 3\)", lambda: weft.get_async(plain[:, :3], memory, 1)),
        (ValueError, "dst holds elements more than once", lambda: weft.get(plain[:, :1].expand(4, 4), memory, 1)),
        (ValueError, "no rank 2 in a world of 2", lambda: weft.put(memory, plain, 2)),
        (ValueError, "no algorithm 'dma'; choose one of auto, copy-engine, kernel", lambda: weft.put(memory, plain, 1, algorithm="dma")),
        (ValueError, 'use it with algorithm="kernel"', lambda: weft.get(plain, memory, 1, comm_sms=4)),
        (ValueError, "a copy engine copies contiguous tensors", lambda: weft.put(memory, plain.t(), 1, algorithm="copy-engine")),
        (ValueError, "a copy engine copies contiguous tensors", lambda: weft.put_notify(memory, plain.t(), signals, 0, 1, algorithm="copy-engine")),
        (ValueError, "s has the counters 0 to 1; got index 2", lambda: weft.put_notify(memory, plain, signals, 2, 1)),
        (ValueError, "can add or set", lambda: weft.notify(signals, 0, 1, "sub")),
        (ValueError, "no comparison '=>'", lambda: weft.wait(signals, 0, "=>", 1)),
    ]  # fmt: skip
    if kernels:
        calls += [
            (ValueError, "comm_sms must be at least 1; got 0", lambda: weft.put(memory, plain, 1, algorithm="kernel", comm_sms=0)),
            (ValueError, "copies rows", lambda: weft.get(plain.t(), memory, 1, algorithm="kernel")),
        ]  # fmt: skip
    else:
        calls.append((ValueError, 'needs a GPU, or .*products="triton"', lambda: weft.put(memory, plain, 1, algorithm="kernel")))  # fmt: skip
    for kind, words, call in calls:
        with pytest.raises(kind, match=words):
            call()
    weft.barrier()
    assert bool((memory == 7).all()), "a rejected call moves nothing"
    assert signals[:] == [0, 0], "and raises nothing"


def then_lost(world: World) -> None:
    in_order(world)
    memory = world.empty(4)
    weft.barrier()
    if world.rank == 1:
        die()
    with pytest.raises(weft.PeerLost, match=r"rank 1 \(pid \d+\) died while rank 0 waited"):
        while True:
            weft.put(memory, torch.zeros(4), 1)
    with pytest.raises(weft.WeftError, match="closed: PeerLost"):
        weft.put(memory, torch.zeros(4), 1)


@pytest.mark.data
def test_processes_with_lanes_and_a_lost_peer() -> None:
    assert start(then_lost, 2, context=stream_world)[0].error is None


def on_lanes() -> None:
    world = weft.init()
    assert type(engine(world)).__name__ == "DeviceEngine"
    for dtype in (torch.uint8, torch.bfloat16, torch.complex128):
        onesided.every_view_to_every_peer(world, dtype)
    onesided.unaligned(world)
    rejected(world)
    onesided.examples(world, onesided.SOURCE, onesided.EXAMPLES)
    completed_by_close(world)


def in_stream_worlds(_: World) -> None:
    with weft.local_world(2, streams=True, timeout=10) as local:
        local.run(on_lanes)
    with weft.local_world(1, streams=True, timeout=10) as local:
        local.run(lambda: onesided.overlap(weft.init()))


@pytest.mark.data
def test_lanes() -> None:
    on_ranks(in_stream_worlds, 1)


def rows_by_kernel(world: World, *dtypes: torch.dtype) -> None:
    """Rows of every layout, both ways; nothing else changes."""
    peer, layouts, shape = 1 - world.rank, LAYOUTS.values(), (len(LAYOUTS), 7, 96)
    generator = torch.Generator().manual_seed(7)
    for dtype in dtypes:
        memory = world.empty(*shape, dtype=dtype)
        before, after, unseen = (onesided.random_bytes(shape, dtype, generator) for _ in range(3))
        memory.copy_(before)
        weft.barrier()
        for view, part, data in zip(layouts, memory, after, strict=True):
            weft.put(view(part), view(data), peer, algorithm="kernel", comm_sms=2)
        weft.barrier()
        expected, got, kept = before.clone(), unseen.clone(), unseen.clone()
        for view, *parts in zip(layouts, expected, after, kept, got, memory, strict=True):
            target, data, there, here, part = map(view, parts)
            target.copy_(data)
            there.copy_(data)
            weft.get_async(here, part, peer, algorithm="kernel").wait()
        assert onesided.same(memory, expected), dtype
        assert onesided.same(got, kept), dtype


def tiles_by_kernel(world: World) -> None:
    """Copies of more than a tile, for every width of a unit."""
    peer, size, bounds = 1 - world.rank, 20_000, ((0, 0), (1, -1), (2, -2), (4, -4), (8, -8))
    memory = world.empty(len(bounds), size, dtype=torch.uint8).zero_()
    weft.barrier()
    expected = torch.zeros_like(memory)
    for target, theirs, (begin, end) in zip(memory, expected, bounds, strict=True):
        inside = slice(begin, size + end)
        numbers = torch.randint(256, (size,), dtype=torch.uint8)[inside]
        weft.put(target[inside], numbers, peer, algorithm="kernel", comm_sms=3)
        weft.get(theirs[inside], target[inside], peer, algorithm="kernel", comm_sms=3)
        assert torch.equal(theirs[inside], numbers)
    weft.barrier()
    got = torch.zeros_like(memory)
    weft.get(got, memory, peer)
    assert torch.equal(got, expected), "nothing is written beside the rows"


def signals_by_kernel(world: World) -> None:
    signals, more, peer = world.signals(3, "s"), world.signals(2, "more"), 1 - world.rank
    assert isinstance(signals, DeviceSignals)
    weft.notify(signals, 0, peer, "set", 5)
    weft.notify(signals, 0, peer, value=3)
    weft.notify(signals, slice(1, 3), peer, value=2**64 - 1)
    weft.barrier()
    assert signals[0] == 8
    assert signals[:] == [8, 2**64 - 1, 2**64 - 1]
    for cmp, right, wrong in [("==", 8, 2), ("!=", 9, 8), (">", 7, 8), (">=", 8, 9), ("<", 9, 8), ("<=", 8, 7)]:  # fmt: skip
        assert weft.test(signals, 0, cmp, right)
        assert not weft.test(signals, 0, cmp, wrong)
        weft.wait(signals, 0, cmp, right)
    weft.wait(signals, 0, "<", 2**63)  # as unsigned numbers
    weft.wait(signals, slice(0, 3, 2), ">=", 8)
    weft.wait(signals, slice(1, 3), "==", 2**64 - 1)
    weft.wait(signals, slice(1, 1), "==", 77)  # an empty slice is always satisfied
    engine(world).one_sided.check()  # none of these waits timed out
    weft.notify(more, 1, peer)
    weft.wait(more, 1, ">=", 1)
    weft.barrier()
    if world.rank:
        return
    weft.wait(signals, 0, ">=", 8, timeout=1e-9)  # satisfied: a limit is not looked at
    weft.wait(more, slice(None), ">", 2**63, timeout=1e-3)
    with pytest.raises(
        weft.PeerTimeout,
        match=re.escape(f"rank 0 waited too long for more[0] > {2**63}: it was 0"),
    ):
        weft.notify(signals, 0, peer)
    with pytest.raises(weft.WeftError, match="closed: PeerTimeout"):
        weft.wait(signals, 0, ">=", 8)


def every_call() -> None:
    world = weft.init()
    rejected(world)
    rows_by_kernel(world, torch.uint8, torch.bfloat16, torch.float64)
    tiles_by_kernel(world)
    onesided.examples(world, onesided.SOURCE, ["publish", "mailbox", "overlapped"])
    signals_by_kernel(world)


def a_timeout_is_raised_by_a_collective() -> None:
    world = weft.init()
    signals = world.signals(1, "late")
    weft.barrier()
    if world.rank == 0:
        weft.wait(signals, 0, ">=", 1, timeout=1e-3)
        with pytest.raises(weft.PeerTimeout, match=r"for late\[0\] >= 1: it was 0"):
            weft.barrier()


def in_local_worlds(_: World) -> None:
    interpreted()
    for check in (every_call, a_timeout_is_raised_by_a_collective):
        with weft.local_world(2, products="triton", timeout=10) as local:
            local.run(check)


@pytest.mark.data
def test_kernels_in_local_worlds() -> None:
    on_ranks(in_local_worlds, 1)


def between_processes(world: World) -> None:
    rows_by_kernel(world, torch.bfloat16)
    onesided.examples(world, onesided.SOURCE, ["publish", "mailbox"])
    signals_by_kernel(world)


@pytest.mark.data
def test_kernels_between_processes() -> None:
    on_ranks(between_processes, 2, context=triton_world)


def on_a_cpu(world: World) -> None:
    memory, plain = world.empty(4), torch.zeros(4)
    for algorithm in ("copy-engine", "kernel"):
        with pytest.raises(ValueError, match=f"algorithm='{algorithm}' is how a GPU copies"):
            weft.put_async(memory, plain, 0, algorithm=algorithm)
    with pytest.raises(ValueError, match="comm_sms is the number of SMs"):
        weft.put(memory, plain, 0, comm_sms=4)
    with pytest.raises(ValueError, match="no algorithm 'fast'"):
        weft.get(plain, memory, 0, algorithm="fast")


def test_how_a_gpu_copies_is_refused_on_a_cpu() -> None:
    on_ranks(on_a_cpu, 1)
