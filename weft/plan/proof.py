"""The proof of a plan: checks of its form, and one greedy run of it after a worst-case
concurrent plan.

Plans share one workspace per rank, laid out anew by each plan. The contract between them is
therefore on whole workspaces: no access before every access of earlier plans is done. `verify`
proves it once per plan instead of once per pair of plans: it runs the plan after a worst-case one
that makes every access to every workspace, and checks that ranks which have left the plan are
notified of every use.

The proof is over blocks, and holds for any number of rows of each block. Blocks of a buffer are
adjacent, so two accesses share a row only if they share a block; an instruction works on the same
blocks in the same order everywhere, so its operands have the same rows, but for sources of which a
kernel needs every row, whose blocks are numbered separately; a slot (`ANY_BLOCK`) holds any block,
from its beginning on, and is read as the block that it holds; and lanes wait only for signals,
which empty blocks raise too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, pairwise

from weft.errors import PlanError
from weft.plan import (
    Buffer,
    Compute,
    Copy,
    Instruction,
    Notify,
    Plan,
    Reduce,
    Region,
    Signal,
    Term,
    Value,
    Wait,
    accesses,
    reads,
)
from weft.plan.access_order import Where
from weft.plan.happens_before import Run
from weft.plan.language import ANY_BLOCK, ROW, aligned, is_lane, whole_sources
from weft.plan.messages import lower_to_messages, origin
from weft.plan.values import REDUCTIONS, terms, wholes


def runs(plan: Plan) -> int:
    """The number of plans that the proof of a single plan runs: the worst case before it, and the
    plan until it uses all its memory again.
    """
    return 2 + max((buffer.copies for buffer in plan.buffers.values()), default=1)


def verify(
    *plans: Plan,
    hosts: Sequence[int] | None = None,
    ended: Callable[[], object] = lambda: None,
) -> None:
    """Prove that `plans` are correct on every interleaving if executed one after the other; a
    single plan is executed twice. `ended` is called when a rank ends a plan.

    Between hosts a plan is executed as messages, whose order is another: `hosts`, the host of each
    rank, proves it as it runs there. A plan that is correct on one host may not be on several.

    Raises `PlanError` naming every deadlock, every unordered pair of accesses to overlapping rows,
    every counter with two writers, every output row that is not written exactly once with the value
    that `Plan.result` promises, every access to a workspace that an earlier plan may still be
    using, and every rank that ends a synchronizing plan before another has begun it. `TypeError`
    without plans.

    Examples:
        >>> from weft.schedules.all_gather import all_gather
        >>> weft.verify(all_gather(ranks=3, pieces=2, algorithm="ring"))  # no error: it is correct
        >>> weft.verify(all_gather(ranks=3, pieces=2, algorithm="ring"), hosts=[0, 0, 1])
    """
    if not plans or not all(isinstance(plan, Plan) for plan in plans):
        given = ", ".join(type(plan).__name__ for plan in plans) or "none"
        raise TypeError(f"verify takes one or more objects of weft.Plan; got {given}")
    found = problems(*plans, hosts=hosts, ended=ended)
    if found:
        over = f" over {many} hosts" if (many := len({*(hosts or ())})) > 1 else ""
        name = " then ".join(
            f"{plan.operator}/{plan.algorithm} on {plan.ranks} ranks{over}" for plan in plans
        )
        more = [f"… and {len(found) - 20} more"] if len(found) > 20 else []
        raise PlanError("\n  ".join([f"{name}: {len(found)} problem(s)", *found[:20], *more]))


def problems(
    *plans: Plan,
    hosts: Sequence[int] | None = None,
    ended: Callable[[], object] = lambda: None,
    where: Where | None = None,
) -> list[str]:
    """The defects that `verify` reports; empty for correct plans. `where` names instructions, by
    default by their lanes.
    """
    return list(dict.fromkeys(_problems(plans, hosts, ended, where)))


def accepts(*plans: Plan, hosts: Sequence[int] | None = None) -> bool:
    """Whether `verify` finds no defect. It stops at the first one, so it is faster than `verify`
    for wrong plans.
    """
    return not any(_problems(plans, hosts))


def _problems(
    plans: Sequence[Plan],
    hosts: Sequence[int] | None = None,
    ended: Callable[[], object] = lambda: None,
    where: Where | None = None,
) -> Iterator[str]:
    """The defects of plans as they are found; those of a run only if their form has none."""
    if len({plan.ranks for plan in plans}) != 1:
        yield f"plans of different sizes: {[plan.ranks for plan in plans]} ranks"
        return
    if hosts is not None and len(hosts) != plans[0].ranks:
        yield f"hosts of {len(hosts)} ranks for plans of {plans[0].ranks}"
        return
    well_formed = True
    for problem in chain.from_iterable(map(_malformed, plans)):
        well_formed = False
        yield problem
    if not well_formed:
        return
    if hosts is not None and len({*hosts}) > 1:
        try:
            plans = [lower_to_messages(plan, hosts) for plan in plans]
        except PlanError as error:
            yield str(error)
            return
    adversary = _adversary(plans[0].ranks)
    inside = plans if len(plans) > 1 else [*plans] * (runs(plans[0]) - 1)
    yield from Run([adversary, *inside], ended, where).problems()


def _malformed(plan: Plan) -> Iterator[str]:
    """The defects of a plan's form, which `Run` relies on."""
    ranks = range(plan.ranks)
    if not plan.synchronizes and any(each.role == "eager" for each in plan.buffers.values()):
        yield "a plan with eager buffers must synchronize"
    for name, buffer in plan.buffers.items():
        if len(buffer.rows) != plan.ranks:
            yield f"buffer {name} has row counts for {len(buffer.rows)} ranks"
            return
        for r in ranks:
            if wrong := _wrong_blocks(plan, buffer, buffer.numbers(r), buffer.rows[r]):
                yield f"rank {r}: buffer {name} {wrong}"
    yield from _wrong_signals(plan)
    notified = plan.notified
    for r in ranks:
        for name, lane in plan.lanes[r].items():
            if not is_lane(origin(name)):
                yield f"rank {r}: there is no lane {name!r}: lanes are compute, comm, comm1, …"
            for instruction in lane:
                match instruction:
                    case Wait(signal, count):
                        promised = notified[r].get(signal, 0)
                        if not 0 <= count <= promised:
                            yield (
                                f"deadlock: rank {r} {name} waits for {count} of {signal}, "
                                f"{promised} are promised"
                            )
                    case Notify(peer, _):
                        if peer not in ranks:
                            yield f"rank {r} {name}: {instruction}: {_no_rank(plan, peer)}"
                    case Copy() | Compute() | Reduce():
                        if wrong := _wrong(plan, instruction):
                            yield f"rank {r} {name}: {instruction}: {wrong}"
    yield from _torn(plan)
    outputs = {
        (r, name): buffer.rows[r]
        for name, buffer in plan.buffers.items()
        if buffer.role == "output"
        for r in ranks
    }
    inout = {name for name, buffer in plan.buffers.items() if buffer.role == "inout"}
    results: dict[tuple[int, str], list[Region]] = {output: [] for output in outputs}
    for region in sorted(plan.result):
        if region.buffer in inout:
            continue
        if region[:2] not in results:
            yield f"the result has {region}, which is no output"
        elif region.rows:
            results[region[:2]].append(region)
    for region, value in plan.result.items():
        for term in terms(value) if region[:2] in results or region.buffer in inout else ():
            source = Region(
                term.rank, term.buffer, region.start + term.shift, region.stop + term.shift
            )
            if [*plan.numbers(source)] != [*plan.numbers(region)]:
                yield f"the result promises {region} of other blocks: {source}"
        for numbers, part in wholes(value):
            for term in terms(part):
                source = Region(term.rank, term.buffer, term.shift, term.shift + len(numbers))
                if [*plan.numbers(source)] != [*numbers]:
                    yield f"the result promises all rows of {source} as those of other blocks"
    for (r, name), regions in results.items():
        if [0, *(region.stop for region in regions)] != [
            *(region.start for region in regions),
            outputs[r, name],
        ]:
            yield (
                f"the result does not have each of the {outputs[r, name]} rows of output "
                f"{name} of rank {r} once"
            )


