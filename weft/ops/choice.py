"""How a fused operator carries out a call, and why: what `weft.explain` tells.

``auto`` has a usual way, by the operator's rules. In shared memory, with or without an emulated link, what was fastest when the
case was tuned comes before it. So does what is predicted (`weft.predict`) to be clearly faster, where ``weft calibrate`` measured
this machine and, for ranks on several hosts, the link between them; figures of another machine decide nothing. Rank 0 decides for
all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from weft import predict
from weft.engines import engine
from weft.ops import arguments
from weft.predict import machine, tuned
from weft.schedules.broadcast import broadcast, push
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import ORDERS, PIECES, Variant, Workload
from weft.world import World

HOST_PIECES = 8  # between hosts, where each transfer and each small product costs a core more than what is left in the end
_CLEARLY = 0.05  # by how much of its time a prediction has to beat the usual way
_MANY = 4  # ranks from which on they are taken to be equal, and ways in which they are not are not considered
_SIGNATURES = 256  # that a world decides on, each in some milliseconds; where sizes change all the time the usual way has to do
_calibrated = cache(machine.calibrated)
_ALGORITHMS = sorted({name for operator in OPERATORS.values() for name in operator.predicted})


class Choice(NamedTuple):
    """A way to do it, why this one, and all that were considered with their predicted milliseconds, the fastest first."""

    way: Variant
    why: str
    predicted: tuple[tuple[Variant, float], ...] = ()

    @property
    def algorithm(self) -> str:
        return self.way.algorithm

    @property
    def chunk_rows(self) -> int:
        return self.way.chunk_rows

    @property
    def candidates(self) -> str:
        """What was predicted, in lines."""
        lines = [f"\n  {ms:9.3f} ms  {way}, at most {way.chunk_rows} rows per transfer" for way, ms in self.predicted]
        return "".join(["\npredicted:", *lines]) if lines else ""

    def __str__(self) -> str:
        return f"{self.way}, at most {self.chunk_rows} rows per transfer: {self.why}"


class Signature(NamedTuple):
    """What all ranks know of a call with ``auto``; `columns` are those of the rows that ranks exchange."""

    operator: str
    rows: tuple[int, ...]
    columns: int
    dtype: torch.dtype
    chunk_rows: int | None

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        pieces = "" if self.chunk_rows is None else f", chunk_rows={self.chunk_rows}"
        of = "a" if self.operator == "all_gather_matmul" else "sum"
        return f"{self.operator}({of}={[*self.rows]} rows x {self.columns} {dtype}{pieces}, algorithm=auto)"


Rule = Callable[[str], Choice]
"""An operator's usual choice for ``auto`` or for one algorithm. Raises `ValueError` for an algorithm that is not possible."""


def check_possible(algorithm: str, known: tuple[str, ...], world: World) -> None:
    """Raise `ValueError` for an algorithm that is unknown, or that the world's engine cannot carry out."""
    arguments.check_algorithm(algorithm, known)
    refused = engine(world).refused
    if algorithm in refused:
        others = ", ".join(name for name in known if name not in refused)
        raise ValueError(f"{algorithm} is not possible in this world: {refused[algorithm]}; choose {others}")


