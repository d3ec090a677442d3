"""Device-side primitives for kernels over symmetric memory: addresses on peers, put, get, notify,
wait.

They are a small language for Triton kernels, each for one pattern of use. All take **bases**: a
table on the device of the addresses at which each rank's part of one symmetric allocation begins
(created by `bases`). Kernels are compiled for GPUs; with ``TRITON_INTERPRET=1`` set before this
module is imported they run on CPU tensors, against the memory and the counters of real peers.
Integer arguments are `do_not_specialize` if a kernel must not be recompiled for some of their
values.

A **counter** is 64 bits wide in symmetric memory, raised by one rank only, and only grows. A wait
compares it with the value that it must have reached, not with an earlier one, so no counter is
reset between calls.

A wait polls by relaxed reads, since an acquiring one would empty the SM's cache each time, and
acquires once when it has seen its value. Its time limit is one of the GPU's clock.

A **timeout record** (created by `timeout_record`) holds the first wait of a rank that timed out. A
kernel that waited for ever would block the GPU; so it continues with wrong data, and the record is
reported as an error. All results after the timeout are invalid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.errors import PeerTimeout
from weft.gpu.kernels.clock import nanoseconds
from weft.world import World, memory

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run on the CPU under Triton's interpreter in this process; fixed when this module
is imported.
"""


COUNTER = 8
"""64-bit words per counter: a cache line, against false sharing. The first is its value, the second
the time of `time_by`.
"""

POLLS: tl.constexpr = tl.constexpr(32)
"""The polls of a counter from one look at the clock to the next."""


class CounterTables(NamedTuple):
    """The tensors that kernels need to notify and to wait.

    `counters`, symmetric int64 (n, COUNTER); their `bases` on all ranks; `base`, int64 (n,), the
    counters' values at the begin of this execution; and a timeout record.
    """

    counters: Tensor
    bases: Tensor
    base: Tensor
    timeout_record: Tensor


def bases(world: World, tensor: Tensor) -> Tensor:
    """The addresses at which each rank's part of the symmetric allocation of `tensor` begins: int64
    (ranks,) on its device.

    Raises `ValueError` unless `tensor` is symmetric in `world`.
    """
    segment = memory.find(tensor)
    if segment is None or segment.world != world.number:
        raise ValueError("not a symmetric tensor of this world; make it with world.empty(...)")
    return bases_of(world, segment)


def bases_of(world: World, segment: memory.Segment) -> Tensor:
    """The same of a symmetric allocation itself."""
    return torch.tensor(
        [segment.base(rank) for rank in range(world.ranks)],
        dtype=torch.int64,
        device=world.device,
    )


def time_limit(seconds: float) -> int:
    """The time limit of a wait of `seconds`, in nanoseconds as kernels take it."""
    return int(min(seconds * 1e9, 1 << 62))


def zeroed(world: World, count: int) -> Tensor:
    """`count` symmetric counters of value zero on every rank: int64 (count, COUNTER), with the
    values in column 0. Collective.
    """
    return world.allocate([count, COUNTER], torch.int64)  # new symmetric memory is zeroed


