"""Which copies are made without SMs?

Copies overlap products only if a copy engine makes them, or if SMs are left for them. So copies are
begun while every thread slot of the GPU is held: those that end are made by a copy engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from weft_tools.assumptions.kernels import HOLDING_WARPS, hold_kernel
from weft_tools.assumptions.question import Answer, Finding, Question
from weft_tools.assumptions.waiting import streams, until

Work = Callable[[], object]

_HELD = 100_000_000  # nanoseconds
CONTROL = "a kernel"
"""Work that needs an SM."""
ROWS = "rows with gaps"
"""A copy that torch may make by a kernel: the engine does not count on a copy engine for it."""


def while_sms_are_held(prepare: Callable[[], Mapping[str, Work]]) -> Answer:
    """For each work by name: whether it ended while all thread slots were held, and its
    milliseconds.
    """
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    in_an_sm = properties.max_threads_per_multi_processor // (32 * HOLDING_WARPS)
    programs = in_an_sm * properties.multi_processor_count
    begun = torch.zeros(programs, dtype=torch.int32, pin_memory=True, device="cpu")
    hold = partial(hold_kernel[(programs,)], num_warps=HOLDING_WARPS, maxnreg=32)
    hold(begun, 0)
    x = torch.ones(1024, device="cuda")
    works: dict[str, Work] = {CONTROL: lambda: x.add_(1), **prepare()}
    found: dict[str, dict[str, object]] = {}
    with streams(2) as [filling, other]:
        for name, work in works.items():
            with torch.cuda.stream(other):
                work()  # which loads what it needs
            torch.cuda.synchronize()
            begun.zero_()
            held, ended = torch.cuda.Event(), torch.cuda.Event()
            with torch.cuda.stream(filling):
                hold(begun, _HELD)
                held.record()
            full = until(lambda: int(begun.sum()) == programs, 0.3e-9 * _HELD)
            start = time.perf_counter()
            with torch.cuda.stream(other):
                work()
                ended.record()
            until(ended.query, 0.5e-9 * _HELD)
            took = time.perf_counter() - start
            early = ended.query() and not held.query()
            torch.cuda.synchronize()
            found[name] = {"full": full, "ended": early, "ms": round(1e3 * took, 2)}
    return {"works": found}


def on_device() -> Mapping[str, Work]:
    """Copies within the memory of the GPU, of several sizes, are made by a copy engine.

    Else on one GPU transfers of rows take SMs from products, or wait for them: times of fused
    operators there tell nothing about several GPUs, where copy engines send rows.
    """
    one, other = (torch.zeros(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(2))
    rows, columns = (each.view(8192, 8192)[:, :4096] for each in (one, other))
    sizes = {"4 KiB": 4 << 10, "1 MiB": 1 << 20, "64 MiB": 64 << 20}
    return {
        name: partial(one[:size].copy_, other[:size], non_blocking=True)
        for name, size in sizes.items()
    } | {ROWS: partial(rows.copy_, columns, non_blocking=True)}


def with_host() -> Mapping[str, Work]:
    """Copies between pinned memory and the GPU are made by a copy engine.

    Else rows of peers in the host's memory (``--peers host``) take SMs from products.
    """
    there = torch.zeros(16 << 20, dtype=torch.uint8, device="cuda")
    here = torch.zeros(16 << 20, dtype=torch.uint8, device="cpu").pin_memory()
    return {
        "to the device": partial(there.copy_, here, non_blocking=True),
        "to the host": partial(here.copy_, there, non_blocking=True),
    }


def made_by_copy_engine(answer: Answer) -> Finding:
    """What it means that some copies did not end while SMs were held."""
    works = dict(answer["works"])
    control = works.pop(CONTROL)
    if control["ended"] or not all(work["full"] for work in (control, *works.values())):
        return Finding(
            "unknown", "not all SMs could be held, so it cannot be told what makes the copies"
        )
    by_sms = [name for name, work in works.items() if not work["ended"]]
    if not by_sms:
        return Finding("fine", f"a copy engine makes them: {', '.join(works)}")
    if by_sms == [ROWS]:
        return Finding("fine", f"a copy engine makes all but {ROWS}, which SMs copy")
    return Finding(
        "bad", f"SMs make the copies: {', '.join(by_sms)}. Beside a product they wait for free SMs"
    )


QUESTIONS = (
    Question(
        "copies/on-device",
        "Copies within the memory of a GPU are made by a copy engine.",
        "gpu/program.py",
        partial(while_sms_are_held, on_device),
        made_by_copy_engine,
        "Leave SMs to copies on one GPU: DeviceOptions(compute_sms=...); take times of overlap "
        "between several GPUs only",
    ),
    Question(
        "copies/with-host",
        "Copies between pinned memory and a GPU are made by a copy engine.",
        "gpu/program.py",
        partial(while_sms_are_held, with_host),
        made_by_copy_engine,
        "Take no times of rows that come from the host's memory",
    ),
)
