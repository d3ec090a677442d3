"""Device-side primitives for kernels over symmetric memory: where a peer's memory lies, put, get,
notify, wait.

They are a small language for Triton kernels, each for one pattern of use. All take **bases**: a
table on the device of where each rank's part of one symmetric allocation begins (`bases` makes it).
Kernels are compiled for GPUs, and with ``TRITON_INTERPRET=1`` set before this module is imported
they run on CPU tensors, against the memory and the counters of real peers. Numbers that kernels are
given are `do_not_specialize` where a kernel must not be compiled anew for some of them.

A **counter** is 64 bits wide in symmetric memory, raised by one rank only, and only grows. A wait
compares it with what it must have reached, never with "has changed", so nothing is reset between
calls.

A **timeout record** (`timeout_record` makes it) takes note of the first wait of a rank that ran out
of time: a kernel that hangs would take the GPU with it, one that goes on with wrong data and says
so can be reported as an error. What was computed after that is void.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.errors import PeerTimeout
from weft.world import World, memory

MAX_POLLS = 1 << 26
"""How often a wait looks at its counter before it gives up unless told otherwise."""

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run on the CPU under Triton's interpreter in this process; it is decided when
they are imported.
"""

LOADING = threading.Lock()
"""Held while kernels are compiled and loaded, so that ranks of one process do it once."""

_PER_SECOND = 1 << 13 if INTERPRETED else 1 << 20
"""Looks in a second, if one takes a microsecond (or, interpreted, a hundred); it may take half of
that or twice as long.
"""

COUNTER = 8
"""Counters lie this many 64-bit words apart: a cache line each, so that those who raise neighbours
do not disturb each other.
"""


class CounterTables(NamedTuple):
    """What kernels need to notify and to wait as a plan does.

    `counters`, symmetric int64 (n, COUNTER); their `bases` on all ranks; `base`, int64 (n,), what
    they had reached when this execution began; and a timeout record.
    """

    counters: Tensor
    bases: Tensor
    base: Tensor
    timeout_record: Tensor


def bases(world: World, tensor: Tensor) -> Tensor:
    """Where each rank's part of the symmetric allocation of `tensor` begins: int64 (ranks,) on its
    device.

    Raises `ValueError` unless `tensor` is symmetric in `world`.
    """
    segment = memory.find(tensor)
    if segment is None or segment.world != world.number:
        raise ValueError("not a symmetric tensor of this world; make it with world.empty(...)")
    return torch.tensor(
        [segment.base(rank) for rank in range(world.ranks)], dtype=torch.int64, device=tensor.device
    )


def max_polls(seconds: float) -> int:
    """The number of looks that takes about so long on a GPU."""
    return min(int(seconds * _PER_SECOND), (1 << 31) - 1)


def zeroed(world: World, count: int) -> Tensor:
    """`count` counters on every rank, symmetric; int64 (count, COUNTER), of which column 0 counts.
    Collective.
    """
    return world.allocate(
        [count, COUNTER], torch.int64
    )  # new symmetric memory is zero, on peers too


def timeout_record(device: torch.device) -> Tensor:
    """Where waits report that they ran out of time: int64 (3,), of zeros while all is well; on the
    host, where GPUs see it too.

    ``[0]`` is 1 + the index of the counter, ``[1]`` what was expected of it, ``[2]`` what it was.
    """
    return torch.zeros(3, dtype=torch.int64, pin_memory=device.type == "cuda")


BESIDE = 4
"""SMs that each rank leaves to others by its product kernel, whose programs fill an SM's registers:
copies, notifies and waits.
"""


def max_programs(ranks: int, device: torch.device, beside: int = 0) -> int:
    """The programs that each of `ranks` ranks that share `device` can keep running, with `beside`
    SMs left; one takes one SM.
    """
    if device.type != "cuda":
        return 3  # one after the other, under the interpreter
    sms: int = torch.cuda.get_device_properties(device).multi_processor_count
    if sms // ranks <= beside:
        raise ValueError(
            f"{ranks} ranks that share a GPU of {sms} SMs have {sms // ranks} each; kernels that "
            f"wait need more than {beside}"
        )
    return sms // ranks - beside


