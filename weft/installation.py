"""The commands that install weft's extras and tools, from wherever this weft was installed.

A command names a folder or file that exists here, or else, as from an index, the libraries of the
extra themselves.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "torch-weft"
"""The name by which pip lists weft."""
TOOLS = "torch-weft-tools"
"""The distribution of the tools, which is in the folder ``tools`` of a checkout."""

_SOURCES = Path(__file__).parents[1]


def command(extra: str) -> str:
    """The command that installs an extra."""
    origin = _origin()
    if checkout() is None and origin is not None and origin.is_file():
        return f'pip install "{origin}[{extra}]"'
    if checkout() is None and (libraries := _libraries(extra)):
        return f"pip install {' '.join(libraries)}"
    return in_place(extra)


def in_place(extra: str) -> str:
    """The command that installs weft with an extra where its sources are, such as ``pip install -e
    ".[cli]"``.
    """
    folder = checkout()
    if folder is None:
        return f'pip install -e ".[{extra}]" in a checkout of weft'
    return f'pip install -e "{"." if folder == Path.cwd() else folder}[{extra}]"'


def tools() -> str:
    """The command that installs the tools beside this weft."""
    folder, origin = checkout(), _origin()
    if folder is not None:
        return f'pip install -e "{"./tools" if folder == Path.cwd() else folder / "tools"}"'
    name = f"{TOOLS.replace('-', '_')}-*.whl"
    wheels = sorted(origin.parent.glob(name)) if origin is not None and origin.is_file() else []
    if wheels:
        return f'pip install "{wheels[-1]}"'
    if origin is None and (version := _version()):  # as pip installs from an index
        return f'pip install "{TOOLS}=={version}"'
    return "pip install -e ./tools in a checkout of weft"


def comes_with_tools(what: str) -> str:
    """The text on what the tools have, for who has not installed them."""
    return f"{what} comes with {TOOLS}: run {tools()}"


def tool(name: str, what: str) -> Any:
    """What the tools have by this name, in their entry points ``weft.tools``.

    Raises `ModuleNotFoundError`, whose text names `what` they have, if they are not installed.
    """
    for entry in metadata.entry_points(group="weft.tools", name=name):
        return entry.load()
    raise ModuleNotFoundError(comes_with_tools(what))


def hides(folder: Path) -> bool:
    """Whether Python, started in a folder, would import weft from sources that are there without a
    native core, in place of this installed weft.
    """
    sources = folder / "weft"
    installed_in_place = (_SOURCES / "native").is_dir()
    return (
        not installed_in_place
        and (sources / "__init__.py").is_file()
        and not any(sources.glob("_native*.so"))
    )


def checkout() -> Path | None:
    """The checkout of weft that is imported or was installed, None if it is not known."""
    for folder in (_SOURCES, _origin()):
        if folder is not None and (folder / "native/CMakeLists.txt").is_file():
            return folder
    return None


def _origin() -> Path | None:
    """The folder or file that pip installed weft from, None if it is not known."""
    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    address = urlsplit(json.loads(text)["url"]) if text else None
    return Path(unquote(address.path)) if address and address.scheme == "file" else None


def _version() -> str:
    """The version that pip has installed, "" if it has not."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return ""


def _libraries(extra: str) -> list[str]:
    """The quoted requirements of an extra, none if weft was not installed by pip."""
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
    parts = [requirement.partition(";") for requirement in required]
    return [f'"{name.strip()}"' for name, _, when in parts if f'extra == "{extra}"' in when]
