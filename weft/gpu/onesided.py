"""One-sided calls of a rank whose work is on streams: copies and signals in the order of the
caller's current stream, asynchronous copies on their own lane.

Nothing here waits for the device: a failed peer, or a wait that timed out, is raised by the next
call. On a CPU the current stream is the caller's thread.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from weft.errors import PeerTimeout
from weft.gpu.lanes import Completion, Lane, lane
from weft.gpu.loading import LOADING
from weft.gpu.memory import drain
from weft.gpu.signals import DeviceSignals
from weft.world import World
from weft.world.signals import COUNTER_BYTES, LARGEST

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""A dtype of each size that torch copies bit by bit."""


_HOLDS: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


class Dimension(NamedTuple):
    """A dimension of a copy: its size, and its strides in the target and in the source, in
    elements.
    """

    size: int
    dst: int
    src: int


def dimensions(dst: Tensor, src: Tensor) -> list[Dimension]:
    """The dimensions of a copy, outermost first; those that are contiguous in both tensors are
    merged.
    """
    if dst.is_contiguous() and src.is_contiguous():
        return [Dimension(dst.numel(), 1, 1)]
    every = map(Dimension, dst.shape, dst.stride(), src.stride())
    found: list[Dimension] = []
    for inner in sorted((d for d in every if d.size > 1), key=lambda d: d[1:], reverse=True):
        if found and found[-1][1:] == (inner.size * inner.dst, inner.size * inner.src):
            inner = inner._replace(size=inner.size * found.pop().size)
        found.append(inner)
    return found


class _Used(NamedTuple):
    """Of signals that were used: the address of each rank's counters, and the number of the first
    of them in the timeout record.
    """

    bases: Tensor
    first: int


