"""Streams as the engine has them, and kernels that wait for a flag in the host's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from weft.gpu import driver
from weft_tools.assumptions.kernels import BEGUN, TIMED_OUT, wait_kernel


@contextmanager
def streams(number: int, urgent: bool = False) -> Iterator[list[torch.cuda.ExternalStream]]:
    """Streams of the current GPU that nothing else uses, `urgent` or not."""
    device = torch.device("cuda", torch.cuda.current_device())
    taken = [driver.take_stream(device, urgent) for _ in range(number)]
    try:
        yield taken
    finally:
        for stream in taken:
            driver.give_back(stream, urgent)


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition has become true within this time."""
    end = time.perf_counter() + seconds
    while not (reached := condition()) and time.perf_counter() < end:
        time.sleep(0.0005)
    return reached


class Flag:
    """A flag, and the states of the kernels that wait for it, which are int32 of pinned memory.

    No kernel waits longer than `seconds`.
    """

    def __init__(self, seconds: float, kernels: int = 1) -> None:
        self.nanoseconds = int(seconds * 1e9)
        self.flag = torch.ones(1, dtype=torch.int32, pin_memory=True, device="cpu")
        self.states = torch.zeros(kernels, dtype=torch.int32, pin_memory=True, device="cpu")
        self._state_of = [self.states[at:] for at in range(kernels)]
        self.wait(0)  # which loads the kernel
        torch.cuda.synchronize()

    def wait(self, kernel: int) -> None:
        """Put a kernel of this number, which waits, on the current stream."""
        wait_kernel[(1,)](self.flag, self._state_of[kernel], self.nanoseconds, num_warps=1)

    @contextmanager
    def lowered(self) -> Iterator[None]:
        """Kernels wait in this context; the device is idle before and after it."""
        torch.cuda.synchronize()
        self.states.zero_()
        self.flag.zero_()
        try:
            yield
        finally:
            self.flag.fill_(1)
            torch.cuda.synchronize()

    def waiting(self) -> int:
        """The number of kernels that wait at this moment."""
        return int((self.states == BEGUN).sum())

    def timed_out(self) -> bool:
        """Whether a kernel has ended because of its limit."""
        return bool((self.states == TIMED_OUT).any())