def _wrong_blocks(plan: Plan, buffer: Buffer, numbers: Sequence[int], rows: int) -> str:
    """The defect of a buffer's blocks on a rank, or ""."""
    blocks = sum(plan.pieces)
    if len(numbers) != rows:
        return f"has {rows} rows or blocks, but the numbers of {len(numbers)}"
    if unknown := {*numbers} - {ANY_BLOCK, ROW, *range(blocks)}:
        return f"has blocks {sorted(unknown)}; the plan's are 0 to {blocks - 1}"
    if ANY_BLOCK in numbers and buffer.given:
        return "has slots for any block, as workspaces may, but it is the caller's"
    if ANY_BLOCK in numbers and len({*numbers}) > 1:
        return "has slots for any block beside other blocks"
    return ""


def _wrong_signals(plan: Plan) -> Iterator[str]:
    """Defects of signals, each of which must be a separate counter: engines number counters by the
    name, and by the peer if there is one, else by the source.
    """
    peers: dict[str, bool] = {}
    for r, instruction in plan.instructions():
        if not isinstance(instruction, Notify | Wait):
            continue
        signal = instruction.signal
        notified = instruction.rank if isinstance(instruction, Notify) else r
        for rank in (signal.source, signal.source if signal.peer is None else signal.peer):
            if rank not in range(plan.ranks):
                yield f"rank {r}: {instruction}: {_no_rank(plan, rank)}"
        if signal.peer is not None and signal.source != notified:
            yield f"rank {r}: {instruction}: only a rank's own signals may have a peer"
        has_peer = signal.peer is not None
        if peers.setdefault(signal.name, has_peer) != has_peer:
            yield f"rank {r}: {instruction}: of one name all signals have a peer, or none has"


