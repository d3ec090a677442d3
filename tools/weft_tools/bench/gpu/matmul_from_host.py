"""A product whose rows are partly in another memory: they are fetched in pieces during the products
of other pieces.

The plan of one rank. With a GPU's own rows in ``a`` and the rest in the host's memory in ``away``,
it is an all-gather + matmul whose peers are behind the bus.
"""

from __future__ import annotations

from weft.kernels.matmul import matmul
from weft.plan import Buffer, Copy, Instruction, Notify, Plan, Region, Signal, Term, Wait
from weft.schedules.all_gather import Arrival
from weft.schedules.all_gather_matmul import join
from weft.schedules.blocks import block


def matmul_from_host(cut: int) -> Plan:
    """``out = (a, then away) @ B``; ``away`` is fetched in `cut` pieces, which are joined for
    products.
    """
    arrived = Signal("arrived", 0)
    compute: list[Instruction] = [matmul(block(0, "a", 0), block(0, "out", 0))]
    comm: list[Instruction] = []
    arrivals: list[Arrival] = []
    for piece in range(cut):
        here = block(0, "inbox", piece)
        comm += [Copy(block(0, "away", piece), here), Notify(0, arrived)]
        arrivals.append(Arrival(Wait(arrived, piece + 1), here, 1 + piece))
    for wait, rows, start in join(arrivals):
        compute += [wait, matmul(rows, Region(0, "out", start, start + rows.rows))]
    buffers = {
        "a": Buffer.of("input", [range(1)]),
        "away": Buffer.of("input", [range(1, 1 + cut)]),
        "inbox": Buffer.of("workspace", [range(1, 1 + cut)]),
        "out": Buffer.of("output", [range(1 + cut)]),
    }
    result = {
        block(0, "out", 0): (Term(0, "a", 0, weights=(0, "out")),),
        Region(0, "out", 1, 1 + cut): (Term(0, "away", -1, weights=(0, "out")),),
    }
    return Plan(
        "matmul_from_host",
        "pull",
        buffers,
        ({"compute": tuple(compute), "comm": tuple(comm)},),
        result,
        (1, cut),
    )
