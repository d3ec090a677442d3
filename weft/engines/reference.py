"""The slow, simple interpreter of plans that tests compare the other engines with: all ranks in one
process.

Lanes take steps of one instruction each, round-robin or in a random order: the results of a plan
must not depend on it. The messages of a channel arrive in their order, with any delay. Memory has
the contents that real memory can have: the workspaces of successive calls overlap and are never
cleared, outputs hold NaN when a rank begins a call, and inputs hold NaN before and after the call.
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

import weft._native as _native
from weft.errors import PlanError
from weft.kernels.compression import rounded
from weft.plan import Compute, Copy, Instruction, Notify, Plan, Reduce, Region, Signal, Wait, reads
from weft.plan.messages import at_the_end, ending, is_channel

EAGER_SETS = _native.Executor.eager_sets
"""Sets of eager buffers, between which executions alternate."""

Buffers = dict[str, Tensor]
Move = Copy | Compute | Reduce
Step = tuple[int, str]
"""A rank and the lane that takes its next instruction, or ``""`` if the rank begins its next call.
"""

Awaited = tuple[Signal, int]
"""A signal and the value that it must have reached."""

NAN = 0xFF
"""Bytes of this value are NaN in every floating-point format, and -1 in integers."""


class Call(NamedTuple):
    """One execution of a plan: each rank's inputs, and its weights by name.

    `dtypes` has the buffers whose dtypes differ from the rows that are first written to them,
    `biases` rows to add to each row of the products by the weight of that name.
    """

    plan: Plan
    inputs: Sequence[Mapping[str, Tensor]]
    weights: Sequence[Mapping[str, Tensor]] = ()
    dtypes: Mapping[str, torch.dtype] = {}
    biases: Sequence[Mapping[str, Tensor]] = ()


def run(
    *calls: Call, order: random.Random | None = None, last: Step | None = None
) -> list[list[Buffers]]:
    """The outputs of each call on each rank; every rank makes the calls one after the other, and
    does not wait for other ranks between them.

    With `order` some lanes run ahead of others as far as signals allow; without it lanes take steps
    round-robin. The lane `last` takes a step only when no other can. A kernel's result has the
    dtype of its reference function. A deadlock raises `PlanError`.
    """
    memory = _memory(calls)
    ranks = [_Rank(r, calls, memory) for r in range(calls[0].plan.ranks)]
    choose = _at_random(order) if order else _round_robin()
    while ready := [(rank.rank, lane) for rank in ranks for lane in rank.ready()]:
        _step(ranks, *choose([step for step in ready if step != last] or ready))
    if stuck := [where for rank in ranks for where in rank.stuck()]:
        raise PlanError(f"deadlock: {'; '.join(stuck)}")
    return [list(outputs) for outputs in zip(*(rank.outputs for rank in ranks), strict=True)]


def _round_robin() -> Callable[[Sequence[Step]], Step]:
    last = -1, ""

    def choose(ready: Sequence[Step]) -> Step:
        nonlocal last
        last = min(ready, key=lambda step: (step <= last, step))
        return last

    return choose


def _at_random(order: random.Random) -> Callable[[Sequence[Step]], Step]:
    """Steps by random priorities of lanes. Some runs keep the priorities for long, so that lanes
    run far ahead; others draw them anew for each step.
    """
    redraw = order.random()
    priorities: dict[Step, float] = {}

    def choose(ready: Sequence[Step]) -> Step:
        if order.random() < redraw:
            priorities.clear()
        return max(ready, key=lambda step: priorities.setdefault(step, order.random()))

    return choose


class _Rank:
    """A rank's counters, and the remaining instructions of its lanes in its current call."""

    def __init__(
        self, rank: int, calls: Sequence[Call], memory: Sequence[Sequence[Buffers]]
    ) -> None:
        self.rank, self.calls, self.memory, self.number = rank, calls, memory, -1
        self.lanes: dict[str, list[Instruction]] = {}
        # by the receiving end of a channel; of calls that may have ended on this rank
        self.arriving: dict[str, list[_Arrival]] = {}
        self.counters: Counter[Signal] = Counter()
        self.base: Counter[Signal] = Counter()
        self.outputs: list[Buffers] = []

    def ready(self) -> list[str]:
        """The lanes and receiving ends of channels that can take a step."""
        found = [
            name
            for name, arrivals in self.arriving.items()
            if arrivals and self.has(arrivals[0].awaited)
        ]
        if any(self.lanes.values()):
            return found + [
                name
                for name, lane in self.lanes.items()
                if lane and self.has(self.awaited(lane[0]))
            ]
        return [*found, ""] if self.number < len(self.calls) else found

    def awaited(self, instruction: Instruction) -> Awaited | None:
        """The signal that an instruction of the current call waits for, and the value that it must
        have reached, counted over all calls.
        """
        match instruction:
            case Wait(signal, count):
                return signal, self.base[signal] + count
        return None

    def has(self, awaited: Awaited | None) -> bool:
        return awaited is None or self.counters[awaited[0]] >= awaited[1]

    def stuck(self) -> list[str]:
        lanes = [
            f"rank {self.rank} {name} in call {self.number}: {lane[0]}"
            for name, lane in self.lanes.items()
            if lane
        ]
        return lanes + [
            f"rank {self.rank} {name}: {arrivals[0].awaited}"
            for name, arrivals in self.arriving.items()
            if arrivals
        ]

    def move_on(self) -> None:
        """End the current call, if any, and begin the next, if any."""
        if self.number >= 0:
            self.outputs.append(
                {name: tensor.clone() for name, tensor in self.buffers("output").items()}
            )
            _poison(*self.buffers("input").values())
            self.base.update(self.calls[self.number].plan.promised(self.rank))
        self.number += 1
        if self.number < len(self.calls):
            call = self.calls[self.number]
            _poison(*self.buffers("output").values())
            for name, tensor in self.buffers("input").items():
                tensor.copy_(call.inputs[self.rank][name])
            self.lanes = {name: list(lane) for name, lane in call.plan.lanes[self.rank].items()}

    def buffers(self, role: str) -> Buffers:
        """This rank's buffers that have this role in its current call."""
        kinds = self.calls[self.number].plan.buffers
        return {
            name: tensor
            for name, tensor in self.memory[self.number][self.rank].items()
            if kinds[name].role == role
        }

    def rows(self, region: Region) -> Tensor:
        """The rows of a region of the current call, on this rank or a peer."""
        return self.memory[self.number][region.rank][region.buffer][region.start : region.stop]


