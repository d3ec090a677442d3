"""Writes all-gather + matmul as a program of PTO: each instruction of the plan becomes a statement
of a kernel, and nothing else does.

The lane ``comm`` becomes the communication kernel, of vector cores, and ``compute`` the compute
kernel, of cube cores. Rows are float16, and products float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from pathlib import Path
from typing import NamedTuple

from weft.plan import Compute, Copy, Instruction, Notify, Plan, Region, Wait, accesses

_EXAMPLE = Path(__file__).parent / "example"
_MULTIPLE = 16  # of rows and columns of a tile
_TILE = {"BASE_M": 128, "BASE_K": 64, "BASE_N": 128, "MOVED_ROWS": 16, "MOVED_COLUMNS": 512}
"""The largest tiles: two of each operand fit into the memories of a core."""

_KERNELS = {"comm": "communication", "compute": "compute"}
_ELEMENT = 2  # bytes


class Sizes(NamedTuple):
    """The rows of each rank's a, and the product by (k, n)."""

    rows: int
    k: int
    n: int


def write(plan: Plan, sizes: Sizes) -> Mapping[str, str]:
    """The files of the program, by name, for a plan over rows.

    Raises `ValueError` for a plan with instructions that the program has no words for, and for
    sizes that are no multiples of a tile's.
    """
    made = _Program(plan, sizes)
    files = {path.name: path.read_text() for path in sorted(_EXAMPLE.iterdir())}
    return {**files, "plan.hpp": made.header(), "kernels.hpp": _DECLARED, **made.kernels()}


_DECLARED = """\
#pragma once

#include "instructions.hpp"

AICORE void communication_kernel(const Memory& memory, int execution);
AICORE void compute_kernel(const Memory& memory, int execution);
"""


class _Program:
    def __init__(self, plan: Plan, sizes: Sizes) -> None:
        self.plan, self.sizes = plan, sizes
        every = [instruction for _, instruction in plan.instructions()]
        used = {region.buffer for i in every for region in accesses(i)}
        self.buffers = [name for name in plan.buffers if name in used and name not in ("a", "out")]
        self.signals = plan.signal_names()
        counts = [region.rows for i in every for region in accesses(i)]
        self.tiles = {
            name: gcd(_TILE[name], *multiples)
            for name, multiples in {
                "BASE_M": counts,
                "BASE_K": (sizes.k,),
                "BASE_N": (sizes.n,),
                "MOVED_ROWS": counts,
                "MOVED_COLUMNS": (sizes.k,),
            }.items()
        }
        wrong = [name for name, size in self.tiles.items() if size % _MULTIPLE]
        if wrong:
            raise ValueError(
                f"tiles are multiples of {_MULTIPLE}: let the rows of a piece, K and N be; got "
                f"pieces of {min(counts)} rows, K {sizes.k} and N {sizes.n}"
            )

    def header(self) -> str:
        """The sizes, the buffers and the signals of the plan."""
        plan, size = self.plan, self.sizes
        begin, lines = 0, []
        for name in self.buffers:
            lines.append(begin)
            begin += max(plan.buffers[name].rows) * size.k * _ELEMENT
        sizes = {
            "RANKS": plan.ranks,
            "ROWS": size.rows,
            "OUT_ROWS": max(plan.buffers["out"].rows),
            "K": size.k,
            "N": size.n,
            **self.tiles,
        }
        return "\n".join(
            [
                f"// The sizes, buffers and signals of {plan.operator} / {plan.algorithm}.",
                "#pragma once",
                "",
                "#include <cstdint>",
                "",
                *(f"constexpr int {name} = {size};" for name, size in sizes.items()),
                f"enum Buffer {{ A, {', '.join(map(str.upper, self.buffers))} }};",
                f"enum SignalName {{ {', '.join(map(_signal, self.signals))} }};",
                "// where each buffer begins in a window, and where the counters do",
                f"constexpr int64_t BEGIN[] = {{0, {', '.join(map(str, lines))}}};",
                f"constexpr int64_t COUNTERS = {begin};",
                f"constexpr int64_t COUNTER_BYTES = {4 * len(self.signals) * plan.ranks};",
                "",
            ]
        )

    def kernels(self) -> Mapping[str, str]:
        names = {name for lanes in self.plan.lanes for name in lanes}
        if names - _KERNELS.keys():
            raise ValueError(f"a program has lanes compute and comm; the plan has {sorted(names)}")
        return {f"{kernel}_kernel.cpp": self.kernel(lane) for lane, kernel in _KERNELS.items()}

    def kernel(self, lane: str) -> str:
        plan, kernel = self.plan, _KERNELS[lane]
        lines = [
            f"// The {kernel} kernel: the lane {lane} of each rank of the plan {plan.operator} / "
            f"{plan.algorithm}.",
            '#include "kernels.hpp"',
            "",
            f"AICORE void {kernel}_kernel(const Memory& memory, int execution)",
            "{",
            "    switch (memory.rank) {",
        ]
        for rank in range(plan.ranks):
            lines.append(f"    case {rank}:")
            for instruction in plan.lanes[rank].get(lane, ()):
                lines += [
                    f"        // {instruction}",
                    f"        {self.statement(rank, instruction)}",
                ]
            lines.append("        break;")
        return "\n".join([*lines, "    }", "}", ""])

    def statement(self, rank: int, instruction: Instruction) -> str:
        match instruction:
            case Wait(signal, count):
                promised = self.plan.promised(rank).get(signal, 0)
                numbers = f"{signal.source}, {promised}, {count}"
                return f"wait(memory, {_signal(signal.name)}, {numbers}, execution);"
            case Notify(peer, signal):
                return f"notify(memory, {peer}, {_signal(signal.name)});"
            case Copy(src, dst) if src.rank == rank and dst.buffer != "out":
                to = f"{dst.rank}, {_buffer(dst)}, {dst.start}"
                return f"put<{src.rows}>(memory, {_buffer(src)}, {src.start}, {to});"
            case Compute(kernel, (src,), dst) if (
                kernel.name == "matmul" and src.rank == dst.rank == rank
            ):
                return f"product<{src.rows}>(memory, {_buffer(src)}, {src.start}, {dst.start});"
        raise ValueError(f"a program of PTO has no words for {instruction} of rank {rank}")


def _buffer(region: Region) -> str:
    return region.buffer.upper()


def _signal(name: str) -> str:
    return name.upper().replace(" ", "_")