def _wrong(plan: Plan, instruction: Copy | Compute | Reduce) -> str:
    """The defect of an instruction that moves rows, or "": its regions must exist, have the same
    blocks, but for sources of which a kernel needs every row, and not overlap.
    """
    regions, dst, sources = accesses(instruction), instruction.dst, reads(instruction)
    alike, apart = aligned(instruction), whole_sources(instruction)
    if len(regions) == 1:
        return "there is nothing to add"
    if len(sources) <= max(apart, default=0):
        return "a source of the kernel is missing"
    if isinstance(instruction, Reduce) and instruction.op not in REDUCTIONS:
        return "there is no such reduction"
    for region in regions:
        if not plan.inside(region):
            return f"{region}: {_outside(plan, region)}"
    if len({region.rows for region in alike}) > 1:
        return "the numbers of rows differ"
    exact = [numbers for region in alike if ANY_BLOCK not in (numbers := [*plan.numbers(region)])]
    if any(numbers != exact[0] for numbers in exact):
        return "the blocks differ"
    if not exact or any(ANY_BLOCK in plan.numbers(sources[at]) for at in apart):
        return "the number of rows is not defined"
    if plan.buffers[dst.buffer].role == "input":
        return "an input is only read"
    if any(
        src.overlaps(dst) and not (src == dst and _in_place(instruction, at))
        for at, src in enumerate(sources)
    ):
        return "source and destination overlap"
    return ""


def _in_place(instruction: Copy | Compute | Reduce, at: int) -> bool:
    """Whether the source at this position may be the destination itself."""
    match instruction:
        case Compute(kernel, srcs):
            return kernel.accumulates and at == len(srcs) - 1 and at not in kernel.whole
    return isinstance(instruction, Reduce)


def _outside(plan: Plan, region: Region) -> str:
    """The reason why a region does not exist in a plan."""
    if not 0 <= region.rank < plan.ranks:
        return _no_rank(plan, region.rank)
    if region.buffer not in plan.buffers:
        return f"the plan has no buffer {region.buffer!r}; it has {', '.join(plan.buffers)}"
    rows = plan.buffers[region.buffer].rows[region.rank]
    return f"that buffer has {rows} rows or blocks there"


def _no_rank(plan: Plan, rank: int) -> str:
    return f"the plan has no rank {rank}; its ranks are 0 to {plan.ranks - 1}"


def _torn(plan: Plan) -> Iterator[str]:
    """Defects of regions of slots (`ANY_BLOCK`) that overlap but begin at different blocks: rows
    written to one would be elsewhere in the other.
    """
    every = {region for _, i in plan.instructions() for region in accesses(i)}
    slots = [
        region for region in every if plan.inside(region) and ANY_BLOCK in plan.numbers(region)
    ]
    for one, other in pairwise(sorted(slots)):
        if one[:2] == other[:2] and one.start < other.start < one.stop:
            yield f"{one} and {other} share a slot, but begin at different blocks"


@cache
def _adversary(ranks: int) -> Plan:
    """A plan in which every rank reads and writes every workspace, as late as the contract
    permits.
    """
    rows = (ranks,) * ranks
    lanes: list[dict[str, tuple[Instruction, ...]]] = []
    result: dict[Region, Value] = {}
    for r in range(ranks):
        peers = [p for p in range(ranks) if p != r]
        own = Region(r, "in", r, r + 1)
        lane: list[Instruction] = [Wait(Signal("free", p), 0) for p in peers]
        lane += [Copy(own, Region(r, "pulled", r, r + 1)), Copy(own, Region(r, "pushed", r, r + 1))]
        for p in peers:
            lane += [Copy(own, Region(p, "pushed", r, r + 1)), Notify(p, Signal("arrived", r))]
        for p in peers:
            lane += [
                Wait(Signal("arrived", p), 1),
                Copy(Region(p, "pulled", p, p + 1), Region(r, "out", p, p + 1)),
            ]
        lane += [Copy(Region(r, "pushed", r, r + 1), Region(r, "out", r, r + 1))]
        lane += [Notify(p, Signal("free", r)) for p in peers]
        lanes.append({"compute": tuple(lane)})
        result |= {Region(r, "out", p, p + 1): (Term(p, "in", 0),) for p in range(ranks)}
    spaces = dict.fromkeys(("pulled", "pushed"), Buffer("workspace", rows))
    buffers = {"in": Buffer("input", rows), "out": Buffer("output", rows), **spaces}
    return Plan("adversary", "any", buffers, tuple(lanes), result)