class _Arrival(NamedTuple):
    """An effect at the receiving end of a channel, after the effects before it and the awaited
    signal.
    """

    awaited: Awaited | None
    effect: Callable[[], object]


def _step(ranks: Sequence[_Rank], rank: int, lane: str) -> None:
    here = ranks[rank]
    if not lane:
        here.move_on()
    elif lane in here.arriving:
        here.arriving[lane].pop(0).effect()
    else:
        instruction = here.lanes[lane].pop(0)
        effect, awaited = _effect(ranks, rank, instruction), here.awaited(instruction)
        if is_channel(lane) and (isinstance(instruction, Copy) or at_the_end(rank, instruction)):
            here.arriving.setdefault(ending(lane), []).append(_Arrival(awaited, effect))
        else:
            effect()


def _effect(ranks: Sequence[_Rank], rank: int, instruction: Instruction) -> Callable[[], object]:
    """The effect of an instruction, with the rows that it reads as they are now."""
    here = ranks[rank]
    match instruction:
        case Notify(peer, signal):
            return partial(ranks[peer].counters.update, [signal])
        case Copy() | Compute() | Reduce() as move:
            sources, target = [here.rows(source) for source in reads(move)], here.rows(move.dst)
            if isinstance(move, Copy) and sources[0].dtype != target.dtype:
                raise PlanError(
                    f"{move}: a copy does not convert {sources[0].dtype} into {target.dtype}"
                )
            result = _result(move, sources, here.calls[here.number], rank)
            return partial(target.copy_, result.clone() if isinstance(move, Copy) else result)
    return lambda: None


