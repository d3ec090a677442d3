"""Lanes of a device: streams of a GPU, or threads of a CPU, each of which runs its steps in order.

On a GPU a step runs after all work that was on the caller's stream when the step was started, and
its `Completion` makes the caller's stream wait for it, not the host. On a CPU the caller's thread
waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch

from weft.engines.program import Tensors, Weights
from weft.gpu import driver

Step = Callable[[], object]


class LaneOperands(NamedTuple):
    """The operands of one execution of a program: tensors by buffer, weights and biases by the
    name of the weight, and the timeout of each wait in seconds.
    """

    tensors: Tensors
    weights: Weights
    bias: Tensors
    timeout: float


class ThreadCompletion:
    """The end of a step that was started on a `ThreadLane`."""

    def __init__(self, future: Future[object]) -> None:
        self.future = future

    def done(self) -> bool:
        return self.future.done()

    def join(self, seconds: float = math.inf) -> bool:
        """Wait for the step, and raise its error; False if `seconds` pass first."""
        done, _ = wait([self.future], None if seconds == math.inf else seconds)
        for future in done:
            future.result()
        return bool(done)

    def finish(self) -> None:
        """Make the host wait for the step."""
        self.join()


class ThreadLane:
    """A lane of a CPU: one thread."""

    def __init__(self, name: str) -> None:
        threads = torch.get_num_threads()
        self.thread = ThreadPoolExecutor(1, name, torch.set_num_threads, (threads,))

    def close(self) -> None:
        """Start nothing any more; what is under way keeps the memory that it uses."""
        self.thread.shutdown(wait=False)

    def start(self, step: Step) -> ThreadCompletion:
        """Run a step after the earlier steps of this lane, concurrently with the caller and other
        lanes.
        """
        without_gradients = torch.no_grad()(step)  # gradient mode is per thread
        return ThreadCompletion(self.thread.submit(without_gradients))


class StreamCompletion:
    """The end of a step that was started on a `StreamLane`."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def join(self, seconds: float = math.inf) -> bool:
        """Make the current stream wait for the step."""
        torch.cuda.current_stream().wait_event(self.event)
        return True

    def finish(self) -> None:
        """Make the host wait for the step."""
        self.event.synchronize()


class StreamLane:
    """A lane of a GPU: one stream, `urgent` or not."""

    def __init__(self, device: torch.device, urgent: bool) -> None:
        self.urgent = urgent
        self.stream = driver.take_stream(device, urgent)

    def close(self) -> None:
        """Make the host wait for all steps, and let another world have the stream."""
        self.stream.synchronize()
        driver.give_back(self.stream, self.urgent)

    def start(self, step: Step) -> StreamCompletion:
        """Run a step after the earlier steps of this lane and the work on the caller's current
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
    """A lane of this device; the kernels of all but the compute lane are small and urgent."""
    if device.type == "cuda":
        return StreamLane(device, urgent=not name.startswith("compute"))
    return ThreadLane(name)
