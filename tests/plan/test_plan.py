from __future__ import annotations

import pytest

from weft.kernels.matmul import matmul
from weft.plan import (
    Buffer,
    Compute,
    Copy,
    Notify,
    Plan,
    Reduce,
    Region,
    Signal,
    Wait,
    accesses,
    reads,
    show,
    writes,
)
from weft_tools.laboratory.accumulation import FOLD

HERE, THERE, OUT = Region(0, "a", 0, 2), Region(1, "inbox", 4, 6), Region(0, "out", 0, 2)
ARRIVED = Signal("arrived", 1)


@pytest.mark.parametrize(
    ("instruction", "text", "read", "written"),
    [
        (Copy(HERE, THERE), "copy   a@0[0:2] -> inbox@1[4:6]", (HERE,), (THERE,)),
        (matmul(HERE, OUT), "matmul a@0[0:2] -> out@0[0:2]", (HERE,), (OUT,)),
        (
            Reduce((HERE, THERE), OUT),
            "reduce sum a@0[0:2] + inbox@1[4:6] -> out@0[0:2]",
            (HERE, THERE),
            (OUT,),
        ),
        (
            Compute(FOLD, (HERE, THERE, OUT), OUT),
            "fold   a@0[0:2], all inbox@1[4:6], out@0[0:2] -> out@0[0:2]",
            (HERE, THERE, OUT),
            (OUT,),
        ),
        (Notify(1, Signal("arrived", 0)), "notify arrived<0 on 1", (), ()),
        (Wait(ARRIVED, 2), "wait   arrived<1 >= 2", (), ()),
    ],
)
def test_the_regions_that_an_instruction_reads_and_writes(instruction, text, read, written):
    assert str(instruction) == text
    assert reads(instruction) == read
    assert writes(instruction) == written
    assert accesses(instruction) == read + written


def swap() -> Plan:
    """Two ranks swap their rows, and rank 1 multiplies the rows it receives."""
    buffers = {
        "a": Buffer("input", (2, 3)),
        "inbox": Buffer("workspace", (3, 2)),
        "out": Buffer("output", (3, 2)),
    }
    lanes = (
        {
            "compute": (
                Wait(Signal("arrived", 1), 1),
                Copy(Region(0, "inbox", 0, 3), Region(0, "out", 0, 3)),
            ),
            "comm": (
                Copy(Region(0, "a", 0, 1), Region(1, "inbox", 0, 1)),
                Notify(1, Signal("arrived", 0)),
                Copy(Region(0, "a", 1, 2), Region(1, "inbox", 1, 2)),
                Notify(1, Signal("arrived", 0)),
            ),
        },
        {
            "compute": (
                Copy(Region(1, "a", 0, 3), Region(0, "inbox", 0, 3)),
                Notify(0, Signal("arrived", 1)),
                Wait(Signal("arrived", 0), 2),
                matmul(Region(1, "inbox", 0, 2), Region(1, "out", 0, 2)),
            )
        },
    )
    return Plan("swap", "push", buffers, lanes)


def test_the_size_shared_buffers_and_counters_of_a_plan():
    plan = swap()
    assert plan.ranks == 2
    assert plan.shared_buffers() == {"inbox"}
    assert plan.promised(0) == {Signal("arrived", 1): 1}
    assert plan.promised(1) == {Signal("arrived", 0): 2}


def test_a_plan_is_shown_with_its_lanes_side_by_side():
    assert str(swap()) == show(swap())
    assert show(swap()).splitlines() == [
        "swap / push on 2 ranks",
        "  input     a         rows per rank: 2, 3",
        "  workspace inbox     rows per rank: 3, 2",
        "  output    out       rows per rank: 3, 2",
        "",
        "rank 0",
        "  compute                           | comm",
        "  ----------------------------------+--------------------------------",
        "  wait   arrived<1 >= 1             | copy   a@0[0:1] -> inbox@1[0:1]",
        "  copy   inbox@0[0:3] -> out@0[0:3] | notify arrived<0 on 1",
        "                                    | copy   a@0[1:2] -> inbox@1[1:2]",
        "                                    | notify arrived<0 on 1",
        "",
        "rank 1",
        "  compute",
        "  ---------------------------------",
        "  copy   a@1[0:3] -> inbox@0[0:3]",
        "  notify arrived<1 on 0",
        "  wait   arrived<0 >= 2",
        "  matmul inbox@1[0:2] -> out@1[0:2]",
    ]


def test_a_plan_without_instructions_can_be_shown():
    assert show(Plan("nothing", "at all", {}, ({}, {"compute": ()}))).splitlines()[-3:] == [
        "rank 1",
        "  compute",
        "  -------",
    ]


def test_a_buffer_refuses_an_unknown_role():
    with pytest.raises(ValueError, match="workspace, eager, inout or private; got 'scratch'"):
        Buffer("scratch", (1, 1))
