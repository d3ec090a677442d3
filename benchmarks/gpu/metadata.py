"""Write into a folder the metadata by which `weft` finds the commands of its benchmarks there, as
an installation of `tools` does.

    python benchmarks/gpu/metadata.py FOLDER      from the root of the repository
"""

import sys
from pathlib import Path

import tomllib  # Python 3.11 and newer


def main(folder: Path) -> None:
    project = tomllib.loads(Path("tools/pyproject.toml").read_text())["project"]
    # a copy without git has no version, and none is asked for
    about = folder / f"{project['name'].replace('-', '_')}-0.dist-info"
    about.mkdir()
    lines = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n"
    (about / "METADATA").write_text(lines)
    entries = []
    for group, names in project["entry-points"].items():
        entries += [f"[{group}]", *(f"{name} = {place}" for name, place in names.items()), ""]
    (about / "entry_points.txt").write_text("\n".join(entries))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