def timeout_record(device: torch.device) -> Tensor:
    """A record of the first wait that timed out: int64 (3,), zeros if none did; in pinned host
    memory, which GPUs can write.

    ``[0]`` is 1 + the index of the counter, ``[1]`` its expected value, ``[2]`` its actual value.
    """
    return torch.zeros(3, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")


RESERVED_SMS = 4
"""SMs per rank that its product kernel, whose programs fill the registers of an SM, leaves to other
kernels: copies, notifies and waits. No GPU has measured the number.
"""


def max_programs(ranks: int, device: torch.device, reserved: int = 0) -> int:
    """The number of programs that each of `ranks` ranks that share `device` can run concurrently,
    one per SM, with `reserved` SMs per rank left free.
    """
    if device.type != "cuda":
        return 3  # any number: the interpreter runs them one after the other
    sms: int = torch.cuda.get_device_properties(device).multi_processor_count
    if sms // ranks <= reserved:
        raise ValueError(
            f"{ranks} ranks that share a GPU of {sms} SMs have {sms // ranks} each, but "
            "kernels that "
            f"wait need more than {reserved}: use fewer ranks"
        )
    return sms // ranks - reserved


def warp_size(device: torch.device) -> int:
    """The threads of a warp: 32, or 64 on AMD's GPUs of the CDNA family. A CPU stands for the
    former.
    """
    if device.type != "cuda":
        return 32
    size: int = torch.cuda.get_device_properties(device).warp_size
    return size


def check(
    timeout_record: Tensor, what: str, name: Callable[[int], str] = "counter {}".format
) -> None:
    """Raise `PeerTimeout` if this record holds a wait; `name` names a counter by its index."""
    index, expected, actual = timeout_record.tolist()
    if index:
        raise PeerTimeout(f"{what} waited too long for {name(index - 1)}: {actual} of {expected}")


@triton.jit
def peer_pointer(pointer, bases, rank, peer):
    """The address in the part of `peer` at the offset that `pointer` has in this rank's part of an
    allocation.

    Allocations begin at multiples of 16 bytes. The distance is computed as a multiple of 16 bytes,
    from which the compiler infers the alignment, so that remote accesses are as wide as local ones.
    """
    steps = (tl.load(bases + peer) - tl.load(bases + rank)) >> 4
    return pointer + steps * (128 // pointer.dtype.element_ty.primitive_bitwidth)


@triton.jit
def copy(dst, src, count, BLOCK: tl.constexpr):
    """Copy `count` elements between addresses that this rank may access, by one program."""
    start = count * 0
    while start < count:
        offsets = start + tl.arange(0, BLOCK)
        tl.store(dst + offsets, tl.load(src + offsets, mask=offsets < count), mask=offsets < count)
        start += BLOCK


@triton.jit
def put(dst, src, count, bases, rank, peer, BLOCK: tl.constexpr):
    """Copy `count` elements from `src`, which this rank may read, to the address of `dst` on
    `peer`, by one program.

    Pattern: the producer sends. Call `notify` after it, which makes the data visible to a peer that
    waits.
    """
    copy(peer_pointer(dst, bases, rank, peer), src, count, BLOCK)


@triton.jit
def get(dst, src, count, bases, rank, peer, BLOCK: tl.constexpr):
    """Copy `count` elements from the address of `src` on `peer` to `dst`, which this rank may
    write, by one program.

    Pattern: the consumer fetches. Call `wait` before it, so that the data is there.
    """
    copy(dst, peer_pointer(src, bases, rank, peer), count, BLOCK)


def _needs_write_back(_semantic: Any = None) -> Any:
    """A constant of kernels: whether they are for a GPU whose releases are not what they should be:
    AMD's CDNA 3 and 4, for which Triton 3.6 does not wait for the cache to be written back.
    """
    options = None if _semantic is None else _semantic.builder.options
    return tl.constexpr(getattr(options, "arch", None) in ("gfx942", "gfx950"))


_needs_write_back.__triton_builtin__ = True  # type: ignore[attr-defined]  # kernels may name it


@triton.jit
def all_arrived():
    """Synchronize the threads of this program: after it a release of one publishes what all have
    written.
    """
    if _needs_write_back():  # each warp its own
        tl.inline_asm_elementwise(
            "buffer_wbl2 sc0 sc1\n s_waitcnt vmcnt(0)\n s_mov_b32 $0, 0",
            "=s",
            [],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()


@triton.jit
def notify(counter, bases, rank, peer):
    """Add 1 to `counter` on `peer`.

    Pattern: publish all earlier writes of this program. The barrier orders the writes of all its
    threads before the notify. To publish writes of other programs, each of them has to arrive
    first; see `last_to_arrive`.
    """
    all_arrived()
    tl.atomic_add(peer_pointer(counter, bases, rank, peer), 1, sem="release", scope="sys")


@triton.jit
def last_to_arrive(ticket, programs):
    """True in the last of `programs` programs that call this, which may then notify on behalf of
    all.

    Pattern: many programs put, one notifies, so that a counter counts calls, independently of the
    size of the grid. All earlier writes of the other programs are visible to the last. `ticket` is
    a local int32, zero between kernels.
    """
    all_arrived()
    last = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.atomic_xchg(ticket, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def look(counter):
    """The value of a counter in memory, the same one in all threads; it orders nothing.

    An addition of 0 is compiled to a load (by Triton 3.9 for AMD to the addition); AMD's compiler
    would move a volatile load out of the loop.
    """
    return tl.atomic_add(counter, 0, sem="relaxed", scope="sys")


@triton.jit
def acquire(counter):
    """The value of a counter in memory; after the next barrier of this program all writes before
    the notify that made it, and before earlier ones, are visible to every thread.

    Compilers remove it, and the order, if the value is not used.
    """
    return tl.atomic_add(counter, 0, sem="acquire", scope="sys")


@triton.jit
def time_by(counter):
    """A time in nanoseconds, the same one in all threads: that of the previous call with this
    counter, of any program.

    Warps read the clock one after the other. If one of them saw the end of a time limit before the
    others, it would leave a loop that has barriers without them; but what an atomic operation
    returns is the same for all.
    """
    return tl.atomic_xchg(counter + 1, nanoseconds(), sem="relaxed", scope="sys")


@triton.jit
def limit_unless_timed_out(timeout_record, limit):
    """The time limit of a wait that begins: -1 if one has timed out before."""
    return tl.where(look(timeout_record) == 0, limit, -1)


@triton.jit
def wait(counter, index, expected, timeout_record, limit):
    """Block this program until its rank's counter number `index` has reached `expected`, for
    `limit` nanoseconds at most.

    Pattern: all writes of the notifying rank before its notify are visible to every thread of this
    program. On a timeout it writes to `timeout_record` and returns; later waits then return at
    once.
    """
    address = counter + index * 8
    actual = acquire(address)
    if actual < expected:  # the record is in host memory, so a read of it is slow
        limit = limit_unless_timed_out(timeout_record, limit)
        time_by(address)  # what it returns may be of an earlier wait
        start = time_by(address)
        now = start
        while (actual < expected) & (now - start <= limit):
            polls = 0
            while (actual < expected) & (polls < POLLS):
                actual = look(address)
                polls += 1
            now = time_by(address)
        actual = acquire(address)
        if actual < expected:
            free = actual * 0  # 0 in the counters' dtype, in Triton and in Gluon
            if (
                tl.atomic_cas(timeout_record, free, free + index + 1, sem="relaxed", scope="sys")
                == 0
            ):
                tl.store(timeout_record + 1, expected)
                tl.store(timeout_record + 2, actual)
    tl.debug_barrier()
