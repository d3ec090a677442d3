"""Do the branches of CUDA graphs run at once, and what may other threads do during a capture?"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from weft_tools.assumptions.kernels import TIMED_OUT, mark_kernel, wait_kernel
from weft_tools.assumptions.question import Answer, Finding, Question
from weft_tools.assumptions.waiting import streams

_LIMIT = 500_000_000  # nanoseconds that a branch waits at most
_COPIED = 4 << 20  # bytes
_REPLAYS = 3


def branches(graphs: int) -> Answer:
    """Two branches of a graph run at once: one waits for a flag, and one copies and raises it.

    With two graphs each waits for the flag that the other raises. A captured call has a branch for
    each lane; if one began after another, which waits for it, the call would end with a
    `PeerTimeout`.
    """
    flags = torch.zeros(graphs, dtype=torch.int32, device="cuda")
    states = torch.zeros(graphs, dtype=torch.int32, pin_memory=True, device="cpu")
    one, other = (torch.zeros(graphs, _COPIED, dtype=torch.uint8, device="cuda") for _ in range(2))
    mark_kernel[(1,)](flags, num_warps=1)
    wait_kernel[(1,)](flags, states, _LIMIT, num_warps=1)
    torch.cuda.synchronize()
    milliseconds = []
    timed_out = 0
    with streams(graphs) as roots, streams(graphs) as sides:
        every = []
        for at, (root, side) in enumerate(zip(roots, sides, strict=True)):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(root):
                graph.capture_begin(capture_error_mode="thread_local")
                side.wait_stream(root)
                wait_kernel[(1,)](flags[at:], states[at:], _LIMIT, num_warps=1)
                with torch.cuda.stream(side):
                    one[at].copy_(other[at], non_blocking=True)
                    mark_kernel[(1,)](flags[(at + 1) % graphs :], num_warps=1)
                root.wait_stream(side)
                graph.capture_end()
            every.append(graph)
        for _ in range(_REPLAYS):
            flags.zero_()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for graph, root in zip(every, roots, strict=True):
                with torch.cuda.stream(root):
                    graph.replay()
            torch.cuda.synchronize()
            milliseconds.append(round(1e3 * (time.perf_counter() - begun), 2))
            timed_out += int((states == TIMED_OUT).any())
    return {"ms": milliseconds, "replays": _REPLAYS, "timed_out": timed_out}


def run_at_once(answer: Answer) -> Finding:
    """What it means that branches waited in vain, or not."""
    if not answer["timed_out"]:
        return Finding("fine", f"branches run at once: {answer['ms']} ms")
    return Finding(
        "bad",
        f"in {answer['timed_out']} of {answer['replays']} replays a branch waited in vain for "
        "another: captured calls may end with a PeerTimeout",
    )


def capture_beside_others() -> Answer:
    """While one thread captures, another synchronizes with the device and empties torch's cache, as
    ranks that capture at the same time do.

    Else ranks that are threads have to capture one after another.
    """
    x = torch.zeros(16, device="cuda").add_(1)
    errors = []

    def beside() -> None:
        for call in (torch.cuda.synchronize, torch.cuda.empty_cache):
            try:
                call()
            except Exception as error:
                errors.append(f"{call.__name__}: {type(error).__name__}: {error}"[:200])

    graph = torch.cuda.CUDAGraph()
    captured = "ended"
    with streams(1) as [stream], torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            x.add_(1)
            with ThreadPoolExecutor(1) as thread:
                thread.submit(beside).result()
            x.add_(1)
            graph.capture_end()
        except Exception as error:
            captured = f"{type(error).__name__}: {error}"[:200]
            with contextlib.suppress(Exception):
                graph.capture_end()
    return {"capture": captured, "other": errors}


def captures_are_apart(answer: Answer) -> Finding:
    """What it means that a capture and another thread disturbed each other, or not."""
    if answer["capture"] == "ended" and not answer["other"]:
        return Finding("fine", "a capture and the other thread did not disturb each other")
    return Finding(
        "bad",
        f"the capture: {answer['capture']}; the other thread: "
        f"{'; '.join(answer['other']) or 'no error'}. Ranks that are threads cannot capture at the "
        "same time",
    )


_OUTSIDE = "Do not capture calls of weft in graphs"
QUESTIONS = (
    Question(
        "graphs/branches",
        "Two branches of a graph run at once.",
        "gpu/program.py",
        partial(branches, 1),
        run_at_once,
        _OUTSIDE,
    ),
    Question(
        "graphs/two-graphs",
        "The branches of two graphs run at once.",
        "gpu/program.py",
        partial(branches, 2),
        run_at_once,
        _OUTSIDE,
    ),
    Question(
        "graphs/capture-beside-others",
        "A thread may synchronize while another captures.",
        "world/local.py",
        capture_beside_others,
        captures_are_apart,
        "Capture rank by rank while the others do nothing on the GPU",
    ),
)
