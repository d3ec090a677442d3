"""Rows that travel compressed between hosts.

``int8`` is MXINT8 of the OCP Microscaling Formats (MX) Specification, version 1.0: each 32
consecutive numbers of a row, and the rest of it, share a power of two, and each is an integer of 8
bits times 1/64 of that. With the byte of the exponent a number takes 33/32 bytes. The proof of a
plan is of its rows: which ones are read, moved and combined is the same with and without
compression.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.plan.language import Copy, Instruction, Plan

BLOCK = 32
"""The consecutive numbers of a row that share a power of two."""


def row_bytes(columns: int) -> int:
    """The bytes of a compressed row."""
    return columns + -(-columns // BLOCK)


def compressed(plan: Plan, hosts: Sequence[int], compress: str) -> Plan:
    """`plan` with all rows that its ranks send to other hosts compressed; `hosts[rank]` is the host
    of a rank.
    """

    def instruction(one: Instruction) -> Instruction:
        if isinstance(one, Copy) and hosts[one.src.rank] != hosts[one.dst.rank]:
            return replace(one, compress=compress)
        return one

    return plan.with_instructions(instruction, f"{plan.request} as {compress}")
