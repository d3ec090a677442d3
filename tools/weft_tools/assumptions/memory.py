"""The clock of a GPU, polls of counters, and atomics."""

from __future__ import annotations

import torch

from weft_tools.assumptions import attributes
from weft_tools.assumptions.kernels import clock_kernel, poll_kernel, swap_kernel
from weft_tools.assumptions.question import Answer, Finding, Question

_READS = 100_000
_POLLS = {"device": 200_000, "host": 20_000}
STEP = 5000
"""The longest step of the clock, in nanoseconds, by which tiles can be traced."""
POLL = 2.0
"""The longest poll of memory of the device, in microseconds, that is no hindrance: a notify and a
wait take about as long together.
"""


def clock() -> Answer:
    """The GPU's clock counts nanoseconds, in small steps.

    Else the kernels of these questions wait too long or too short a time, and so do kernels whose
    limit is by this clock; and traces of tiles are wrong.
    """
    times = torch.zeros(3, dtype=torch.int64, device="cuda")
    clock_kernel[(1,)](times, 10, num_warps=1)
    start, stop = _events()
    start.record()
    clock_kernel[(1,)](times, _READS, num_warps=1)
    stop.record()
    first, last, step = times.tolist()
    elapsed = 1e6 * start.elapsed_time(stop)
    return {"step_ns": step, "clock_ns": last - first, "events_ns": round(elapsed)}


def counts_nanoseconds(answer: Answer) -> Finding:
    """What the clock's step and rate mean."""
    ratio = answer["clock_ns"] / max(1, answer["events_ns"])
    if not 0.8 < ratio < 1.25:
        return Finding(
            "bad",
            f"the clock counts {answer['clock_ns']} ns in {answer['events_ns']} ns of events: "
            "limits by it, and traces, are wrong",
        )
    if answer["step_ns"] > STEP:
        return Finding(
            "bad", f"the clock has steps of {answer['step_ns']} ns: traces of tiles are too coarse"
        )
    return Finding("fine", f"the clock has steps of {answer['step_ns']} ns, and the right rate")


def polls() -> Answer:
    """A poll of a counter takes about a microsecond, of the host's memory a few.

    Else a rank sees a notify late: overlap by small blocks does not pay.
    """
    found = {}
    for memory, number in _POLLS.items():
        counter = (
            torch.zeros(1, dtype=torch.int64, device="cuda")
            if memory == "device"
            else torch.zeros(1, dtype=torch.int64, pin_memory=True, device="cpu")
        )
        for warps in (1, 8):
            poll_kernel[(1,)](counter, 10, num_warps=warps)
            start, stop = _events()
            start.record()
            poll_kernel[(1,)](counter, number, num_warps=warps)
            stop.record()
            stop.synchronize()
            microseconds = 1e3 * start.elapsed_time(stop) / number
            found[f"{memory}, {warps} warps"] = round(microseconds, 3)
    return found


def polls_are_short(answer: Answer) -> Finding:
    """What the time of a poll means."""
    times = ", ".join(f"{where} {us} us" for where, us in answer.items())
    slow = max(us for where, us in answer.items() if where.startswith("device"))
    return Finding("fine" if slow <= POLL else "bad", f"a poll takes: {times}")


def swap() -> Answer:
    """A compare-and-swap of the GPU works in pinned memory, where waits that time out write who was
    first.

    Else a later time-out overwrites an earlier one, and the error names the wrong wait.
    """
    target = torch.zeros(1, dtype=torch.int64, pin_memory=True, device="cpu")
    old = torch.zeros(1, dtype=torch.int64, device="cuda")
    seen = []
    for value in (7, 9):
        swap_kernel[(1,)](target, value, old, num_warps=1)
        torch.cuda.synchronize()
        seen.append([int(target), int(old)])
    return {"seen": seen}


def swaps(answer: Answer) -> Finding:
    """What it means that the second of two swaps was made, or not."""
    if answer["seen"] == [[7, 0], [7, 7]]:
        return Finding("fine", "the first of two swaps was made, the second was not")
    return Finding(
        "bad",
        f"memory and its old value were {answer['seen']} after two swaps, in place of "
        "[[7, 0], [7, 7]]: an error may name a wait that timed out later",
    )


def peers() -> Answer:
    """Atomics of a GPU work in the memory of another, where notifies raise counters.

    Else notifies between these GPUs are lost.
    """
    number = torch.cuda.device_count()
    pairs = [(one, other) for one in range(number) for other in range(number) if one != other]
    return {
        "gpus": number,
        "no_access": [pair for pair in pairs if not attributes.access(*pair)],
        "no_atomics": [pair for pair in pairs if not attributes.atomics(*pair)],
    }


def peers_have_atomics(answer: Answer) -> Finding:
    """What it means that GPUs cannot access each other's memory, or only without atomics."""
    if answer["gpus"] < 2:
        return Finding("unknown", "this process has one GPU")
    for key, what in (
        ("no_access", "cannot access each other's memory: ranks on them cannot share a world"),
        ("no_atomics", "have no atomics in each other's memory: notifies may be lost"),
    ):
        if pairs := answer[key]:
            listed = ", ".join(f"{one} and {other}" for one, other in pairs)
            return Finding("bad", f"GPUs {listed} {what}")
    return Finding("fine", f"atomics work between all of {answer['gpus']} GPUs")


def _events() -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(2)]


QUESTIONS = (
    Question(
        "memory/clock",
        "The GPU's clock counts nanoseconds in small steps.",
        "gpu/kernels/clock.py",
        clock,
        counts_nanoseconds,
        "Do not rely on traces of tiles; answers of the groups queues and blocking may be wrong",
    ),
    Question(
        "memory/polls",
        f"A poll of a counter takes at most {POLL:g} us.",
        "gpu/kernels/symmetric.py",
        polls,
        polls_are_short,
        "Send larger blocks: algorithm= and weft tune",
    ),
    Question(
        "memory/swap",
        "A compare-and-swap of the GPU works in pinned memory.",
        "gpu/kernels/symmetric.py",
        swap,
        swaps,
        "Take the wait that an error names for one of those that timed out",
    ),
    Question(
        "memory/peers",
        "Atomics of a GPU work in the memory of another.",
        "gpu/kernels/symmetric.py",
        peers,
        peers_have_atomics,
        "Use GPUs that are connected by NVLink",
    ),
)
