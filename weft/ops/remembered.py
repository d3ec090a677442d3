"""The variant of ``algorithm="auto"`` in worlds whose lanes are streams: the one that ``weft tune``
has measured to be the fastest on this hardware, or the rule's.

Calls are not measured themselves, since their caller does not wait for the device. Rank 0 reads
what is stored and sends it to all ranks, by their host and once for each class of calls.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import torch

import weft._native as _native
from weft.engines import engine
from weft.engines.device.options import hardware
from weft.ops.call import Call, Selection
from weft.predict import tuned
from weft.schedules.device_options import DEFAULT
from weft.schedules.workload import Variant, Workload, size_class
from weft.world import memory

_STORED = "weft tune measured it to be the fastest on this hardware"


class Class(NamedTuple):
    """The key of calls that share a selection: the part of the workload that is equal on all ranks,
    with the rows of its size class.
    """

    workload: Workload


def select(call: Call) -> Selection:
    """The variant of a call; collective for the first call of a class."""
    key = _class_of(call)
    if key is None:
        return call.rule(call.options.algorithm)
    call.check_algorithm("auto")
    selections = engine(call.world).selections
    if key not in selections:
        selections[key] = _agreed(call, key)
        call.log(_selection(call, selections[key]))
    return _selection(call, selections[key])


def expected(call: Call) -> Selection:
    """The selection of a call's class, or the one that this rank would make as rank 0; not
    collective.
    """
    key = _class_of(call)
    if key is None:
        return call.rule(call.options.algorithm)
    selections = engine(call.world).selections
    return _selection(call, selections[key] if key in selections else _stored(call))


def _class_of(call: Call) -> Class | None:
    """The class of a call; None if the rule selects its variant."""
    rows, world = max(call.workload.rows), call.world
    told = call.options.chunk_rows is not None or world.device_options != DEFAULT
    fixed = torch.are_deterministic_algorithms_enabled()
    if not call.tunable or world.ranks == 1 or not rows or told or fixed:
        return None
    return Class(call.shared._replace(rows=(size_class(rows),) * world.ranks))


def _stored(call: Call) -> Variant | None:
    """The variant of rank 0's measurements, if there is one and this world can honour it."""
    world = call.world
    found = tuned.find(call.workload, world.emulated_link, hardware(world))
    return found.variant if found and call.possible(found.variant.algorithm) else None


def _selection(call: Call, variant: Variant | None) -> Selection:
    return call.rule("auto") if variant is None else Selection(variant, _STORED)


def _agreed(call: Call, key: Class) -> Variant | None:
    """What rank 0 has stored for a class."""
    world = call.world
    own = _stored(call) if world.rank == 0 else None
    text = json.dumps(own.to_json() if own else None)
    name = f"{call.description}\n{key}"
    compiled = _native.Compiled(name, 0, [], world.ranks)
    with world.exclusive, world.fail_on_error:
        world.executor.begin(compiled, call.options.timeout or world.timeout)
        notes = memory.exchange(world, compiled, call.description, text)
        texts = {peer: note for peer, note, _ in notes} | {world.rank: text}
    found = json.loads(texts[0])
    return Variant.from_json(found) if found else None
