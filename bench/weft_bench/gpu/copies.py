"""One-sided copies of a world whose work is on streams: by the copy engine, asynchronously, and by
a kernel on several numbers of SMs.

Times are by the GPU's clock. Cycles are the host's: of a transfer from its call until the stream is
done, of the caller to put it on the stream. On a CPU, where lanes are threads, the copy engine is
torch's copy, and kernels are interpreted: for checks of the program, not for its speed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

import weft._native as _native
from weft.ops.onesided import get, get_async, put, put_async
from weft_bench.copies import COPY_, Copier, Copies, Samples, complete

ENGINE, ENGINE_ASYNC, KERNEL = "copy engine", "copy engine (async)", "kernel"


class StreamCopies(Copies):
    """Copies in the order of this rank's current stream."""

    def contenders(self, size: int) -> list[Copier]:
        sms = self.settings.sms if self.world.backend.runs_kernels else []
        made = list[Copier]()
        for make, call, begin in ((self.put, put, put_async), (self.get, get, get_async)):
            made.append(make(ENGINE, partial(call, algorithm="copy-engine"), size))
            made.append(make(ENGINE_ASYNC, partial(begin, algorithm="copy-engine"), size))
            made += [
                make(KERNEL, partial(call, algorithm="kernel", comm_sms=number), size, number)
                for number in sms
            ]
        return [*made, self.local(COPY_, Tensor.copy_, size)]

    def round(self, contender: Copier, copies: int) -> Samples:
        """As of a CPU; a copy is complete once the stream has executed it."""
        call = contender.call
        window = max(2, copies)
        cycles = _native.cycles
        singles, transfers, callers = list[float](), list[float](), list[float]()

        def single() -> None:
            complete(call())

        def back_to_back() -> None:
            last = None
            ticks = cycles()
            for _ in range(window):
                last = call()
            callers.append((cycles() - ticks) / window)
            complete(last)  # asynchronous ones end in order

        self._seconds(single)
        for _ in range(copies):
            ticks = cycles()
            singles.append(self._seconds(single))
            transfers.append(cycles() - ticks)
        return Samples(singles, transfers, [self._seconds(back_to_back) / window], callers)

    def _seconds(self, work: Callable[[], object]) -> float:
        """The seconds until the current stream has executed the work."""
        if self.world.device.type != "cuda":
            start = perf_counter()
            work()
            return perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return 1e-3 * float(begin.elapsed_time(end))
