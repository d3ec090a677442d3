"""What the lanes of a plan become on a device: on a GPU streams, on a CPU threads that each do in
order what they are given.

What a lane is given goes behind what the caller's stream holds so far, and the `Completion` of that
puts the caller behind it. Nothing here waits on a GPU: what waits are streams.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch

from weft.engines.engine import Tensors, Weights

Step = Callable[[], object]


class Operands(NamedTuple):
    """What one execution of a program works on: tensors, weights and biases by buffer, and the
    seconds that any wait may take.
    """

    tensors: Tensors
    weights: Weights
    bias: Tensors
    timeout: float


class ThreadCompletion:
    """The end of what was started on a `ThreadLane`."""

    def __init__(self, future: Future[object]) -> None:
        self.future = future

    def done(self) -> bool:
        return self.future.done()

    def join(self, seconds: float = math.inf) -> bool:
        """Go on after the steps: wait for the thread. False if time runs out first."""
        done, _ = wait([self.future], None if seconds == math.inf else seconds)
        for future in done:
            future.result()
        return bool(done)


class ThreadLane:
    """A lane of a CPU: one thread."""

    def __init__(self, name: str) -> None:
        threads = torch.get_num_threads()
        self.thread = ThreadPoolExecutor(
            1, name, torch.set_num_threads, (threads,)
        )  # ends with the lane

    def start(self, step: Step) -> ThreadCompletion:
        """Do this behind what was started before, beside the caller and other lanes."""
        without_gradients = torch.no_grad()(step)  # which is a thread's own affair
        return ThreadCompletion(self.thread.submit(without_gradients))


class StreamCompletion:
    """The end of what was started on a `StreamLane`."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def join(self, seconds: float = math.inf) -> bool:
        """Have the current stream go on after the steps."""
        torch.cuda.current_stream().wait_event(self.event)
        return True


class StreamLane:
    """A lane of a GPU: one stream."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def start(self, step: Step) -> StreamCompletion:
        """Do this behind what was started before, and what the caller has put on its current
        stream.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), torch.no_grad():
            step()
            event = torch.cuda.Event()
            event.record()
        return StreamCompletion(event)


Lane = ThreadLane | StreamLane
Completion = ThreadCompletion | StreamCompletion


def lane(device: torch.device, name: str) -> Lane:
    """A lane of this device."""
    return StreamLane(device) if device.type == "cuda" else ThreadLane(name)
