"""Actions of the host: each function prepares one, on the current stream, and returns it.

What the engine does itself in a call comes first, then what it does only before any kernel waits,
and what programs do between calls.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from weft_tools.assumptions.kernels import constant_kernel
from weft_tools.assumptions.waiting import streams

Action = Callable[[], object]

_STREAMS = 34  # more than other questions have made: some are new


def launch() -> Action:
    """A kernel of torch that is loaded is launched at once.

    Else no sum, and no product by torch, can follow a wait.
    """
    x = torch.ones(1024, device="cuda").add_(1)
    return lambda: x.add_(1)


def launch_by_triton() -> Action:
    """A kernel of Triton that is loaded is launched at once.

    Else neither notifies nor waits nor weft's products can follow a wait.
    """
    target = torch.zeros(1, dtype=torch.int32, device="cuda")
    constant_kernel[(1,)](target, 1, num_warps=1)
    return lambda: constant_kernel[(1,)](target, 1, num_warps=1)


def copy_on_device() -> Action:
    """A copy on the device is begun at once; else no rows can be sent while a peer waits."""
    one, other = (torch.zeros(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(2))
    return lambda: one.copy_(other, non_blocking=True)


def copy_from_host() -> Action:
    """A copy from pinned memory is begun at once; else rows cannot stay in the host's memory."""
    source = torch.ones(4 << 20, dtype=torch.uint8, device="cpu").pin_memory()
    target = torch.zeros(4 << 20, dtype=torch.uint8, device="cuda")
    return lambda: target.copy_(source, non_blocking=True)


def read() -> Action:
    """An element is read on a stream without a wait; else signals cannot be read or tested."""
    x = torch.ones(1024, device="cuda")
    x.sum().item()
    return lambda: x.sum().item()


def table() -> Action:
    """A small tensor of the host becomes one of the device; else the first call with a plan, which
    makes a table of its signals, and the first use of signals wait.
    """
    return lambda: torch.tensor([1, 2, 3], dtype=torch.int64, device="cuda")


def event() -> Action:
    """An event is made, recorded and awaited; else lanes cannot wait for the caller's stream."""

    def act() -> None:
        new = torch.cuda.Event()
        new.record()
        new.synchronize()

    return act


def stream() -> Action:
    """A stream is made; else lanes cannot be made at their first use."""

    def act() -> None:
        with streams(_STREAMS):
            pass

    return act


def product() -> Action:
    """A product that was computed before is computed again; else products by torch cannot follow
    waits.
    """
    a, b = _factors(torch.bfloat16)
    out = a @ b
    return lambda: torch.mm(a, b, out=out)


def replay() -> Action:
    """A graph is replayed; else calls in graphs cannot follow each other."""
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(16, device="cuda").add_(1)
    graph.capture_begin(capture_error_mode="thread_local")
    x.add_(1)
    graph.capture_end()
    graph.replay()
    return graph.replay


def capture() -> Action:
    """A graph is captured; else ranks must all capture before one of them replays."""
    x = torch.zeros(16, device="cuda").add_(1)

    def act() -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        x.add_(1)
        graph.capture_end()
        graph.replay()
        return graph

    return act


def new_kernel() -> Action:
    """A kernel of torch that was never used is launched; it is loaded then, unless all were when
    the program began.

    Else any operator of torch that a program uses for the first time between calls may end them.
    """
    x = torch.ones(1024, device="cuda")
    return lambda: torch.atan2(x, x)


def new_product() -> Action:
    """A product of new dtypes and shapes is computed, as weft does before anything waits.

    Else a program may not compute a product between calls.
    """
    torch.mm(*_factors(torch.bfloat16))
    a, b = _factors(torch.float16)
    return lambda: torch.mm(a[:784], b[:, :640])


def product_on_new_thread() -> Action:
    """A product is computed on a new thread, which needs its own cuBLAS handle.

    Else a rank that computes on further threads may end calls, such as those of backward passes.
    """
    a, b = _factors(torch.bfloat16)
    torch.mm(a, b)
    here = torch.cuda.current_stream()

    def multiply() -> None:
        with torch.cuda.stream(here):
            torch.mm(a, b)

    def act() -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(multiply).result()

    return act


def device_memory() -> Action:
    """The device gives new memory; else a result may need it while a peer waits."""
    return lambda: torch.empty(301 << 20, dtype=torch.uint8, device="cuda")


def pinned_memory() -> Action:
    """The host gives new pinned memory; else a program may not pin its batches between calls."""
    return lambda: torch.empty(33 << 20, dtype=torch.uint8, pin_memory=True, device="cpu")


def copy_from_pageable() -> Action:
    """A copy from ordinary memory is made; else a program's batches may not be copied to the GPU
    between calls.
    """
    source = torch.ones(16 << 20, dtype=torch.uint8, device="cpu")
    target = torch.zeros(16 << 20, dtype=torch.uint8, device="cuda")
    return lambda: target.copy_(source)


def load_by_triton() -> Action:
    """Loading a kernel may wait for the device: weft loads its own before any kernel waits.

    If it does not, ranks need not agree on what is loaded.
    """
    target = torch.zeros(1, dtype=torch.int32, device="cuda")
    constant_kernel.warmup(target, 2, grid=(1,), num_warps=1)  # compiled, but not loaded
    return lambda: constant_kernel[(1,)](target, 2, num_warps=1)


def free() -> Action:
    """Memory that is given back to the device may wait for it: weft gives none back during calls.

    If it does not, `torch.cuda.empty_cache` is safe while ranks wait.
    """
    torch.empty(303 << 20, dtype=torch.uint8, device="cuda")
    return torch.cuda.empty_cache


def synchronize() -> Action:
    """The control: to synchronize with the device waits for the kernel, so waits are noticed."""
    return torch.cuda.synchronize


def _factors(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(1024, 1024, device="cuda", dtype=dtype) for _ in range(2)]
