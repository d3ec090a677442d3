"""Traces of a persistent product kernel from within: when each of its programs waited for rows,
multiplied a tile and had stored it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from weft.engines.program import Timed
from weft.gpu.kernels.symmetric import INTERPRETED
from weft.gpu.lanes import LaneOperands, Step
from weft.gpu.products import ProductLaunch
from weft.plan import Instruction
from weft.plan.trace import of_program


class KernelTrace:
    """One execution of a launch of a `lane`, and its trace.

    The kernel writes `times`, a row for each tile: when its program began to wait for the tile's
    rows, began to multiply them, and had stored the tile.
    """

    def __init__(
        self, launch: ProductLaunch, lane: Sequence[Instruction], device: torch.device
    ) -> None:
        self.launch = launch
        self.product = launch.product
        self.places = [lane.index(instruction) for instruction in launch.part]
        tiles = len(self.product.launch.tiles)
        self.times = torch.zeros(tiles, 3, dtype=torch.int64, device=device)

    def step(self, operands: LaneOperands, idle: bool = False) -> Step:
        """As that of the launch."""
        return self.launch.step(operands, idle, self.times)

    def spans(self, lane: str, stop: int) -> list[Timed]:
        """The spans of all instructions, each from its first tile to its last, and of each program,
        once the launch has ended.

        A GPU has its own clock, which is shifted so that the last tile ends at `stop`, a time of
        the host at which the launch had ended.
        """
        times = self.times.cpu()
        product = self.product
        if not INTERPRETED and len(times):
            times += stop - times.max()
        found = list[Timed]()
        whole = dict[int, tuple[int, int]]()
        passed = Counter[int]()  # the number of waits that each program has executed

        def add(name: str, places: Sequence[int], start: int, stop: int) -> None:
            """A span of a program, which is a part of the instructions at `places`."""
            for at in places:
                first, last = whole.get(at, (start, stop))
                whole[at] = min(first, start), max(last, stop)
            found.extend((name, at, start, stop) for at in places[-1:])

        for tile, (begin, multiplies, end) in enumerate(times.tolist()):
            number = tile % product.grid[0]
            program = of_program(lane, number)
            needed = product.launch.tiles[tile][5]
            waits = [self.places[wait] for wait in product.waits[passed[number] : needed]]
            add(program, waits, begin, multiplies)
            passed[number] = max(passed[number], needed)
            add(program, [self.places[product.launch.owners[tile]]], multiplies, end)
        reached = int(times.min()) if len(times) else stop
        for at in self.places:
            # a notify follows the tiles before it; a product may have no rows
            start, reached = whole.get(at, (reached, reached))
            found.append((lane, at, start, reached))
        return found