def check(
    timeout_record: Tensor, what: str, name: Callable[[int], str] = "counter {}".format
) -> None:
    """Raise `PeerTimeout` if a wait of a kernel that has run is in this record; `name` says what a
    counter is called.
    """
    index, expected, actual = timeout_record.tolist()
    if index:
        raise PeerTimeout(f"{what} waited too long for {name(index - 1)}: {actual} of {expected}")


@triton.jit
def peer_pointer(pointer, bases, rank, peer):
    """Where `pointer`, into this rank's part of an allocation, lies in the part of `peer`: the same
    distance from its beginning.

    Allocations begin at multiples of 16 bytes. Counting the way in such steps tells the compiler,
    so that accesses there are as wide as those here.
    """
    steps = (tl.load(bases + peer) - tl.load(bases + rank)) >> 4
    return pointer + steps * (128 // pointer.dtype.element_ty.primitive_bitwidth)


@triton.jit
def copy(dst, src, count, BLOCK: tl.constexpr):
    """Copy `count` elements between addresses that this rank may access; one program does it all."""
    start = count * 0
    while start < count:
        offsets = start + tl.arange(0, BLOCK)
        tl.store(dst + offsets, tl.load(src + offsets, mask=offsets < count), mask=offsets < count)
        start += BLOCK


@triton.jit
def put(dst, src, count, bases, rank, peer, BLOCK: tl.constexpr):
    """Copy `count` elements from `src`, which this rank may read, to where `dst` lies on `peer`;
    one program does it all.

    Pattern: the producer sends. Follow it by `notify`, which makes what was put visible to a peer
    that waits.
    """
    copy(peer_pointer(dst, bases, rank, peer), src, count, BLOCK)


@triton.jit
def get(dst, src, count, bases, rank, peer, BLOCK: tl.constexpr):
    """Copy `count` elements from where `src` lies on `peer` to `dst`, which this rank may write;
    one program does it all.

    Pattern: the consumer fetches. Precede it by `wait`, so that what is fetched is there.
    """
    copy(dst, peer_pointer(src, bases, rank, peer), count, BLOCK)


@triton.jit
def notify(counter, bases, rank, peer):
    """Add 1 to where `counter` lies on `peer`.

    Pattern: "all that this program wrote before is there". The barrier gathers the writes of all
    its threads behind the one that notifies. For the writes of other programs each of them has to
    arrive first; see `last_to_arrive`.
    """
    tl.debug_barrier()
    tl.atomic_add(peer_pointer(counter, bases, rank, peer), 1, sem="release", scope="sys")


@triton.jit
def last_to_arrive(ticket, programs):
    """True in the last of `programs` programs that come here, which may then notify on behalf of
    all.

    Pattern: many programs put, one notifies, so that a counter counts calls whatever the size of
    the grid. All that the others wrote before is visible to the last. `ticket` is an int32 of this
    rank's own, zero between kernels.
    """
    tl.debug_barrier()
    last = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.atomic_xchg(ticket, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def wait(counter, index, expected, timeout_record, max_polls):
    """Hold this program until its rank's counter number `index` has reached `expected`, for at most
    `max_polls` looks.

    Pattern: "all that the notifier wrote before is here", for every thread of this program. Out of
    time it reports to `timeout_record` and goes on; later waits then do not wait at all. An
    addition of 0 is compiled to a load that acquires (by Triton 3.9 for AMD to the addition); AMD's
    compiler takes a volatile load for one that it may move out of the loop.
    """
    address = counter + index * 8
    actual = tl.atomic_add(address, 0, sem="acquire", scope="sys")
    if actual < expected:  # only now is the record looked at, which is on the other side of the bus
        left = tl.where(tl.load(timeout_record) == 0, max_polls, 0).to(tl.int32)
        while (actual < expected) & (left > 0):
            actual = tl.atomic_add(address, 0, sem="acquire", scope="sys")
            left -= 1
        if actual < expected:
            free = actual * 0  # as the counters' dtype, in every language that this is compiled as
            if (
                tl.atomic_cas(timeout_record, free, free + index + 1, sem="relaxed", scope="sys")
                == 0
            ):
                tl.store(timeout_record + 1, expected)
                tl.store(timeout_record + 2, actual)
    tl.debug_barrier()
