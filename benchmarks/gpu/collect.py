"""Join the JSON files of a folder in one file, by their names.

python benchmarks/gpu/collect.py FOLDER OUT.json
"""

import json
import sys
from pathlib import Path


def main(folder: Path, out: Path) -> None:
    found = {}
    for file in sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime):
        try:
            found[file.stem] = json.loads(file.read_text())
        except ValueError:  # its writer was ended
            found[file.stem] = {"error": "incomplete"}
    if found:
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
