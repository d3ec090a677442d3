"""Witnesses: plans whose results show whether the plans before and after them keep the contract
between plans.

They break rules of the proof on purpose: where a right plan would wait they rely on that contract.
All ranks must have the same input ``a``, and successive calls others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.plan import Buffer, Copy, Instruction, Notify, Plan, Region, Role, Signal, Wait


def release_witness(ranks: int, rows: int, reader: int) -> Plan:
    """A witness of the release of `rows` rows of workspace on each rank: all ranks but the `reader`
    write to the workspace of every rank, and all ranks read it.

    If the `reader` is late in the plan before, its reads find what the others have written since,
    and its writes remain to be read. If the reader is late here, it finds what others have written
    in the plan after.
    """
    whole = range(ranks)
    others = [r for r in range(ranks) if r != reader]
    lanes: list[list[Instruction]] = []
    for r in whole:
        own = Region(r, "a", 0, rows)
        peers = [p for p in whole if p != r]
        spaces = [Region(p, "space", 0, rows) for p in whole]
        enter = [Wait(Signal("free", p), 0) for p in peers]
        write = [Copy(own, space) for space in spaces if r != reader]
        tell = (
            [Wait(Signal("written", p), 1) for p in others]
            if r == reader
            else [Notify(reader, Signal("written", r))]
        )
        read = [
            Copy(space, Region(r, "out", p * rows, (p + 1) * rows))
            for p, space in enumerate(spaces)
        ]
        lanes.append([*enter, *write, *tell, *read, *(Notify(p, Signal("free", r)) for p in peers)])
    return _witness(lanes, {"a": rows, "space": rows, "out": ranks * rows})


def synchronization_witness(ranks: int, turn: int) -> Plan:
    """A witness of synchronization by the plan between two calls, whose `turn` is 0 and 1: each
    rank reads what all ranks wrote in the call before, and writes its input for the next one.
    """
    lanes = [
        [
            *(
                Copy(Region(p, "space", 1 - turn, 2 - turn), Region(r, "out", p, p + 1))
                for p in range(ranks)
            ),
            Copy(Region(r, "a", 0, 1), Region(r, "space", turn, turn + 1)),
        ]
        for r in range(ranks)
    ]
    return _witness(lanes, {"a": 1, "space": 2, "out": ranks})


def _witness(lanes: Sequence[Sequence[Instruction]], rows: Mapping[str, int]) -> Plan:
    roles: dict[str, Role] = {"a": "input", "space": "workspace", "out": "output"}
    buffers = {name: Buffer(roles[name], (many,) * len(lanes)) for name, many in rows.items()}
    return Plan("witness", "", buffers, tuple({"compute": tuple(lane)} for lane in lanes))