def check(algorithm: str, known: tuple[str, ...], chunk_rows: int | None, in_place: tuple[str, ...], world: World) -> None:
    """Raise `ValueError` for what cannot be chosen; algorithms `in_place` move no rows, which an emulated link could slow."""
    check_possible(algorithm, known, world)
    arguments.check_chunk_rows(chunk_rows)
    if algorithm in in_place and world.emulated_link:
        others = ", ".join(name for name in known if name not in in_place)
        raise ValueError(f"{algorithm} moves no rows, so an emulated link cannot slow it: choose {others}")


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype whose products are predicted: float8 is taken as bfloat16."""
    name = str(dtype).removeprefix("torch.")
    return "bfloat16" if name.startswith("float8") else name


def best(world: World, signature: Signature, decide: Callable[[], Choice], usual: Choice, timeout: float | None) -> Choice:
    """What rank 0 decides for a `signature` that all ranks share; collective where the signature is new.

    Ranks may differ in what is local (N of a gather, K of a sum) and would then choose differently. Since they make the same calls
    in the same order, a signature is new on all of them in the same call. Where nothing can be predicted, or after very many
    signatures, it is the `usual` choice.
    """
    if not _predictable(world):
        return usual
    known, key = world.choices, (signature, world.emulated_link)
    found: Choice | None = known.get(key)
    if found is None:
        if len(known) >= _SIGNATURES:
            return usual
        found = known[key] = _of_rank_0(world, signature, decide, timeout)
    return found


def explained(world: World, signature: Signature, decide: Callable[[], Choice], usual: Choice) -> Choice:
    """What `best` returns, or would return if this rank decided; not collective."""
    if not _predictable(world):
        return usual
    own, decided = decide(), world.choices.get((signature, world.emulated_link))
    return own if decided is None or decided.way == own.way else decided


def preferred(
    case: Workload,
    rule: Rule,
    link: tuple[float, float] | None,
    chunk_rows: int | None = None,
    hosts: tuple[int, ...] | None = None,
) -> Choice:
    """The way that is known or predicted to be fastest for a case, perhaps over an emulated `link`, as this rank sees it.

    `hosts`: the host of each rank, where they are on several.
    """
    usual, profile = rule("auto"), _calibrated()
    possible = _ways(case, usual, rule, (link or hosts) is not None and chunk_rows is None)
    known = chunk_rows is None and hosts is None  # winners were measured in shared memory
    if known and (way := tuned.find(case, link)) and way.algorithm in {other.algorithm for other in possible}:
        return Choice(way, "weft tune measured it to be the fastest")
    on = machine.from_dict(profile) if profile else None
    if on is None or not on.multiplies(case.dtype) or (hosts is not None and on.network is None):
        return usual
    on = on.emulating(*link) if link else on
    if hosts is not None:
        on = on.over(hosts)
    elif case.ranks > _MANY:
        case = case._replace(rows=(max(case.rows),) * case.ranks)
    times = {way: 1e3 * predict.time(case, way, on) for way in possible}
    found = tuple(sorted(times.items(), key=lambda way: (way[1], way[0].algorithm != usual.algorithm)))
    (fastest, ms), before = found[0], times[usual.way]
    if fastest == usual.way or ms > before * (1 - _CLEARLY):
        return Choice(usual.way, f"{usual.why}; no other is predicted to be clearly faster on this machine", found)
    return Choice(fastest, f"predicted to be clearly faster on this machine than {usual.way}, {usual.chunk_rows} rows", found)


def pieces(world: World) -> int:
    """Transfers per shard."""
    return HOST_PIECES if world.multi_host else PIECES


def _predictable(world: World) -> bool:
    """Whether machine profiles say anything about the world's engine: they are of CPUs."""
    return world.ranks > 1 and not world.stream_ordered


def _ways(case: Workload, usual: Choice, rule: Rule, sizes: bool) -> list[Variant]:
    """The usual way, and that of each algorithm; with other `sizes` of pieces, which matter where they pass a link."""
    ways = [usual.way]
    operator = OPERATORS[case.operator]
    for name in operator.predicted:
        if case.ranks > _MANY and name in operator.unequal:
            continue
        try:
            way = rule(name).way
        except ValueError:  # not possible in this world
            continue
        ways.append(way)
        if sizes and name != "sequential":
            ways += [way._replace(chunk_rows=rows) for rows in (2 * way.chunk_rows, -(-way.chunk_rows // 2))]
    if case.ranks > 2:
        ways += [way._replace(order="interleaved") for way in ways if way.algorithm == "push"]
    return [*dict.fromkeys(ways)]


def _of_rank_0(world: World, signature: Signature, decide: Callable[[], Choice], timeout: float | None) -> Choice:
    """What rank 0 decides and tells to all, in a call described by `signature`, so that ranks that make different calls notice."""
    own = decide() if world.rank == 0 else None
    said = torch.zeros(3, 1, dtype=torch.int64)
    if own:
        said = torch.tensor([[_ALGORITHMS.index(own.algorithm)], [own.chunk_rows], [ORDERS.index(own.way.order)]])
    tensors = {"a": said, "out": said[:0]} if own else {"a": said[:0], "out": said}
    recorder, world.recorder = world.recorder, None  # traces show the operator, not what was said before
    try:
        hosts = world.topology
        plan = push(len(said), 0, hosts) if hosts else broadcast(len(said), world.ranks, 0)
        engine(world).compile(plan, tensors, {}, str(signature)).run(tensors, {}, timeout=timeout)
    finally:
        world.recorder = recorder
    name, chunk_rows, order = said.flatten().tolist()
    return own or Choice(Variant(_ALGORITHMS[name], chunk_rows, ORDERS[order]), "as rank 0 decided")
