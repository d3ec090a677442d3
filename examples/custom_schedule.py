"""A schedule of one's own: written, proved, run on real ranks and drawn, by ``python
examples/custom_schedule.py [timeline.png]``.

It is all-gather + matmul by recursive doubling: in steps 1, 2, 4, … ranks that differ in that bit
exchange all the rows they hold, so 4 ranks need 2 steps instead of 3. The rows of one step are
multiplied during the next.
"""

import sys
from pathlib import Path

import torch

import weft
from weft.engines import engine
from weft.engines.recording import record
from weft.kernels.matmul import matmul
from weft.pictures.timeline import draw
from weft.plan import Buffer, Copy, Notify, Plan, Region, Signal, Term, Wait
from weft.plan.trace import Trace
from weft.schedules.lanes import enter, leave


def doubling(ranks: int, rows: int) -> Plan:
    """The schedule for `ranks` (a power of two) with `rows` rows each: what the two lanes of every
    rank do, in order.
    """
    lanes, result = [], {}
    for r in range(ranks):
        own, place = Region(r, "a", 0, rows), Region(r, "inbox", r * rows, (r + 1) * rows)
        compute = [matmul(own, place._replace(buffer="out"))]  # own rows first: nothing to wait for
        comm = [
            *enter(r, ranks),
            Copy(own, place),
        ]  # a workspace is entered before its first use and left after the last
        for step in (2**bit for bit in range(ranks.bit_length() - 1)):
            peer, size = r ^ step, step * rows
            mine, theirs = (
                rank // step * size for rank in (r, peer)
            )  # where what each of the two holds begins
            held, brought = (Region(r, "inbox", start, start + size) for start in (mine, theirs))
            comm += [Copy(held, held._replace(rank=peer)), Notify(peer, Signal("arrived", r))]
            comm += (
                [Wait(Signal("arrived", peer), 1)] if 2 * step < ranks else []
            )  # the next step hands these rows on
            compute += [
                Wait(Signal("arrived", peer), 1),
                matmul(brought, brought._replace(buffer="out")),
            ]
        lanes.append({"compute": (*compute, *leave(r, ranks)), "comm": tuple(comm)})
        for p in range(
            ranks
        ):  # what the proof shall find in `out`: the rows of rank p's a, times rank r's weight
            result[Region(r, "out", p * rows, (p + 1) * rows)] = (
                Term(p, "a", -p * rows, weights=(r, "out")),
            )
    whole = (ranks * rows,) * ranks
    buffers = {
        "a": Buffer("input", (rows,) * ranks),
        "inbox": Buffer("workspace", whole),
        "out": Buffer("output", whole),
    }
    return Plan("all_gather_matmul", "doubling", buffers, tuple(lanes), result)


def run(plan: Plan, rows: int) -> Trace | None:
    """Run on each rank: execute the plan, the second time on record, and compare with gloo's
    gather and torch.mm.
    """
    with weft.init() as world:
        world.emulate_link(
            gbps=4
        )  # a link slower than memory, so that the picture shows the transfers
        a, b, out = (
            torch.randn(rows, 1024),
            torch.randn(1024, 1024),
            torch.empty(world.ranks * rows, 1024),
        )
        engine(world).execute(plan, {"a": a, "out": out}, {"out": b})
        with record(world) as recording:
            engine(world).execute(plan, {"a": a, "out": out.fill_(torch.nan)}, {"out": b})
        gathered = torch.empty(world.ranks, rows, 1024)
        torch.distributed.all_gather([*gathered], a)
        torch.testing.assert_close(out, gathered.view(-1, 1024) @ b, rtol=1e-4, atol=1e-3)
        return recording.gather("recursive doubling")


if __name__ == "__main__":
    weft.verify(
        plan := doubling(ranks=4, rows=256)
    )  # PlanError names every race, deadlock and wrong row: delete a Wait and see
    print(
        plan,
        f"The picture of its second run: {(picture := Path(*sys.argv[1:] or ['timeline.png']))}",
        sep="\n",
    )
    draw(
        [weft.launch(run, 4, plan, 256)[0]],
        picture,
        "all-gather + matmul, emulated link of 4 Gbit/s",
    )
