"""One-sided copies of a world whose work is on streams: by the copy engine, asynchronously, and by
a kernel on several numbers of SMs.

Times are by the GPU's events, cycles by the clock that its kernels read: of a transfer from its
begin on the caller's stream until that stream has waited for its end, of the caller for as long as
its stream is held, by an asynchronous copy only to begin it. On a CPU, where lanes are threads, the
copy engine is torch's copy, and kernels are interpreted: for checks of the program, not for its
speed. Without kernels cycles are the processor's, of the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from weft.ops.onesided import get, get_async, put, put_async
from weft.world import World
from weft_tools.bench.copies import COPY_, Copier, Copies, Samples, complete
from weft_tools.bench.gpu.ticks import DeviceTicks
from weft_tools.bench.settings.copies import CopySettings

ENGINE, ENGINE_ASYNC, KERNEL = "copy engine", "copy engine (async)", "kernel"


class StreamCopies(Copies):
    """Copies in the order of this rank's current stream."""

    def __init__(self, settings: CopySettings, world: World) -> None:
        super().__init__(settings, world)
        if world.backend.runs_kernels:
            self.ticks = DeviceTicks(world.device)

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
        window = max(2, copies)
        last: object = None

        def single() -> None:
            complete(contender.call())

        def calls() -> None:
            nonlocal last
            for _ in range(window):
                last = contender.call()

        def back_to_back() -> None:
            calls()
            complete(last)  # asynchronous ones end in order

        self._seconds(single)
        singles = [self._seconds(single) for _ in range(copies)]
        transfers = [float(self.ticks.spent(single)) for _ in range(copies)]
        seconds = self._seconds(back_to_back) / window
        caller = self.ticks.spent(calls) / window
        complete(last)
        return Samples(singles, transfers, [seconds], [caller])

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
