"""One-sided windows of process groups: ``dist._new_window`` of torch 2.14, over symmetric memory
and signals.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from weakref import WeakSet

import torch
from torch import Tensor

from weft.checks import check_rank, name
from weft.errors import MismatchError, PeerTimeout, WeftError
from weft.ops.all_gather import all_gather
from weft.ops.barrier import barrier
from weft.ops.onesided import put
from weft.ops.signalling import notify, test, wait
from weft.process_group.operations import Operations
from weft.process_group.work_queue import Done, Work
from weft.world.signals import Signals

Move = Callable[[Tensor, Tensor], object]
"""Makes a contiguous tensor of bytes the storage of a tensor, with its values and all its views."""

_PLACE = struct.Struct("3q32s")
"""Of a rank's tensor in its storage: the first element, their number, the storage's bytes, the
dtype's name.
"""


class Window:
    """A tensor of each rank into which peers put values; `register` is collective.

    A put is at the peer when it returns, and a signal publishes all puts before it.
    """

    def __init__(self, operations: Operations, move: Move) -> None:
        self.operations, self.world, self.move = operations, operations.world, move
        self.kept: Tensor | None = None
        self.memory: Tensor | None = None  # bytes, as many on every rank
        self.parts: list[Tensor] = []  # of `memory`, where each rank's tensor is in its memory
        _windows.add(self)

    def register(self, tensor: Tensor, owning: bool) -> None:
        """Make a tensor the window, in symmetric memory: its storage moves there, with all views.

        Raises on all ranks `MismatchError` if their tensors differ in dtype, before anything moves;
        `WeftError` if the window has one, `ValueError` unless it is contiguous and on the CPU.
        """
        dtypes = list[str]()
        self.operations.queue.run(partial(self._register, tensor, dtypes))
        # raised here, since all ranks raise it: none rejects a call that others make
        if self.memory is None:
            lines = "".join(f"\n  rank {rank}: {each}" for rank, each in enumerate(dtypes))
            raise MismatchError(f"the tensors of a window must have one dtype on all ranks{lines}")
        self.shape = tensor.shape
        self.kept = tensor if owning else None

    def _register(self, tensor: Tensor, dtypes: list[str]) -> None:
        self._check(tensor)
        world, storage = self.world, tensor.untyped_storage()
        row = tensor.storage_offset(), tensor.numel(), storage.nbytes(), name(tensor.dtype).encode()
        own = torch.frombuffer(bytearray(_PLACE.pack(*row)), dtype=torch.uint8)
        gathered = all_gather(own, world=world).numpy().tobytes()
        places = [*_PLACE.iter_unpack(gathered)]
        dtypes += [dtype.rstrip(b"\0").decode() for *_, dtype in places]
        if len({*dtypes}) > 1:
            return
        memory = world.empty(max(1, *(total for _, _, total, _ in places)), dtype=torch.uint8)
        elements = memory[: memory.numel() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
        self.parts = [elements[start : start + size] for start, size, *_ in places]
        self.signals = world.signals(world.ranks, "the window's signals")
        self.seen = [0] * world.ranks
        self.move(tensor, memory[: storage.nbytes()])
        self.memory = memory
        barrier(world=world)  # no put comes before the values that were there

    def _check(self, tensor: Tensor) -> None:
        """Raise unless the tensor can be registered."""
        if self.memory is not None:
            raise WeftError("double registration: the window has a tensor; deregister it first")
        if not (tensor.is_cpu and tensor.is_contiguous()):
            raise ValueError(
                f"a window's tensor must be contiguous and on the CPU; got strides "
                f"{tensor.stride()} on {tensor.device}"
            )
        storage = tensor.untyped_storage().data_ptr()
        if any(each.memory is not None and each.memory.data_ptr() == storage for each in _windows):
            raise WeftError(
                "double registration: another window has the tensor; deregister it there"
            )

    def deregister(self) -> None:
        """End the use of the tensor, which stays as it is."""
        self._registered()
        self.operations.queue.run(partial(barrier, world=self.world))
        self.memory = self.kept = None
        self.parts = []

    def put(self, tensor: Tensor, peer: int, offset: int) -> None:
        """Write a tensor into a peer's window, `offset` elements of it from its start."""
        self._registered()
        check_rank(peer, "dst_rank", self.world.ranks)
        part, end = self.parts[peer], offset + tensor.numel()
        if offset < 0 or end > part.numel():
            raise WeftError(
                f"a put of elements {offset} to {end} exceeds the window size of rank {peer}, "
                f"{part.numel()} elements"
            )
        put(part[offset:end], tensor if tensor.dim() == 1 else tensor.reshape(-1), peer)

    def signal(self, peer: int) -> None:
        """Publish all puts before to a peer."""
        self._registered()
        notify(self.signals, self.world.rank, peer)

    def wait_signal(self, later: bool, peer: int, limit: float | None) -> Work:
        """Wait for the next signal of a peer; after `limit` seconds `PeerTimeout`, and it may be
        waited for again. A work of the wait, if it is for `later`.
        """
        self._registered()
        check_rank(peer, "peer_rank", self.world.ranks)
        number = self.seen[peer] + 1
        work = SignalWork(self.signals, peer, number, limit)
        if not later:
            work.wait()
        self.seen[peer] = number
        return work

    def map(self, peer: int) -> Tensor:
        """A peer's window, its memory itself. Raises `ValueError` of a rank on another host."""
        self._registered()
        check_rank(peer, "rank", self.world.ranks)
        values = self.world.peer(self.parts[peer], peer)
        return values.view(self.shape) if values.numel() == self.shape.numel() else values

    def _registered(self) -> None:
        if self.memory is None:
            raise WeftError("the window has no tensor: it is not registered, or no longer")


_windows: WeakSet[Window] = WeakSet()


class SignalWork(Work):
    """The wait for a signal."""

    def __init__(self, signals: Signals, peer: int, number: int, limit: float | None) -> None:
        super().__init__()
        self.signals, self.peer, self.number, self.limit = signals, peer, number, limit

    def is_completed(self) -> bool:
        if not self.done and test(self.signals, self.peer, ">=", self.number):
            self.end()
        return self.done

    def _advance(self, seconds: float | None) -> None:
        try:
            wait(self.signals, self.peer, ">=", self.number, seconds or self.limit)
        except PeerTimeout:
            raise
        except WeftError as error:
            self.end(error)
        else:
            self.end()

    def complete(self, done: Done) -> None:
        if not self.done:
            self._advance(None)
        super().complete(done)
