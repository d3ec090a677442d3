"""Which actions of the host wait for a kernel that waits?

Ranks that are threads of one process share a GPU's context. If an action of one of them waits for
the kernel of another, which waits for this rank, both end with a `PeerTimeout`. So what the engine
does in a call must not wait, and what it may have to do in a first call it does before any kernel
waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import starmap

import torch

from weft_tools.assumptions import actions
from weft_tools.assumptions.actions import Action
from weft_tools.assumptions.question import Answer, Finding, Question
from weft_tools.assumptions.waiting import Flag, streams, until

_LIMIT = 1.5  # seconds that a kernel waits at most: longer than any of the actions takes


def while_a_kernel_waits(prepare: Callable[[], Action]) -> Answer:
    """Milliseconds of an action on a stream while a kernel waits on another, and whether it ended
    only with the wait. `prepare` does before what the action may rely on.
    """
    torch.cuda.empty_cache()
    flag = Flag(_LIMIT)
    with streams(2) as [waiting, other]:
        with torch.cuda.stream(other):
            # so that small tensors of an action need no new memory of the device
            for size in (1 << 19, 64 << 20):
                torch.empty(size, dtype=torch.uint8, device="cuda")
            action = prepare()
        with flag.lowered():
            with torch.cuda.stream(waiting):
                flag.wait(0)
            if not until(lambda: flag.waiting() == 1, _LIMIT / 2):
                raise RuntimeError("the kernel that has to wait did not begin")
            begun = time.perf_counter()
            with torch.cuda.stream(other):
                _kept = action()  # to end a graph, or give memory back, is another action
                other.synchronize()
            took = time.perf_counter() - begun
            return {"ms": round(1e3 * took, 2), "waited": flag.timed_out()}


def must_not_wait(answer: Answer) -> Finding:
    """What it means that something that the engine or a program does between waits had to wait."""
    if not answer["waited"]:
        return Finding("fine", f"it took {answer['ms']} ms while a kernel waited")
    return Finding(
        "bad",
        f"it ended after {answer['ms']} ms, when the kernel had reached its limit of "
        f"{1e3 * _LIMIT:g} ms: ranks that are threads of one process would wait for each other "
        "until they time out",
    )


def may_wait(answer: Answer) -> Finding:
    """What it means that something that the engine never does between waits had to wait."""
    if answer["waited"]:
        return Finding("fine", "it waits for a kernel that waits, which weft expects")
    return Finding(
        "fine", f"it took {answer['ms']} ms while a kernel waited; weft does not need it"
    )


def has_to_wait(answer: Answer) -> Finding:
    """What it means that the control waited, or not."""
    if answer["waited"]:
        return Finding("fine", "it waits, so the other answers of this group count")
    return Finding(
        "unknown", "it did not wait for the kernel, so the other answers of this group say nothing"
    )


_PROCESSES = "Run the ranks as processes (torchrun): each has its own context"
_EAGER = (
    "Set CUDA_MODULE_LOADING=EAGER before Python starts, and compute everything once before the "
    "first call of weft"
)
_FIRST = "Make a call of each kind once, and synchronize, before ranks wait for each other"
_APART = "Capture rank by rank, before any rank replays"
_PINNED = "Pin the memory that is copied between calls"
_PROGRAMS = "programs"


def _free_of_waits(
    name: str, what: str, where: str, prepare: Callable[[], Action], remedy: str
) -> Question:
    relied_on = f"{what} while a kernel of another rank waits."
    ask = partial(while_a_kernel_waits, prepare)
    return Question(f"blocking/{name}", relied_on, where, ask, must_not_wait, remedy)


_ACTIONS = (
    (
        "launch",
        "A loaded kernel of torch is launched",
        "gpu/program.py",
        actions.launch,
        _PROCESSES,
    ),
    (
        "launch-by-triton",
        "A loaded kernel of Triton is launched",
        "gpu/counters.py",
        actions.launch_by_triton,
        _PROCESSES,
    ),
    (
        "copy-on-device",
        "A copy on the device is made",
        "gpu/program.py",
        actions.copy_on_device,
        _PROCESSES,
    ),
    (
        "copy-from-host",
        "A copy from pinned memory is made",
        "gpu/program.py",
        actions.copy_from_host,
        _PROCESSES,
    ),
    ("read", "An element is read on another stream", "gpu/signals.py", actions.read, _PROCESSES),
    (
        "table",
        "A small tensor is moved to the device",
        "gpu/counters.py",
        actions.table,
        _FIRST,
    ),
    ("event", "An event is recorded and awaited", "gpu/lanes.py", actions.event, _PROCESSES),
    ("stream", "A stream is made", "gpu/lanes.py", actions.stream, _FIRST),
    ("product", "A product is computed again", "gpu/program.py", actions.product, _PROCESSES),
    ("replay", "A graph is replayed", "gpu/program.py", actions.replay, _PROCESSES),
    ("capture", "A graph is captured", _PROGRAMS, actions.capture, _APART),
    (
        "new-kernel",
        "A kernel that torch never used is launched",
        _PROGRAMS,
        actions.new_kernel,
        _EAGER,
    ),
    (
        "new-product",
        "A product of a new kind is computed",
        _PROGRAMS,
        actions.new_product,
        _EAGER,
    ),
    (
        "new-thread",
        "A new thread computes a product",
        _PROGRAMS,
        actions.product_on_new_thread,
        _EAGER,
    ),
    ("device-memory", "The device gives new memory", _PROGRAMS, actions.device_memory, _FIRST),
    (
        "pinned-memory",
        "The host gives new pinned memory",
        _PROGRAMS,
        actions.pinned_memory,
        _FIRST,
    ),
    (
        "copy-from-pageable",
        "A copy from ordinary memory is made",
        _PROGRAMS,
        actions.copy_from_pageable,
        _PINNED,
    ),
)
QUESTIONS = (
    Question(
        "blocking/synchronize",
        "The control: to synchronize with the device waits for a kernel that waits.",
        "gpu/memory.py",
        partial(while_a_kernel_waits, actions.synchronize),
        has_to_wait,
        "",
    ),
    *starmap(_free_of_waits, _ACTIONS),
    Question(
        "blocking/load-by-triton",
        "A kernel of Triton may wait when it is loaded: weft loads its own before any waits.",
        "gpu/loading.py",
        partial(while_a_kernel_waits, actions.load_by_triton),
        may_wait,
        "",
    ),
    Question(
        "blocking/free",
        "Memory that is given back may wait: weft gives none back in calls.",
        "gpu/memory.py",
        partial(while_a_kernel_waits, actions.free),
        may_wait,
        "",
    ),
)
