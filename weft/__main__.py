"""The command ``weft``, also as ``python -m weft``. Its libraries are the extra ``weft[cli]``."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command, or end with an error that names the libraries it lacks."""
    missing = [name for name in ("typer", "rich", "matplotlib") if find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        sys.exit(f'weft: the command line needs {names}, which come with: pip install "weft[cli]"')
    from weft.cli import app

    app(prog_name="weft")


if __name__ == "__main__":
    main()
