"""Writes operators as programs of PTO: each instruction of a plan becomes a statement of a kernel,
and nothing else does.

The lane ``compute`` becomes the compute kernel, of cube cores, the lane ``comm`` the communication
kernel and ``comm1`` (`weft_tools.formats.pto.cores.by_cores`) the vector kernel, both of vector
cores. Rows are float16, and products and their sums float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from pathlib import Path
from typing import NamedTuple

from weft.plan import Compute, Copy, Instruction, Notify, Plan, Reduce, Region, Wait, accesses
from weft_tools.formats.pto.cores import OTHERS, PRODUCTS, by_cores

OPERATORS = "all_gather", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
"""The operators of which there are programs."""

_EXAMPLE = Path(__file__).parent / "example"
_MULTIPLE = 16  # of rows and columns of a tile
_TILE = {"BASE_M": 128, "BASE_K": 64, "BASE_N": 128, "MOVED_ROWS": 16, "MOVED_COLUMNS": 512}
"""The largest tiles: two of each operand fit into the memories of a core."""

_KERNELS = {PRODUCTS: "compute", OTHERS: "vector", "comm": "communication"}
_HALF, _SINGLE = 2, 4  # bytes


class Sizes(NamedTuple):
    """The rows of each rank's a, and the product by (k, n); n is 0 without one."""

    rows: int
    k: int
    n: int


def write(plan: Plan, sizes: Sizes) -> Mapping[str, str]:
    """The files of the program, by name, for a plan over rows.

    Raises `ValueError` for a plan with instructions that the program has no words for, and for
    sizes that are no multiples of a tile's.
    """
    made = _Program(by_cores(plan), sizes)
    files = {path.name: path.read_text() for path in sorted(_EXAMPLE.iterdir())}
    return {**files, "plan.hpp": made.header(), "kernels.hpp": made.declared(), **made.kernels()}


class _Program:
    def __init__(self, plan: Plan, sizes: Sizes) -> None:
        self.plan, self.sizes = plan, sizes
        every = [instruction for _, instruction in plan.instructions()]
        used = {region.buffer for i in every for region in accesses(i)}
        (self.out,) = (name for name, each in plan.buffers.items() if each.role == "output")
        self.buffers = [name for name in plan.buffers if name in used - {"a", self.out}]
        self.signals = plan.signal_names()
        self.multiplies = any(isinstance(i, Compute) for i in every)
        # sums are of products, which then travel; otherwise rows of a do
        self.sums = any(isinstance(i, Reduce) for i in every)
        self.width = sizes.n if self.sums else sizes.k
        counts = [region.rows for i in every for region in accesses(i)]
        self.tiles = {
            name: gcd(_TILE[name], *multiples)
            for name, multiples in {
                "BASE_M": counts,
                "BASE_K": (sizes.k,),
                "BASE_N": (sizes.n,),
                "MOVED_ROWS": counts,
                "MOVED_COLUMNS": (self.width,),
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
            rows = max(plan.buffers[name].rows)
            begin += rows * self.width * (_SINGLE if self.sums else _HALF)
        sizes = {
            "RANKS": plan.ranks,
            "ROWS": size.rows,
            "OUT_ROWS": max(plan.buffers[self.out].rows),
            "K": size.k,
            "N": size.n,
            **self.tiles,
        }
        facts = {"MULTIPLIES": self.multiplies, "SUMS": self.sums}
        return "\n".join(
            [
                f"// The sizes, buffers and signals of {plan.operator} / {plan.algorithm}.",
                "#pragma once",
                "",
                "#include <cstdint>",
                "",
                *(f"constexpr int {name} = {size};" for name, size in sizes.items()),
                "// whether rows are multiplied, and products summed",
                *(
                    f"constexpr bool {name} = {str(is_so).lower()};"
                    for name, is_so in facts.items()
                ),
                f"enum Buffer {{ A, OUT, {', '.join(map(str.upper, self.buffers))} }};",
                f"enum SignalName {{ {', '.join(map(_signal, self.signals))} }};",
                "// where each buffer begins in a window, and where the counters do",
                f"constexpr int64_t BEGIN[] = {{0, 0, {', '.join(map(str, lines))}}};",
                f"constexpr int64_t COUNTERS = {begin};",
                f"constexpr int64_t COUNTER_BYTES = {4 * len(self.signals) * plan.ranks};",
                "",
            ]
        )

    def lanes(self) -> Sequence[str]:
        """The lanes of the plan, in the order of their kernels."""
        names = {name for lanes in self.plan.lanes for name in lanes}
        if names - _KERNELS.keys():
            raise ValueError(f"a program has no kernel for lanes {sorted(names - _KERNELS.keys())}")
        return [name for name in _KERNELS if name in names]

    def declared(self) -> str:
        """The declarations of the kernels, and which of them move rows."""
        kernels = {lane: f"{_KERNELS[lane]}_kernel" for lane in self.lanes()}
        moving = [name for lane, name in kernels.items() if lane != PRODUCTS]
        return "\n".join(
            [
                "#pragma once",
                "",
                '#include "instructions.hpp"',
                "",
                *(
                    f"AICORE void {name}(const Memory& memory, int execution);"
                    for name in kernels.values()
                ),
                "",
                "// the kernels of products, and of all else",
                f"#define COMPUTE_KERNELS {kernels.get(PRODUCTS, '')}",
                f"#define MOVING_KERNELS {', '.join(moving)}",
                "",
            ]
        )

    def kernels(self) -> Mapping[str, str]:
        return {f"{_KERNELS[lane]}_kernel.cpp": self.kernel(lane) for lane in self.lanes()}

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
            case Copy(src, dst, ""):
                word = "put" if src.rank == rank else "get"
                places = f"{self.place(rank, src)}, {self.place(rank, dst)}"
                return f"{word}<{src.rows}>(memory, {places});"
            case Compute(kernel, (src,), dst) if kernel.name == "matmul":
                places = f"{self.place(rank, src)}, {self.place(rank, dst)}"
                return f"product<{src.rows}>(memory, {places});"
            case Reduce(srcs, dst, "sum"):
                places = ", ".join(self.place(rank, src) for src in srcs)
                to = self.place(rank, dst)
                return f"sum<{dst.rows}, {len(srcs)}>(memory, {{{places}}}, {to});"
        raise ValueError(f"a program of PTO has no words for {instruction} of rank {rank}")

    def place(self, rank: int, region: Region) -> str:
        """A place in a kernel of a rank, which reaches of peers their windows alone."""
        name = "OUT" if region.buffer == self.out else region.buffer.upper()
        if region.rank != rank and name in ("A", "OUT"):
            raise ValueError(f"a program of PTO reaches {region} on rank {region.rank} alone")
        return f"{{{region.rank}, {name}, {region.start}}}"


def _signal(name: str) -> str:
    return f"{name.upper()}_SIGNAL".replace(" ", "_")
