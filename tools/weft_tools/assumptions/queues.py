"""Do streams proceed while others wait?

Ranks that share a GPU wait for each other by kernels, on their own streams. A stream that is held
up by a waiting kernel of another may be the one that the kernel waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from weft_tools.assumptions.kernels import HOLDING_WARPS, hold_kernel, mark_kernel
from weft_tools.assumptions.question import Answer, Finding, Question
from weft_tools.assumptions.waiting import Flag, streams, until

STREAMS = 32
"""The most hardware queues of a GPU, and so the most streams of ranks that share it."""

_LIMIT = 0.3  # seconds that a kernel waits at most
_SOON = 0.05  # seconds in which work of other streams has to be done
_COPIED = 1 << 16  # bytes of a copy
_WAVES, _OF_A_WAVE = 8, 10_000_000  # waves of a kernel that fills the GPU, and nanoseconds of one


def kernels() -> Answer:
    """A kernel on each of 31 streams begins while one waits on another.

    Else a rank's notify, or the product before it, does not begin while a peer waits for it: ranks
    that share a GPU end with a `PeerTimeout`.
    """
    with streams(STREAMS) as every:
        return _held_up(every)


def copies(memory: str) -> Answer:
    """A copy on each of 31 streams is made while one waits on another, with a copy behind the wait.

    A copy engine has few channels. A copy that is in one, and waits there for a kernel, would hold
    up all copies behind it: rows for a rank would not be sent while another rank waits.
    """
    on = {"device": "cuda", "host": "cpu"}[memory]
    source = torch.zeros(STREAMS, _COPIED, dtype=torch.uint8, device=on, pin_memory=on == "cpu")
    target = torch.zeros(STREAMS, _COPIED, dtype=torch.uint8, device="cuda")
    with streams(STREAMS) as every:
        return _held_up(every, lambda at: target[at].copy_(source[at], non_blocking=True))


def priorities() -> Answer:
    """The same of kernels on 16 streams of the least priority and 16 of the greatest.

    Else transfers cannot have a priority over products.
    """
    with ExitStack() as stack:
        every = [
            stream
            for urgent in (False, True)
            for stream in stack.enter_context(streams(STREAMS // 2, urgent))
        ]
        return _held_up(every)


def _held_up(
    every: Sequence[torch.cuda.Stream], work: Callable[[int], object] = lambda at: None
) -> Answer:
    """For each stream on which a kernel waits, by number, the others whose `work` was not done
    soon; the stream has `work` behind its kernel. A stream that holds up others is asked twice,
    since the host may have been busy.

    The first stream whose wait held up the host is the last one that is asked.
    """
    marks = torch.zeros(len(every), dtype=torch.int32, pin_memory=True, device="cpu")
    mark_of = [marks[at:] for at in range(len(every))]
    flag = Flag(_LIMIT)
    mark_kernel[(1,)](marks, num_warps=1)

    def late(waiting: int) -> list[int] | None:
        """The others that are late; None if the wait ended before all of them had their work."""
        others = [at for at in range(len(every)) if at != waiting]
        with flag.lowered():
            marks.zero_()
            with torch.cuda.stream(every[waiting]):
                flag.wait(0)
                work(waiting)
            for at in others:
                with torch.cuda.stream(every[at]):
                    work(at)
                    mark_kernel[(1,)](mark_of[at], num_warps=1)
            until(lambda: int(marks.sum()) == len(others), _SOON)
            done = marks.tolist()
            return None if flag.timed_out() else [at for at in others if not done[at]]

    held_up = dict[str, list[int]]()
    for waiting in range(len(every)):
        found = late(waiting)
        if found != []:
            found = late(waiting)
        if found is None:
            return {"streams": len(every), "held_up": held_up, "host_held_up_by": waiting}
        if found:
            held_up[str(waiting)] = found
    return {"streams": len(every), "held_up": held_up, "host_held_up_by": None}


def not_held_up(answer: Answer) -> Finding:
    """What it means that streams held up others, or none did."""
    number, held_up = answer["streams"], answer["held_up"]
    if held_up:
        first, late = next(iter(held_up.items()))
        return Finding(
            "bad",
            f"waits on {len(held_up)} of {number} streams hold up others: one on stream {first} "
            f"those numbered {', '.join(map(str, late))}. Ranks that share a GPU can wait for each "
            "other until they time out",
        )
    if (waiting := answer["host_held_up_by"]) is not None:
        return Finding(
            "bad",
            f"the host could not put work on other streams while stream {waiting} waited: it went "
            "on when the wait had reached its limit",
        )
    return Finding("fine", f"with a wait on any of {number} streams, all others do their work")


def last() -> Answer:
    """A kernel on the last of 32 streams begins while all others wait.

    Else ranks cannot have as many streams together as the GPU has queues, and they time out though
    `check_queues` has admitted them.
    """
    mark = torch.zeros(1, dtype=torch.int32, pin_memory=True, device="cpu")
    flag = Flag(_LIMIT, STREAMS - 1)
    mark_kernel[(1,)](mark, num_warps=1)
    with streams(STREAMS) as every, flag.lowered():
        mark.zero_()
        for at, stream in enumerate(every[:-1]):
            with torch.cuda.stream(stream):
                flag.wait(at)
        with torch.cuda.stream(every[-1]):
            mark_kernel[(1,)](mark, num_warps=1)
        begun = until(lambda: bool(mark[0]) and flag.waiting() == STREAMS - 1, _SOON)
        return {"begun": begun or bool(mark[0]), "waiting": flag.waiting(), "streams": STREAMS}


def last_begins(answer: Answer) -> Finding:
    """What it means that the last stream's kernel began, or not."""
    others = answer["streams"] - 1
    if answer["begun"] and answer["waiting"] == others:
        return Finding("fine", f"{others} kernels waited, and that of the last stream began")
    return Finding(
        "bad",
        f"of {others} kernels that wait {answer['waiting']} began, and that of the last stream "
        f"{'did' if answer['begun'] else 'did not'}: fewer streams run at once than weft admits",
    )


