"""Predicted times of one-sided copies, put and get between two ranks: synchronous, by the caller,
and asynchronous, in a separate lane or by a copy engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from weft.plan import Buffer, Copy, Plan, Region
from weft.schedules.workload import Rows
from weft_tools.predict.machine import Machine
from weft_tools.predict.simulator import seconds

CALLS = ("get", "put")
SYNCHRONOUS, ASYNCHRONOUS = "get", "get-async"
"""The variants of a profile whose links are those of copies of both kinds."""


class Copied(NamedTuple):
    """A predicted copy: the call, its seconds until the bytes are there, and the ticks of the
    device's counter in that time, without the launch, if the profile knows the counter.
    """

    call: str
    seconds: float
    cycles: float | None


def plan(call: str, ranks: int, asynchronous: bool) -> Plan:
    """One copy by rank 0, from or to the last of `ranks` ranks."""
    here = Region(0, "here", 0, 1)
    there = Region(ranks - 1, "there", 0, 1)
    copy = Copy(there, here) if call == "get" else Copy(here, there)
    lanes = {"compute": (), "comm": (copy,)} if asynchronous else {"compute": (copy,)}
    everywhere = (1,) * ranks
    buffers = {"here": Buffer("output", everywhere), "there": Buffer("input", everywhere)}
    return Plan(call, "copy", buffers, (lanes, *[{}] * (ranks - 1)))


def rows(size: int) -> dict[str, Rows]:
    """The rows of the buffers of a copy of `size` bytes, in numbers of two bytes, rounded up."""
    return dict.fromkeys(("here", "there"), Rows(-(-size // 2), "float16"))


def copies(size: int, ranks: int, synchronous: Machine, asynchronous: Machine) -> Iterator[Copied]:
    """The calls with `size` bytes between the first and the last rank, each as the machine makes
    copies of its kind.

    Where peers' memory is used like own memory the caller copies without the launch of an operator.
    """
    for call in CALLS:
        for name, machine in ((call, synchronous), (f"{call} async", asynchronous)):
            on = replace(machine, launch_us=0.0) if machine.in_place else machine
            took = seconds(plan(call, ranks, asynchronous=name != call), on, rows(size))
            yield Copied(name, took, on.cycles(took))
