"""The packages of weft and the imports between them, drawn from the source: `make house` writes
docs/images/house.svg.

A package stands above all that it imports. An arrow is left out where others lead the same way, so
the picture changes only if the house does.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import svg

ROOT = Path(__file__).parent.parent
WIDTH, FLOOR = 1000.0, 92.0
ROOM = (216.0, 58.0)
CHARACTERS = 33  # of a line in a room
MARGIN, GAP = 16.0, 26.0
ROOMS = "#e3f1f0"
CELLAR = "#f1f0ea"
CELLAR_CHARACTER = 7.0  # the width of one, of 12 points in the widest of the usual fonts


class House(NamedTuple):
    """`above[a][b]`: whether a package imports another only inside functions. `words` are what
    packages are. `cellar` are single modules that import no package.
    """

    above: dict[str, dict[str, bool]]
    words: dict[str, str]
    cellar: list[str]


class Imports(ast.NodeVisitor):
    """The parts of the package `name` that a module imports, and whether only inside functions."""

    def __init__(self, name: str) -> None:
        self.name, self.depth = name, 0
        self.found: dict[str, bool] = {}

    def add(self, module: str) -> None:
        own, _, rest = module.partition(".")
        if own == self.name and rest:
            part = rest.split(".")[0]
            self.found[part] = self.found.get(part, True) and self.depth > 0

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module == self.name:
            for alias in node.names:
                self.add(f"{self.name}.{alias.name}")
        elif node.module:
            self.add(node.module)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    def visit_If(self, node: ast.If) -> None:
        """An import for annotations is none at run time."""
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)


def house(package: Path) -> House:
    """The house of the package in this folder."""
    parts = {
        path.name.removesuffix(".py"): path
        for path in sorted(package.iterdir())
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    del parts["__init__"]  # imports public names when they are first used
    imports = {part: imported(package.name, path) for part, path in parts.items()}
    modules = [part for part, path in parts.items() if path.is_file()]
    cellar = [each for each in modules if not {*imports[each]}.difference(modules)]
    above = {
        part: {other: late for other, late in found.items() if other in parts and other != part}
        for part, found in imports.items()
        if part not in cellar
    }
    for found in above.values():
        for each in cellar:
            found.pop(each, None)
    return House(above, {part: words(path) for part, path in parts.items()}, cellar)


def imported(name: str, path: Path) -> dict[str, bool]:
    visitor = Imports(name)
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        before = visitor.found
        visitor.found = {}
        visitor.visit(ast.parse(file.read_text()))
        for part, late in before.items():
            visitor.found[part] = visitor.found.get(part, True) and late
    return visitor.found


def words(path: Path) -> str:
    """The first clause of the docstring."""
    file = path / "__init__.py" if path.is_dir() else path
    text = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0]
    return " ".join(text.replace("`", "").split())


def floors(above: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """The floor of each room, 0 for the lowest: one above the highest that it stands on."""
    found: dict[str, int] = {}

    def floor(room: str, path: tuple[str, ...] = ()) -> int:
        if room in path:
            raise ValueError(f"imports in a circle: {' → '.join((*path, room))}")
        if room not in found:
            found[room] = max((floor(each, (*path, room)) + 1 for each in above[room]), default=0)
        return found[room]

    for room in above:
        floor(room)
    return found


def needed(above: Mapping[str, Mapping[str, bool]]) -> dict[str, dict[str, bool]]:
    """The arrows without those that others imply."""

    def reached(room: str) -> set[str]:
        return {below for each in above[room] for below in (each, *reached(each))}

    return {
        room: {
            other: late
            for other, late in found.items()
            if not any(other in reached(each) for each in found if each != other)
        }
        for room, found in above.items()
    }


class Layout:
    """Places of the rooms, and of the arrows on the floors that they pass."""

    def __init__(self, arrows: Mapping[str, Mapping[str, bool]], floor: Mapping[str, int]) -> None:
        self.height = max(floor.values())
        self.floors: list[list[str]] = [[] for _ in range(self.height + 1)]
        self.links: list[tuple[str, str]] = []
        self.paths: dict[tuple[str, str], list[str]] = {}
        for room in sorted(floor):
            self.floors[floor[room]].append(room)
        for room in sorted(arrows):
            for other in sorted(arrows[room]):
                passed = [f"{room}>{other}@{at}" for at in range(floor[room] - 1, floor[other], -1)]
                for name, at in zip(passed, range(floor[room] - 1, floor[other], -1), strict=True):
                    self.floors[at].append(name)
                path = [room, *passed, other]
                self.paths[room, other] = path
                self.links += pairwise(path)
        self.x = {
            name: WIDTH * (at + 1) / (len(names) + 1)
            for names in self.floors
            for at, name in enumerate(names)
        }
        best = dict(self.x)
        crossed = self.crossings()
        for turn in range(60):
            self.sweep(down=turn % 2 == 0)
            if (now := self.crossings()) < crossed:
                best, crossed = dict(self.x), now
        self.x = best
        for turn in range(40):
            self.sweep(down=turn % 2 == 0, ordered=True)
        left = min(x - wide(name) / 2 for name, x in self.x.items()) - MARGIN
        self.x = {name: x - left for name, x in self.x.items()}
        self.width = max(x + wide(name) / 2 for name, x in self.x.items()) + MARGIN

    def crossings(self) -> int:
        """The number of pairs of links between two floors that cross."""
        at = {name: number for number, names in enumerate(self.floors) for name in names}
        found = 0
        for index, (a, b) in enumerate(self.links):
            for c, d in self.links[index + 1 :]:
                if at[a] == at[c] and (self.x[a] - self.x[c]) * (self.x[b] - self.x[d]) < 0:
                    found += 1
        return found

    def sweep(self, down: bool, ordered: bool = False) -> None:
        """Move each name towards the names it is linked with on the last floor, or, where the order
        stays, on both.
        """
        linked: dict[str, list[str]] = {}
        for upper, lower in self.links:
            if down or ordered:
                linked.setdefault(lower, []).append(upper)
            if not down or ordered:
                linked.setdefault(upper, []).append(lower)
        for names in reversed(self.floors) if down else self.floors:
            wanted = {
                name: mean(self.x[each] for each in linked[name])
                if name in linked
                else self.x[name]
                for name in names
            }
            names.sort(key=lambda name: (self.x if ordered else wanted)[name])
            self.x.update(spread(names, wanted))


def wide(name: str) -> float:
    return ROOM[0] if "@" not in name else 10.0


def spread(names: list[str], wanted: Mapping[str, float]) -> dict[str, float]:
    """Places from left to right, as near as possible to the wanted ones, that do not overlap."""
    right: dict[str, float] = {}
    left: dict[str, float] = {}
    edge = MARGIN
    for name in names:
        right[name] = max(wanted[name], edge + wide(name) / 2)
        edge = right[name] + wide(name) / 2 + GAP
    edge = WIDTH - MARGIN
    for name in reversed(names):
        left[name] = min(wanted[name], edge - wide(name) / 2)
        edge = left[name] - wide(name) / 2 - GAP
    middle = {name: (left[name] + right[name]) / 2 for name in names}
    edge = MARGIN
    for name in names:  # the mean of both may overlap by rounding at the edges only
        middle[name] = max(middle[name], edge + wide(name) / 2)
        edge = middle[name] + wide(name) / 2 + GAP
    over = max(0.0, edge - GAP - (WIDTH - MARGIN))
    return {name: x - over for name, x in middle.items()}


def draw(found: House, path: Path) -> None:
    """Write the picture."""
    arrows = needed(found.above)
    layout = Layout(arrows, floors(found.above))
    height = 2 * MARGIN + layout.height * FLOOR + ROOM[1] + 38 + 16 * len(lowest(found, layout))
    label = "The packages of weft and the imports between them"
    svg.write(path, layout.width, height, label, drawn(found, arrows, layout))


def drawn(found: House, arrows: Mapping[str, Mapping[str, bool]], layout: Layout) -> Iterator[str]:
    """The parts of the picture."""
    top = {number: MARGIN + (layout.height - number) * FLOOR for number in range(layout.height + 1)}
    at = {name: number for number, names in enumerate(layout.floors) for name in names}
    for (room, other), path in layout.paths.items():
        yield svg.line(curve(layout, path, top, at), dashed=arrows[room][other])
    for room in sorted(arrows):
        corner = (layout.x[room] - ROOM[0] / 2, top[at[room]])
        yield svg.box(corner, ROOM, ROOMS, title=found.words[room])
        yield svg.text((layout.x[room], corner[1] + 19), room, 15, bold=True)
        shown = textwrap.wrap(
            found.words[room], CHARACTERS, max_lines=2, placeholder=" …", break_on_hyphens=False
        )
        for line, words in enumerate(shown):
            yield svg.text((layout.x[room], corner[1] + 35 + 14 * line), words, 11, svg.PALE)
    bottom = MARGIN + layout.height * FLOOR + ROOM[1] + 18
    lines = lowest(found, layout)
    yield svg.box((MARGIN, bottom), (layout.width - 2 * MARGIN, 20 + 16 * len(lines)), CELLAR)
    for number, line in enumerate(lines):
        yield svg.text((layout.width / 2, bottom + 22 + 16 * number), line, 12)


def lowest(found: House, layout: Layout) -> list[str]:
    """The lines of the box below all."""
    below = f"below all: {' · '.join(found.cellar)}"
    return textwrap.wrap(below, int((layout.width - 3 * MARGIN) / CELLAR_CHARACTER))


def curve(layout: Layout, path: list[str], top: Mapping[int, float], at: Mapping[str, int]) -> str:
    """An arrow from the bottom of a room through the floors between to the top of another."""
    x, y = layout.x[path[0]], top[at[path[0]]] + ROOM[1]
    parts = [f"M{svg.number(x)} {svg.number(y)}"]
    for name in path[1:]:
        to, up = layout.x[name], top[at[name]]
        half = (y + up) / 2
        ends = (f"{svg.number(a)} {svg.number(b)}" for a, b in ((x, half), (to, half), (to, up)))
        parts.append(f"C{' '.join(ends)}")
        if name is not path[-1]:
            parts.append(f"V{svg.number(up + ROOM[1])}")
        x, y = to, up + ROOM[1]
    return "".join(parts)


if __name__ == "__main__":
    draw(house(ROOT / "weft"), ROOT / "docs/images/house.svg")
