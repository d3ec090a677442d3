"""A fused operator's call from top to bottom, drawn from a run: `make house` writes
docs/images/call.svg.

Two ranks make a call of a new shape and then the same call again, and a profile records rank 0's
functions. A column is a package, from the top of the house to its bottom; a row is a function, in
the order of the calls. Functions of one package that lead nowhere else, and single modules below
all packages, are left out.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import house
import svg

import weft

ROOT = Path(__file__).parent.parent
NATIVE = "native core"
ROW, BOX, MARGIN, HEAD = 25.0, 20.0, 16.0, 54.0
COLUMN, INDENT, BACK, CHARACTER = 112.0, 18.0, 60.0, 7.3
DEPTH = 6  # generations of functions
COLORS = ("#dcefee", "#fdeccd", "#e4e5f7", "#f9dede", "#e2f0d9", "#efe3f3", "#dde9f7", "#f3ecd9")


@dataclass
class Function:
    """A function that was entered: its package, its name, its file, and what it called."""

    room: str
    name: str
    file: str
    called: list[Function] = field(default_factory=list)


def wrapped(core: Any) -> None:
    """Make the native core's methods functions of Python, which a profile sees."""

    def seen(name: str, method: Callable[..., Any]) -> Any:
        def native(*args: Any, **options: Any) -> Any:
            return method(*args, **options)

        native.__code__ = native.__code__.replace(co_filename=NATIVE, co_qualname=name)
        return native

    for kind in [each for each in vars(core).values() if isinstance(each, type)]:
        for name, method in [*vars(kind).items()]:
            if callable(method) and not name.startswith("__"):
                setattr(kind, name, seen(f"{kind.__name__}.{name}", method))


def traced(work: Callable[[], object]) -> Function:
    """The functions that this thread enters while `work` runs."""
    top = Function("", "", "")
    open_calls = [top]

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered = function(frame)
            open_calls[-1].called.append(entered)
            open_calls.append(entered)
        elif event == "return" and len(open_calls) > 1:
            open_calls.pop()

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return top


def function(frame: FrameType) -> Function:
    """The function of a frame; without a room if it is none of weft's packages."""
    code = frame.f_code
    if code.co_filename == NATIVE:
        return Function(NATIVE, code.co_qualname, "")
    found = re.search(r"/weft/(\w+)/(?:\w+/)*(\w+)\.py$", code.co_filename)
    room, file = found.groups() if found else ("", "")
    file = room if file == "__init__" else file
    hidden = "<" in code.co_qualname or re.search(r"\.__(enter|exit)__$", code.co_qualname)
    name = code.co_qualname.removesuffix(".__init__")
    return Function("" if hidden else room, name, file)


def shown(called: list[Function], room: str, depth: int = DEPTH) -> list[Function]:
    """What is drawn of the calls of a function of `room`, each once: `depth` generations, and of
    the native calls below the last of them the first.
    """
    found: dict[tuple[str, str, str], Function] = {}
    for each in called:
        if each.name == "<module>":
            continue
        if not each.room:
            kept = shown(each.called, room, depth)
        elif depth == 0:
            kept = []
        else:
            below = shown(each.called, each.room, depth - 1)
            if depth == 1 and (names := [*dict.fromkeys(natives(each.called))]):
                below = [Function(NATIVE, names[0] + " …" * (len(names) > 1), "")]
            enters = each.called and each.room != room
            kept = []
            if below or enters or NATIVE in (each.room, room):
                kept = [Function(each.room, each.name, each.file, below)]
        for one in kept:
            found.setdefault((one.room, one.file, one.name), one)
    return [*found.values()]


def natives(called: list[Function]) -> Iterator[str]:
    """The names of all native calls below, in their order."""
    for each in called:
        if each.room == NATIVE:
            yield each.name
        yield from natives(each.called)


def calls() -> list[Function]:
    """This rank's first call of a shape, and the same call again."""
    import torch

    import weft._native as core

    wrapped(core)
    with weft.init():
        b = weft.pack(torch.ones(64, 48))
        weft.matmul_all_reduce(torch.ones(16, 64), b)  # imports what calls need
        a = torch.ones(32, 64)
        first, _, later = (traced(lambda: weft.all_gather_matmul(a, b)) for _ in range(3))
    return [first, later]


def flat(called: list[Function]) -> list[tuple[Function, list[int]]]:
    """The rows: each function and the rows of its callers, outermost first."""
    found: list[tuple[Function, list[int]]] = []

    def add(functions: list[Function], callers: list[int]) -> None:
        for each in functions:
            found.append((each, callers))
            add(each.called, [*callers, len(found) - 1])

    add(called, [])
    return found


def drawn(
    lines: list[tuple[Function, list[int]]], left: Mapping[str, float], top: float
) -> Iterator[str]:
    """The rows of one call: a box each in its package's column, and a line from its caller."""
    colors = dict(zip(left, COLORS, strict=False))
    corners = []
    boxes = []
    for row, (each, callers) in enumerate(lines):
        deep = sum(lines[caller][0].room == each.room for caller in callers)
        x, y = left[each.room] + INDENT * deep, top + ROW * row
        corners.append((x, y))
        size = (16 + CHARACTER * len(label(each)), BOX)
        boxes.append(svg.box((x, y), size, colors[each.room], title=f"{each.room}: {each.file}"))
        boxes.append(svg.text((x + 8, y + 14), label(each), 12, anchor="start"))
        if callers:
            from_x, from_y = corners[callers[-1]]
            start, middle = from_x + (INDENT / 2 if x > from_x else BACK), y + BOX / 2
            down = f"M{svg.number(start)} {svg.number(from_y + BOX)}V"
            if x < start < x + size[0]:  # a function that the native core calls
                yield svg.line(f"{down}{svg.number(y)}")
            else:
                end = x if x > start else x + size[0]
                yield svg.line(f"{down}{svg.number(middle)}H{svg.number(end)}")
    yield from boxes


def label(each: Function) -> str:
    """The function's name, with its file if that says more."""
    if not each.file or each.file in each.name or "." in each.name:
        return each.name
    return f"{each.file}.{each.name}"


def draw(calls: Mapping[str, list[tuple[Function, list[int]]]], path: Path) -> None:
    """Write the picture of some calls, one below the other."""
    floors = house.floors(house.house(ROOT / "weft").above)
    used = {each.room for lines in calls.values() for each, _ in lines}
    rooms = [*sorted(used - {NATIVE}, key=lambda room: (-floors[room], room)), NATIVE]
    left = {room: MARGIN + COLUMN * at for at, room in enumerate(rooms)}
    parts, y = [], MARGIN
    for title, lines in calls.items():
        parts.append(svg.text((MARGIN, y + 16), title, 15, bold=True, anchor="start"))
        names = (
            svg.text((x, y + 42), room, 12, svg.PALE, True, "start") for room, x in left.items()
        )
        parts += [*names, *drawn(lines, left, y + HEAD)]
        y += HEAD + ROW * len(lines) + MARGIN
    right = (
        left[each.room]
        + INDENT * len(callers) * (each.room != NATIVE)
        + CHARACTER * len(label(each))
        for lines in calls.values()
        for each, callers in lines
    )
    svg.write(
        path, max(right) + 16 + MARGIN, y, "A fused operator's call from top to bottom", parts
    )


if __name__ == "__main__":
    os.environ["WEFT_CACHE"] = tempfile.mkdtemp()
    first, later = (flat(shown(tree.called, "")) for tree in weft.launch(calls, 2)[0])
    draw(
        {"The first call of a shape": first, "Each later one": later}, ROOT / "docs/images/call.svg"
    )