def _result(move: Move, sources: Sequence[Tensor], call: Call, rank: int) -> Tensor:
    """The rows that `move` writes, before they are rounded to the dtype of the destination."""
    match move:
        case Copy(compress=compress):
            return rounded(sources[0]) if compress else sources[0]
        case Compute(kernel, _, _, name):
            made = kernel.compute(sources, call.weights[rank][name] if name else None)
            bias = call.biases[rank].get(name) if name and call.biases else None
            return made if bias is None else made + bias
        case Reduce(_, _, op):
            dtype = sources[0].dtype
            wide = (
                torch.promote_types(dtype, torch.float32)
                if dtype.is_floating_point
                else torch.int64
            )
            combine = {"max": torch.maximum, "min": torch.minimum}.get(op, torch.add)
            total = functools.reduce(combine, (source.to(wide) for source in sources))
            return total / call.plan.ranks if op == "avg" else total


def _memory(calls: Sequence[Call]) -> list[list[Buffers]]:
    """The buffers of each call on each rank.

    In every call a rank's workspaces begin at the start of one pool, and its eager buffers at the
    start of one of `EAGER_SETS` other pools. Two ranks swap these each time all have been used.
    """
    ranks = range(calls[0].plan.ranks)
    likes = [[_like(call, r) for r in ranks] for call in calls]
    largest = max(
        sum(_bytes(like[name], max(buffer.rows)) for name, buffer in call.plan.buffers.items())
        for call, of_ranks in zip(calls, likes, strict=True)
        for like in of_ranks
    )
    pools = [
        [
            torch.full((largest,), NAN, dtype=torch.uint8, device="cpu")
            for _ in range(1 + EAGER_SETS)
        ]
        for _ in ranks
    ]
    swaps = (False, True) if len(ranks) == 2 else (False,)
    sets = cycle([(number, swapped) for swapped in swaps for number in range(EAGER_SETS)])
    found = []
    for call, like in zip(calls, likes, strict=True):
        eager = any(buffer.role == "eager" for buffer in call.plan.buffers.values())
        number, swapped = next(sets) if eager else (0, False)
        owners = ranks[::-1] if swapped else ranks
        spaces = [
            {"workspace": pools[r][0], "eager": pools[owner][1 + number]}
            for r, owner in zip(ranks, owners, strict=True)
        ]
        found.append([_lay_out(call.plan, like[r], r, spaces[r]) for r in ranks])
    return found


def _lay_out(plan: Plan, like: Buffers, rank: int, pools: dict[str, Tensor]) -> Buffers:
    """The buffers of one rank in one call: contiguous workspaces and eager buffers in their pools,
    inputs and outputs in new memory.
    """
    buffers = {}
    for name, buffer in plan.buffers.items():
        shape = buffer.rows[rank], *like[name].shape[1:]
        size = _bytes(like[name], buffer.rows[rank])
        if buffer.role in pools:
            piece, pools[buffer.role] = pools[buffer.role].tensor_split([size])
        else:
            piece = torch.full((size,), NAN, dtype=torch.uint8, device="cpu")
        buffers[name] = piece.view(like[name].dtype)[: math.prod(shape)].view(shape)
    return buffers


def _bytes(like: Tensor, rows: int) -> int:
    """The size of a buffer, rounded up so that any dtype may follow it."""
    return -(-rows * like.shape[1:].numel() * like.itemsize // 8) * 8


def _like(call: Call, rank: int) -> Buffers:
    """For each buffer of a rank a tensor of no rows with its columns and dtype.

    The instructions determine them from the inputs and weights, which may have another number of
    columns on each rank: the rank's own ones, if there are any. Buffers that no instruction writes
    to look like the first input.
    """
    moves = [(r, i) for r, i in call.plan.instructions() if isinstance(i, Move)]
    moves.sort(key=lambda move: move[0] == rank)
    like = _rowless(call.inputs[rank])
    first = next(iter(like.values()), torch.empty(0, 1, device="cpu"))
    while new := [
        (r, i)
        for r, i in moves
        if i.dst.buffer not in like and all(source.buffer in like for source in reads(i))
    ]:
        for r, move in new:
            own, name = like | _rowless(call.inputs[r]), move.dst.buffer
            sources = [own[source.buffer] for source in reads(move)]
            found = _result(move, sources, call, r)
            like[name] = found.to(
                call.dtypes.get(
                    name, found.dtype if isinstance(move, Compute) else sources[0].dtype
                )
            )
    return {name: like.get(name, first) for name in call.plan.buffers}


def _rowless(tensors: Mapping[str, Tensor]) -> Buffers:
    return {name: tensor[:0] for name, tensor in tensors.items()}


def _poison(*tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(NAN)