def overtaking() -> Answer:
    """A kernel of the greatest priority begins before a kernel that fills the GPU has started its
    last wave.

    Else a notify or a copy by a kernel begins only when a product of many waves ends.
    """
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    in_a_wave = properties.max_threads_per_multi_processor // (32 * HOLDING_WARPS)
    programs = _WAVES * in_a_wave * properties.multi_processor_count
    begun = torch.zeros(programs, dtype=torch.int32, device="cuda")
    hold = partial(hold_kernel[(programs,)], num_warps=HOLDING_WARPS, maxnreg=32)
    hold(begun, 0)
    mark_kernel[(1,)](begun, num_warps=1)
    found: Answer = {}
    for name, urgent in (("least", False), ("greatest", True)):
        with streams(2) as [filling, beside], streams(1, urgent=True) as [above]:
            other = above if urgent else beside
            torch.cuda.synchronize()
            start, stop, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            with torch.cuda.stream(filling):
                start.record()
                hold(begun, _OF_A_WAVE)
                end.record()
            time.sleep(2e-9 * _OF_A_WAVE)  # while the first waves run
            with torch.cuda.stream(other):
                mark_kernel[(1,)](begun, num_warps=1)
                stop.record()
            torch.cuda.synchronize()
            found[name] = round(start.elapsed_time(stop), 2)
            found["kernel"] = round(start.elapsed_time(end), 2)
    return found


def overtakes(answer: Answer) -> Finding:
    """What it means that a kernel of the greatest priority began early, or not."""
    times = (
        f"beside a kernel of {answer['kernel']} ms, one of the greatest priority ended after "
        f"{answer['greatest']} ms, of the least after {answer['least']} ms"
    )
    if answer["greatest"] < 0.75 * answer["kernel"]:
        return Finding("fine", times)
    return Finding("bad", f"{times}: transfers by kernels start when a product ends")


_FEWER = (
    "Set CUDA_DEVICE_MAX_CONNECTIONS=32 before Python starts; if it is set, let ranks have GPUs of "
    "their own, as processes"
)
QUESTIONS = (
    Question(
        "queues/kernels",
        "A kernel begins while another stream waits.",
        "gpu/lanes.py",
        kernels,
        not_held_up,
        _FEWER,
    ),
    Question(
        "queues/copies-on-device",
        "A copy on the device is made while another stream waits and has a copy behind its wait.",
        "gpu/program.py",
        partial(copies, "device"),
        not_held_up,
        "Copy rows by a kernel: DeviceOptions(comm_sms=8)",
    ),
    Question(
        "queues/copies-from-host",
        "A copy from pinned memory is made while another stream waits and has a copy behind its "
        "wait.",
        "gpu/program.py",
        partial(copies, "host"),
        not_held_up,
        "Do not put such copies behind calls that wait for peers",
    ),
    Question(
        "queues/priorities",
        "Streams of two priorities do not hold up each other.",
        "gpu/lanes.py",
        priorities,
        not_held_up,
        "Run the ranks as processes (torchrun): each has its own context",
    ),
    Question(
        "queues/last",
        "32 streams work at once.",
        "gpu/options.py",
        last,
        last_begins,
        _FEWER,
    ),
    Question(
        "queues/overtaking",
        "A kernel of high priority begins before a running product of many waves ends.",
        "gpu/lanes.py",
        overtaking,
        overtakes,
        "Leave SMs to transfers: DeviceOptions(compute_sms=...)",
    ),
)
