"""The packages of weft and the imports between them, as the Mermaid diagram of docs/design.md:
`make house` writes it.

A package stands above all that it imports; imports that others imply are left out, and so are
single modules below all packages.
"""

from __future__ import annotations

import re
from pathlib import Path

import grimp
import networkx

PAGE = Path(__file__).parent.parent / "docs/design.md"
BLOCK = re.compile(r"```mermaid\nflowchart.*?```\n", re.DOTALL)


def imports() -> networkx.DiGraph:
    """An arrow from each package to each one that it imports."""
    graph = grimp.build_graph("weft", exclude_type_checking_imports=False)
    rooms = graph.find_children("weft") - {"weft.__main__"}
    packages = {room for room in rooms if graph.find_children(room)}
    for room in packages:
        graph.squash_module(room)
    found = networkx.DiGraph()
    found.add_nodes_from(sorted(packages))
    for room in sorted(rooms):
        below = graph.find_modules_directly_imported_by(room) & packages
        found.add_edges_from((room, other) for other in sorted(below - {room}))
    return found


def diagram() -> str:
    """The block of Markdown."""
    arrows = sorted(networkx.transitive_reduction(imports()).edges)
    lines = (" --> ".join(each.removeprefix("weft.") for each in arrow) for arrow in arrows)
    return "\n".join(("```mermaid", "flowchart TD", *(f"  {line}" for line in lines), "```", ""))


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(diagram(), PAGE.read_text(), count=1))