class OneSided:
    """The one-sided calls of one rank of a world, whose tensors are on the world's device.

    `any_timed_out` returns the error of a wait of any kind that timed out, of a plan too.
    """

    def __init__(self, world: World, any_timed_out: Callable[[], PeerTimeout | None]) -> None:
        self.world = world
        self.any_timed_out = any_timed_out
        self._lane: Lane | None = None
        self.last: Completion | None = None  # of the asynchronous copies, which end in order
        self.signals: dict[DeviceSignals, _Used] = {}  # in the order of their first use
        if world.backend.runs_kernels:
            self.timeout_record = torch.zeros(
                4, dtype=torch.int64, pin_memory=world.device.type == "cuda", device="cpu"
            )

    def copy(
        self, dst: Tensor, src: Tensor, algorithm: str, comm_sms: int | None
    ) -> Callable[[], object]:
        """A copy between tensors of this device by an algorithm, to be put on a stream.

        Raises `ValueError` if the algorithm cannot make it.
        """
        dst, src = dst.detach(), src.detach()
        dims = dimensions(dst, src)
        bits = _BITS[dst.itemsize]
        if algorithm == "kernel" and not self.world.backend.runs_kernels:
            raise ValueError(
                'algorithm="kernel" needs a GPU, or on a CPU a world with products="triton" under '
                "TRITON_INTERPRET=1"
            )
        if algorithm == "copy-engine" and [(d.dst, d.src) for d in dims] not in ([], [(1, 1)]):
            raise ValueError(
                "a copy engine copies contiguous tensors; got the strides "
                f'{dst.stride()} of dst and {src.stride()} of src: use algorithm="auto" or "kernel"'
            )
        if _overlap(dst, src, dims):
            return lambda: self.copy(dst, src.clone(), algorithm, comm_sms)()
        if algorithm == "kernel" and dst.numel():
            return self._kernel_copy(dst, src, dims, comm_sms)
        return partial(dst.view(bits).copy_, src.view(bits), non_blocking=True)

    def _kernel_copy(
        self, dst: Tensor, src: Tensor, dims: Sequence[Dimension], comm_sms: int | None
    ) -> Callable[[], object]:
        from weft.gpu.kernels.copy_rows import SMS, RowsInMemory, copy_rows

        outer = list(dims)
        inner = 1
        if outer and outer[-1][1:] == (1, 1):
            inner = outer.pop().size
        if len(outer) > 1:
            raise ValueError(
                'algorithm="kernel" copies rows: contiguous elements at one distance from each '
                f"other; got shape {tuple(dst.shape)} with strides {dst.stride()} of dst and "
                f'{src.stride()} of src: use algorithm="auto", or contiguous tensors'
            )
        number, to, at = outer[0] if outer else (1, inner, inner)
        rows = RowsInMemory(number, *(n * dst.itemsize for n in (inner, to, at)))
        return partial(copy_rows, dst, src, rows, SMS if comm_sms is None else comm_sms)

    def run(self, copy: Callable[[], object]) -> None:
        """Put a copy on the current stream."""
        with torch.no_grad():
            copy()

    def start(self, copy: Callable[[], object], local: Tensor) -> Completion:
        """Begin a copy after the earlier ones and the work on the current stream; `local` is this
        rank's tensor, kept until the copy is done.
        """
        if self._lane is None:
            self._lane = lane(self.world.device, f"transfers of rank {self.world.rank}")
        self.last = self._lane.start(copy)
        if local.is_cuda:
            local.record_stream(self._lane.stream)  # type: ignore[union-attr]
        return self.last

    def close(self) -> None:
        """Wait until all asynchronous copies are complete, and let another world have the lane."""
        if self.last is not None:
            self.last.finish()
        if self._lane is not None:
            self._lane.close()
            self._lane = None

    def notify(
        self,
        signals: DeviceSignals,
        selection: tuple[int, int, int],
        peer: int,
        op: str,
        value: int,
    ) -> bool:
        """Raise counters of a peer after all earlier work of the current stream; always True."""
        from weft.gpu.kernels.signals import raise_kernel

        tables = signals.counters, self._used(signals).bases, self.world.rank, peer
        raise_kernel[(1,)](*tables, *selection, _signed(value), int(op == "set"), num_warps=1)
        return True

    def wait(
        self,
        signals: DeviceSignals,
        selection: tuple[int, int, int],
        cmp: str,
        value: int,
        seconds: float,
    ) -> None:
        """Block the current stream until counters of this rank satisfy a comparison, for about
        `seconds` at most; `check` raises the error of a wait that timed out.
        """
        from weft.gpu.kernels.signals import COMPARISONS, compare_kernel
        from weft.gpu.kernels.symmetric import time_limit

        first = self._used(signals).first
        compare_kernel[(1,)](
            signals.counters,
            *selection,
            COMPARISONS[cmp],
            _signed(value),
            self.timeout_record,
            first,
            time_limit(seconds),
            num_warps=1,
        )

    def test(
        self, signals: DeviceSignals, selection: tuple[int, int, int], cmp: str, value: int
    ) -> bool:
        """Whether a wait would end at once; waits for the current stream."""
        start, count, step = selection
        return all(_HOLDS[cmp](each, value) for each in signals.values(start, count, step))

    def check(self) -> None:
        """Raise the errors that a stream cannot raise: a peer failed, or a wait timed out, after
        which the results of the stream are wrong; both close the world.
        """
        self.world.failure.check()
        if self.world.mesh.failure()[0]:
            raise self.world.failure.reported("to make its next call")
        if (timeout := self.any_timed_out()) is not None:
            raise self.world.failure.fail(timeout)

    def timed_out(self) -> PeerTimeout | None:
        """The error of the first one-sided wait that timed out, which its kernel has recorded."""
        if not self.world.backend.runs_kernels or not (number := int(self.timeout_record[0])):
            return None
        from weft.gpu.kernels.signals import COMPARISONS

        _, value, actual, comparison = self.timeout_record.tolist()
        signals, first = next(
            (signals, used.first)
            for signals, used in reversed(self.signals.items())
            if used.first < number
        )
        cmp = next(cmp for cmp, code in COMPARISONS.items() if code == comparison)
        return PeerTimeout(
            f"rank {self.world.rank} waited too long for {signals.name}[{number - 1 - first}] "
            f"{cmp} {value % (LARGEST + 1)}: it was {actual % (LARGEST + 1)}"
        )

    def _used(self, signals: DeviceSignals) -> _Used:
        if (used := self.signals.get(signals)) is None:
            from weft.gpu.kernels import symmetric

            first = sum(map(len, self.signals))
            used = _Used(symmetric.bases(self.world, signals.counters), first)
            self.signals[signals] = used
        return used

    def load(self) -> None:
        """Load all kernels of one-sided calls."""
        from weft.gpu.kernels import copy_rows, signals

        zeros = torch.zeros(
            1, COUNTER_BYTES // torch.int64.itemsize, dtype=torch.int64, device=self.world.device
        )
        with LOADING:
            copy_rows.load(self.world.device)
            for bits in _BITS.values():  # torch's copy of rows with gaps
                gaps = torch.zeros(2, 2, dtype=bits, device=self.world.device)[:, :1]
                gaps.copy_(gaps.clone())
            # of no counters
            signals.raise_kernel[(1,)](zeros, zeros, 0, 0, 0, 0, 1, 0, 0, num_warps=1)
            signals.compare_kernel[(1,)](
                zeros, 0, 0, 1, 1, 0, self.timeout_record, 0, 1, num_warps=1
            )
            drain(self.world.device)


def _signed(value: int) -> int:
    """The number from -2**63 on with the same 64 bits."""
    return value if value < 1 << 63 else value - (LARGEST + 1)


def _overlap(dst: Tensor, src: Tensor, dims: Sequence[Dimension]) -> bool:
    """Whether the tensors may have bytes in common, but are not one and the same."""
    to, at = dst.data_ptr(), src.data_ptr()
    if to == at and all(d.dst == d.src for d in dims):
        return False
    to_span, at_span = (
        (1 + sum((d.size - 1) * stride for d, stride in zip(dims, strides, strict=True)))
        * dst.itemsize
        for strides in ([d.dst for d in dims], [d.src for d in dims])
    )
    return to < at + at_span and at < to + to_span
