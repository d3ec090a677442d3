"""A custom schedule: written, proved, run on real ranks and drawn.

    python examples/custom_schedule.py [timeline.png]

The picture goes to a temporary folder unless its name is given. weft's benchmarks draw it:
pip install -e ./tools

It is all-gather + matmul by recursive doubling: in steps 1, 2, 4, … ranks whose numbers differ in
that bit exchange all rows that they have, so 4 ranks need 2 steps instead of 3. The rows of one
step are multiplied during the next.
"""

import sys
from pathlib import Path
from tempfile import mkdtemp

import torch

import weft
from weft.engines import engine
from weft.engines.recording import record
from weft.kernels.matmul import matmul
from weft.plan import Buffer, Copy, Notify, Plan, Region, Signal, Term, Wait
from weft.plan.trace import Trace
from weft.schedules.lanes import enter, leave

try:
    from weft_tools.bench.pictures.timeline import draw
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install -e ./tools") from None


def doubling(ranks: int, rows: int) -> Plan:
    """The schedule for `ranks` (a power of two) with `rows` rows each."""
    lanes, result = [], {}
    for r in range(ranks):
        own, place = Region(r, "a", 0, rows), Region(r, "inbox", r * rows, (r + 1) * rows)
        compute = [matmul(own, place._replace(buffer="out"))]  # own rows first: nothing to wait for
        # a plan enters the workspace before the first use and leaves it after the last
        comm = [*enter(r, ranks), Copy(own, place)]
        for step in (2**bit for bit in range(ranks.bit_length() - 1)):
            peer, size = r ^ step, step * rows
            starts = (rank // step * size for rank in (r, peer))  # of the rows of each of the two
            sent, received = (Region(r, "inbox", start, start + size) for start in starts)
            comm += [Copy(sent, sent._replace(rank=peer)), Notify(peer, Signal("arrived", r))]
            arrived = Wait(Signal("arrived", peer), 1)
            comm += [arrived] if 2 * step < ranks else []  # the next step sends these rows too
            compute += [arrived, matmul(received, received._replace(buffer="out"))]
        lanes.append({"compute": (*compute, *leave(r, ranks)), "comm": tuple(comm)})
        # the proof must find this in `out`: the rows of rank p's a, times rank r's weight
        for p in range(ranks):
            term = Term(p, "a", -p * rows, weights=(r, "out"))
            result[Region(r, "out", p * rows, (p + 1) * rows)] = (term,)
    whole = (ranks * rows,) * ranks
    buffers = {
        "a": Buffer("input", (rows,) * ranks),
        "inbox": Buffer("workspace", whole),
        "out": Buffer("output", whole),
    }
    return Plan("all_gather_matmul", "doubling", buffers, tuple(lanes), result)


def run(plan: Plan, rows: int) -> Trace | None:
    """Run on each rank: execute the plan twice, record the second time, and compare with a
    gather and torch.mm.
    """
    with weft.init() as world:
        world.emulate_link(gbps=4)  # slower than memory, so that the picture shows the transfers
        a, b = torch.randn(rows, 1024), torch.randn(1024, 1024)
        out = torch.empty(world.ranks * rows, 1024)
        engine(world).execute(plan, {"a": a, "out": out}, {"out": b})
        with record(world) as recording:
            engine(world).execute(plan, {"a": a, "out": out.fill_(torch.nan)}, {"out": b})
        torch.testing.assert_close(out, weft.all_gather(a) @ b, rtol=1e-4, atol=1e-3)
        return recording.gather("recursive doubling")


if __name__ == "__main__":
    plan = doubling(ranks=4, rows=256)
    picture = Path(*sys.argv[1:] or [mkdtemp(), "timeline.png"])
    weft.verify(plan)  # PlanError names every race, deadlock and wrong row: delete a Wait and see
    print(plan, f"The picture of its second run: {picture}", sep="\n")
    traces = [weft.launch(run, 4, plan, 256)[0]]
    draw(traces, picture, "all-gather + matmul, emulated link of 4 Gbit/s")
