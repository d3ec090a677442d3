"""One-sided calls on real ranks: copies, ordering, failures, and the examples of their
documentation.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest
import torch
from support.checks.onesided import (
    DTYPES,
    EXAMPLES,
    SOURCE,
    every_view_to_every_peer,
    examples,
    overlap,
    unaligned,
)
from support.ranks import another_world, die, meet, on_ranks, start

import weft
import weft._native as _native
from weft.checks import LOOK
from weft.schedules.barrier import barrier as barrier_plan
from weft.schedules.levels import flat

SOON = (
    10.0  # seconds, half the time limit: survivors take milliseconds, but the machine may be busy
)


@pytest.mark.data
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_view_reaches_every_peer_and_nothing_else_changes(ranks):
    for dtype in DTYPES if ranks == 2 else DTYPES[3:5]:
        on_ranks(every_view_to_every_peer, ranks, dtype)


def sub_byte(world):
    """Elements of two four-bit numbers are copied as others are; dtypes whose layout torch does not
    reveal are refused.
    """
    for dtype in (torch.float4_e2m1fn_x2, torch.bits8):
        memory = world.empty(4, 8, dtype=torch.uint8).fill_(17 + world.rank).view(dtype)
        got = [torch.zeros(4, 8, dtype=torch.uint8).view(dtype) for _ in range(2)]
        weft.barrier()
        if dtype == torch.bits8 and LOOK:
            with pytest.raises(
                TypeError,
                match=r"src is bits8, which weft cannot move: pass src.view\(torch.uint8\)",
            ):
                weft.get(got[0], memory, 1 - world.rank)
            continue
        weft.get(got[0], memory, 1 - world.rank)
        weft.get_async(got[1], memory, 1 - world.rank).wait()
        assert [*torch.cat(got).view(torch.uint8).unique()] == [18 - world.rank]
        weft.barrier()
        weft.put(
            memory,
            torch.full((4, 8), 33 + world.rank, dtype=torch.uint8).view(dtype),
            1 - world.rank,
        )
        weft.barrier()
        assert [*memory.view(torch.uint8).unique()] == [34 - world.rank]


@pytest.mark.data
def test_elements_of_less_than_a_byte():
    on_ranks(sub_byte, 2)


@pytest.mark.data
def test_unaligned_views():
    on_ranks(unaligned, 2)


@pytest.mark.data
def test_source_and_target_may_overlap():
    on_ranks(overlap, 1)


def beyond_2_gib(world):
    memory = world.empty((2 << 30) + 4096, dtype=torch.uint8)
    end = memory[-1000:]
    peer = 1 - world.rank
    numbers = torch.randint(
        1, 255, (1000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(world.rank)
    )
    weft.put(end, numbers, peer)
    weft.put(memory[0 :: 1 << 30], numbers[:3], peer)
    weft.barrier()
    theirs = torch.randint(
        1, 255, (1000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(peer)
    )
    assert torch.equal(end, theirs)
    assert memory[:: 1 << 30].tolist() == theirs[:3].tolist()
    assert torch.equal(world.peer(memory, peer)[-1000:], numbers)
    got = torch.zeros(1000, dtype=torch.uint8)
    weft.get_async(got, end, peer).wait()
    assert torch.equal(got, numbers)


@pytest.mark.data
@pytest.mark.slow
def test_segments_over_2_gib():
    on_ranks(beyond_2_gib, 2)


def bad_arguments(world):
    memory, signals, plain = world.empty(4, 4), world.signals(4, "flags"), torch.zeros(4, 4)
    other_world = another_world(world)
    other = other_world.empty(4, 4)
    memory.fill_(7)
    calls = [
        (ValueError, "dst is not in symmetric memory.*world.empty", lambda: weft.put(plain, plain, 1)),
        (ValueError, "src is not in symmetric memory", lambda: weft.get(plain, plain, 1)),
        (ValueError, "src is not in symmetric memory", lambda: weft.get_async(memory, plain, 1)),
        (ValueError, "another world", lambda: weft.put(memory, plain, 1, world=other_world)),
        (ValueError, "another world", lambda: weft.put_notify(other, plain, signals, 0, 1)),
        (TypeError, "dst is float32 and src float64", lambda: weft.put(memory, plain.double(), 1)),
        (ValueError, r"src has shape \(4, 4\) and dst \(4, 3\)", lambda: weft.get(plain[:, :3], memory, 1)),
        (ValueError, r"dst has shape \(4, 4\) and src \(16,\)", lambda: weft.put_async(memory, plain.view(-1), 1)),
        (ValueError, "no rank 2 in a world of 2", lambda: weft.put(memory, plain, 2)),
        (ValueError, "no rank -1 in a world of 2", lambda: weft.get(plain, memory, -1)),
        (TypeError, "peer must be the number of a rank; got float", lambda: weft.put(memory, plain, 1.0)),
        (TypeError, "src must be a tensor; got list", lambda: weft.put(memory, [1.0], 1)),
        (ValueError, "src is on meta", lambda: weft.put(memory, torch.empty(4, 4, device="meta"), 1)),
        (ValueError, "src has the layout torch.sparse_coo: pass src.to_dense", lambda: weft.put(memory, plain.to_sparse(), 1)),
        (ValueError, "dst is a negative view: pass dst.resolve_conj", lambda: weft.get(torch.zeros(4, 4, dtype=torch.complex64).conj().imag, memory, 1)),
        (ValueError, "dst holds elements more than once", lambda: weft.get(torch.zeros(4, 1).expand(4, 4), memory, 1)),
        (ValueError, "dst holds elements more than once", lambda: weft.put(memory[:1].expand(4, 4), plain, 1)),
        (ValueError, "flags has the counters 0 to 3; got index 4", lambda: weft.notify(signals, 4, 1)),
        (ValueError, "flags has the counters 0 to 3; got index -1", lambda: weft.wait(signals, -1, ">=", 1)),
        (ValueError, "flags has 4 counters: a slice needs", lambda: weft.test(signals, slice(2, 5), ">=", 1)),
        (TypeError, "an index must be an integer or a slice; got str", lambda: weft.test(signals, "0", ">=", 1)),
        (ValueError, "no comparison '=>'; choose one of == != > >= < <=", lambda: weft.wait(signals, 0, "=>", 1)),
        (ValueError, "can add or set; got op='sub'", lambda: weft.notify(signals, 0, 1, "sub")),
        (ValueError, r"0 to 2\*\*64 - 1; got -1", lambda: weft.notify(signals, 0, 1, "add", -1)),
        (ValueError, r"0 to 2\*\*64 - 1; got 18446744073709551616", lambda: weft.wait(signals, 0, "<", 2**64)),
        (TypeError, "an integer; got float", lambda: weft.test(signals, 0, "<", 1.5)),
        (ValueError, "no rank 2 in a world of 2", lambda: weft.notify(signals, 0, 2)),
        (ValueError, "timeout must be a positive", lambda: weft.wait(signals, 0, "==", 1, timeout=0)),
        (ValueError, "timeout must be a positive", lambda: weft.barrier(timeout=-1)),
        (ValueError, "count must be a positive", lambda: world.signals(0)),
        (ValueError, "flags has the counters 0 to 3; got index 9", lambda: weft.put_notify(memory, plain, signals, 9, 1)),
    ]  # fmt: skip
    for kind, words, call in calls:
        with pytest.raises(kind, match=words):
            call()
    weft.barrier()
    assert bool((memory == 7).all()), "a refused call moves nothing"
    assert signals[:] == [0, 0, 0, 0], "and raises nothing"
    other_world.close()


def test_bad_arguments_are_refused_before_anything_is_moved():
    on_ranks(bad_arguments, 2)


def transfers_in_order(world):
    steps, peer = 5000, 1 - world.rank
    memory = world.empty(steps + 1, dtype=torch.int64)
    memory.zero_()
    weft.barrier()
    # the transfer alone keeps its source alive
    handles = [weft.put_async(memory[:1], torch.tensor([world.rank + 7]), peer)]
    for step in range(steps):
        source = world.peer(memory, peer)[step : step + 1]
        # reads the result of the transfer before it
        handles.append(weft.put_async(memory[step + 1 : step + 2], source, peer))
        if step % 100 == 0:
            torch.full((1,), -1)
    # the last first, as more end meanwhile
    over = [handle.done() for handle in reversed(handles)][::-1]
    assert over == sorted(over, reverse=True), "they end in the order in which they were started"
    handles[-1].wait()
    assert all(handle.done() for handle in handles)
    assert "done" in repr(handles[0])
    weft.barrier()
    assert bool((memory == peer + 7).all())


@pytest.mark.data
def test_thousands_of_transfers_in_order():
    assert _native.Transfers.max_outstanding < 5000
    on_ranks(transfers_in_order, 2)


def slow_transfers(world):
    size = 64 << 20
    memory = world.empty(size, dtype=torch.uint8)
    weft.barrier()
    if world.rank == 0:
        source = torch.full((size,), 3, dtype=torch.uint8)
        handles = [weft.put_async(memory, source, 1) for _ in range(20)]
        with pytest.raises(
            weft.PeerTimeout,
            match=r"rank 0 waited 1e-06 s for its put of 67,108,864 bytes to rank 1; it is not done",
        ):
            handles[-1].wait(timeout=1e-6)
        assert "under way" in repr(handles[-1])
        memory.fill_(5)
        last = weft.put_async(memory[: size // 2], memory[: size // 2], 1)
        world.close()
        assert last.done()
        last.wait()
        meet()
        return None
    meet()
    return memory[0].item(), memory[-1].item()


@pytest.mark.data
def test_a_late_transfer_harms_nothing_and_close_completes_it():
    assert on_ranks(slow_transfers, 2)[1] == (5, 3)


def comparisons(world):
    signals, peer = world.signals(3, "s"), 1 - world.rank
    weft.notify(signals, 0, peer, "set", 5)
    weft.notify(signals, 0, peer, value=3)
    weft.notify(signals, slice(1, 3), peer, value=2**64 - 1)
    weft.barrier()
    assert len(signals) == 3
    assert signals[0] == 8
    assert signals[:] == [8, 2**64 - 1, 2**64 - 1]
    for cmp, right, wrong in [
        ("==", 8, 2),
        ("!=", 9, 8),
        (">", 7, 8),
        (">=", 8, 9),
        ("<", 9, 8),
        ("<=", 8, 7),
    ]:
        assert weft.test(signals, 0, cmp, right)
        assert not weft.test(signals, 0, cmp, wrong)
        weft.wait(signals, 0, cmp, right)
        with pytest.raises(
            weft.PeerTimeout,
            match=re.escape(f"rank {world.rank} waited 0.001 s for s[0] {cmp} {wrong}: it is 8"),
        ):
            weft.wait(signals, 0, cmp, wrong, timeout=0.001)
    assert weft.test(signals, slice(None), ">=", 8)
    assert not weft.test(signals, slice(None), ">", 8)
    with pytest.raises(weft.PeerTimeout, match=r"for s\[2\] < 9: it is 18446744073709551615"):
        weft.wait(signals, slice(0, 3, 2), "<", 9, timeout=0.001)
    weft.wait(signals, slice(1, 3), "==", 2**64 - 1)
    weft.wait(signals, slice(1, 1), "==", 77)  # an empty slice is always satisfied
    weft.barrier()  # after all peers have left, a wait would raise their loss instead


def test_comparisons_values_and_slices():
    on_ranks(comparisons, 2)


def all_of_a_slice(world):
    signals = world.signals(4, "parts")
    if world.rank:
        weft.notify(signals, world.rank, 0, value=2)
        return None
    weft.notify(signals, 0, 0)
    weft.notify(signals, 0, 0)
    weft.wait(signals, slice(None), ">=", 2)
    return signals[:]


def test_a_slice_is_satisfied_by_all_its_counters():
    assert on_ranks(all_of_a_slice, 4)[0] == [2, 2, 2, 2]


def late_notify(world):
    signals = world.signals(2, "late")
    if world.rank == 0:
        start_time = time.monotonic()
        with pytest.raises(
            weft.PeerTimeout, match=r"rank 0 waited 0.2 s for late\[1\] >= 3: it is 2"
        ):
            weft.wait(signals, 1, ">=", 3, timeout=0.2)
        assert 0.2 <= time.monotonic() - start_time < SOON
        weft.notify(signals, 0, 1)
        weft.wait(signals, 1, ">=", 3)
        assert weft.all_gather_matmul(torch.ones(1, 1), torch.ones(1, 1)).shape == (2, 1), (
            "collectives are in step"
        )
        return
    weft.notify(signals, 1, 0, value=2)
    weft.wait(signals, 0, ">=", 1)
    weft.notify(signals, 1, 0)
    weft.all_gather_matmul(torch.ones(1, 1), torch.ones(1, 1))


def test_a_timed_out_wait_leaves_the_world_open():
    on_ranks(late_notify, 2)


def lost_while_waiting(world, how, call):
    signals, memory = world.signals(2, "news"), world.empty(4)
    weft.barrier()
    start_time = time.monotonic()
    if world.rank == 1:
        time.sleep(0.2)
        if how == "die":
            die()
        if how == "raise":
            raise KeyError("lost my keys")
        world.close()
        return None
    calls = {
        "wait": lambda: weft.wait(signals, 1, ">=", 1),
        "test": lambda: weft.test(signals, 1, ">=", 1),
        "put": lambda: weft.put(memory, torch.zeros(4), 1),
        "get": lambda: weft.get(torch.zeros(4), memory, 1),
        "put_async": lambda: weft.put_async(memory, torch.zeros(4), 1).wait(),
        "notify": lambda: weft.notify(signals, 0, 1),
        "barrier": lambda: weft.barrier(),
    }
    with pytest.raises(weft.PeerLost) as caught:
        while time.monotonic() < start_time + 10:
            calls[call]()
    late = time.monotonic() - start_time
    with pytest.raises(weft.WeftError, match="closed: PeerLost"):
        weft.notify(signals, 0, 0)
    return str(caught.value), late


@pytest.mark.parametrize("call", ["wait", "test", "put", "get", "put_async", "notify", "barrier"])
def test_a_lost_peer_ends_every_call(call):
    outcome = start(lost_while_waiting, 2, "die", call)[0]
    assert outcome.error is None, outcome.error
    message, late = outcome.result
    assert re.match(r"rank 1 \(pid \d+\) died while rank 0 waited", message)
    assert late < SOON
    if call in ("wait", "test"):
        assert "for news[1] >= 1" in message


@pytest.mark.parametrize(
    ("how", "words"),
    [("raise", "failed with KeyError: 'lost my keys', while"), ("close", "closed its world")],
)
def test_a_failed_or_departed_peer_ends_a_wait(how, words):
    outcome = start(lost_while_waiting, 2, how, "wait")[0]
    assert outcome.error is None, outcome.error
    message, late = outcome.result
    assert words in message
    assert "for news[1] >= 1: it is 0" in message
    assert late < SOON


def satisfied_though_lost(world):
    signals, memory = world.signals(1), world.empty(4)
    if world.rank == 1:
        weft.put_notify(memory, torch.full((4,), 9.0), signals, 0, 0)
        world.close()
        return None
    time.sleep(0.3)
    weft.wait(signals, 0, ">=", 1)
    got = torch.zeros(4)
    weft.get(got, memory, 1)  # a departed peer's memory stays readable
    return memory.sum().item()


@pytest.mark.data
def test_the_memory_of_a_departed_peer_stays_readable():
    assert on_ranks(satisfied_though_lost, 2)[0] == 36


def interrupted(world):
    signals = world.signals(1)
    if world.rank == 1:
        weft.wait(signals, 0, ">=", 1)
        return None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start_time = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        weft.wait(signals, 0, ">=", 1)
    late = time.monotonic() - start_time
    weft.notify(signals, 0, 1)
    return late


def test_a_wait_can_be_interrupted_and_the_world_stays_usable():
    assert on_ranks(interrupted, 2)[0] < SOON


def many_threads(world):
    """Each of several threads sends numbers to its counterpart on the other rank, which returns
    their doubles.
    """
    count, peer, wrong = 6, 1 - world.rank, []
    signals, memory = world.signals(count), world.empty(count, dtype=torch.int64)

    def play(n):
        place = memory[n : n + 1]
        for number in range(1, 201):
            if world.rank == 0:
                weft.put_notify(place, torch.tensor([number + n]), signals, n, peer)
            weft.wait(signals, n, ">=", number)
            if place.item() != (number + n) * (2 - world.rank):
                wrong.append((n, number, place.item()))
            if world.rank == 1:
                weft.put_notify(place, 2 * place, signals, n, peer)

    threads = [threading.Thread(target=play, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


@pytest.mark.data
def test_threads_of_a_rank_may_call_at_once():
    assert on_ranks(many_threads, 2) == [[], []]


def barriers(world):
    log = world.empty(world.ranks, dtype=torch.int64)
    log.zero_()
    weft.barrier()
    for step in range(1, 200):
        if step % world.ranks == world.rank and step % 50 < world.ranks:
            time.sleep(0.005)
        for peer in range(world.ranks):
            weft.put(log[world.rank : world.rank + 1], torch.tensor([step]), peer)
        weft.barrier()
        assert log.tolist() == [step] * world.ranks
        weft.barrier()


@pytest.mark.data
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_barrier_orders_earlier_calls_before_later_ones(ranks):
    weft.verify(barrier_plan(flat(ranks)))
    on_ranks(barriers, ranks)


def barrier_alone(world):
    if world.rank == 1:
        time.sleep(1)
        return
    with pytest.raises(
        weft.PeerTimeout,
        match=r'waited 0.2 s .*barrier call 1 \(signal "barrier" from rank 1: 0 of 1\)',
    ):
        weft.barrier(timeout=0.2)
    with pytest.raises(weft.WeftError, match="closed: PeerTimeout"):
        weft.barrier()


def test_a_barrier_has_a_time_limit():
    assert start(barrier_alone, 2)[0].error is None


@pytest.mark.data
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_examples_of_the_documentation(ranks):
    assert {"publish", "mailbox", "credit", "halo"} <= set(EXAMPLES)
    on_ranks(examples, ranks, SOURCE, 3 * EXAMPLES)
