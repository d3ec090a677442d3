"""The command ``weft``, also as ``python -m weft``. Its libraries are the extra ``cli``."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from weft.installation import command

LIBRARIES = "typer", "rich"


def main() -> None:
    """Run the command, or end with an error that names the libraries or the core that it lacks."""
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        sys.exit(f"weft: the command line needs {names}, which come with: {command('cli')}")
    from weft.cli import app

    try:
        app(prog_name="weft")
    except ImportError as error:
        if error.name != "weft._native":
            raise
        sys.exit(f"weft: {error}")


if __name__ == "__main__":
    main()
