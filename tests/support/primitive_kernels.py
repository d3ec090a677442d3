"""Kernels that test the primitives of `kernels.symmetric`."""

import triton
import triton.language as tl

from weft.gpu.kernels.symmetric import get, notify, put, wait


@triton.jit
def put_and_get(
    box,
    counters,
    timeout_record,
    box_bases,
    counter_bases,
    rank,
    following,
    previous,
    limit,
    BLOCK: tl.constexpr,
):
    """Put row 0 to row 1 of the following rank; get row 0 of the previous one to row 2 after the
    arrival of its own row.
    """
    put(box + 100, box, 100, box_bases, rank, following, BLOCK)
    notify(counters, counter_bases, rank, following)
    wait(counters, 0, 1, timeout_record, limit)
    get(box + 200, box, 100, box_bases, rank, previous, BLOCK)


@triton.jit
def consume(
    source,
    result,
    counters,
    timeout_record,
    expected,
    limit,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Raise the last counter to show that the kernel runs, then copy each row after its counter has
    reached `expected`.
    """
    tl.atomic_add(counters + ROWS * 8, 1)
    columns = tl.arange(0, COLUMNS)
    for row in range(ROWS):
        wait(counters, row, expected, timeout_record, limit)
        tl.store(result + row * COLUMNS + columns, tl.load(source + row * COLUMNS + columns))
