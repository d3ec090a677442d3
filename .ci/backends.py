"""Compile `weft/process_group/backend.cpp` for each torch that weft's wheels are for, so that no
compiler is needed where one is installed.

zig compiles for an old glibc, and with the headers of this machine's g++, since torch has its C++
library. Of torch only headers and names of symbols are needed. Its builds for all processors have
the same, so they are of the one for Arm, the smallest. In place of the libraries that torch has
loaded by then, empty ones of the same names are linked.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zipfile import ZipFile

import ziglang

ROOT = Path(__file__).parents[1]
HOME = ROOT / "build/wheels"
sys.path.insert(0, str(ROOT))
from weft.process_group import libraries  # noqa: E402  # which needs no torch

ZIG = Path(ziglang.__file__).with_name("zig")
# the newest release of each minor version, from the oldest that pyproject.toml allows on
TORCHES = ["2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"]
NEWEST_FOR = {10: "2.14.1"}  # by the minor version of Python, where it is not the last
OF_TORCH = ["libc10.so", "libtorch_cpu.so", "libtorch_python.so"]
OF_GCC = ["libstdc++.so.6", "libgcc_s.so.1"]
NEWEST = {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}  # as of manylinux_2_28
# in place of a header that g++'s take if it is there, but which zig's glibc refuses as too new
SINGLE_THREADED = "static const char __libc_single_threaded = 0;\n"
SYMBOL = re.compile(
    r" *\d+: \w+ +\w+ +\w+ +(?P<kind>\w+) +\w+ +(?:\[.*?\] +)?(?P<section>\w+) +"
    r"(?P<name>[^@\s]+)(?:@+(?P<version>\S+))?"
)  # a line of readelf's


def build(target: str, folder: Path, torches: list[Path]) -> None:
    """Put the libraries for a platform, as zig calls it, and for this Python into a new folder."""
    folder.mkdir()
    work = HOME / target / "backends"
    (work / "sys").mkdir(parents=True, exist_ok=True)
    (work / "sys/single_threaded.h").write_text(SINGLE_THREADED)
    (work / "empty.c").touch()
    for name in OF_TORCH + OF_GCC:
        soname = f"-Wl,-soname,{name}"
        zig(work, "cc", target, "-shared", "-nostdlib", soname, "empty.c", "-o", name)
    processor, _, libc = target.partition(".")[0].split("-")
    python = f"cpython-3{sys.version_info.minor}-{processor}-linux-{libc}"

    def one(torch: Path) -> None:
        library, headers = work / f"{version_of(torch)}.so", torch / "include"
        include = [*headers_of_gcc(), sysconfig.get_paths()["include"], headers]
        include += [headers / "torch/csrc/api/include"]
        zig(
            *(work, "c++", target, "-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden"),
            *("-s", "-w", "-nostdinc++", "-nostdlib++", "-I.", *(f"-I{each}" for each in include)),
            *(ROOT / "weft/process_group/backend.cpp", "-o", library),
            *("-Wl,--no-as-needed", *OF_TORCH, *OF_GCC),
        )
        if missing := needed(library) - symbols_of_torch(torch) - symbols_of_gcc():
            sys.exit(f"torch {version_of(torch)} has no {', '.join(sorted(missing))}")
        libraries.keep(library, folder, libraries.name(version_of(torch), headers, python))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, torches))


def torches() -> list[str]:
    """Those that have builds for this Python."""
    newest = NEWEST_FOR.get(sys.version_info.minor, TORCHES[-1])
    return TORCHES[: TORCHES.index(newest) + 1]


def zig(folder: Path, *command: str | Path) -> None:
    """Run a compiler of zig's in a folder: its kind, the target, and its own arguments."""
    kind, target, *arguments = command
    environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(HOME / "cache")}
    subprocess.run(
        [ZIG, kind, "-target", target, *arguments], cwd=folder, env=environment, check=True
    )


def download(version: str) -> Path:
    """The folder of a torch, as far as it is needed, from its wheel."""
    folder = HOME / "torch" / version
    if not (folder / "torch").exists():
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        build = ["--only-binary", ":all:", "--platform", "manylinux_2_28_aarch64"]
        subprocess.run([*pip, *build, f"torch=={version}"], check=True)
        [wheel] = folder.glob("*.whl")
        wanted = re.compile(rf"torch/(include/.*[^/]|version\.py|lib/({'|'.join(OF_TORCH)}))")
        with ZipFile(wheel) as contents:
            names = [name for name in contents.namelist() if wanted.fullmatch(name)]
            contents.extractall(folder / "part", names)
        wheel.unlink()
        (folder / "part/torch").rename(folder / "torch")
    return folder / "torch"


def version_of(torch: Path) -> str:
    found = re.search(r"__version__ = '(.*)'", (torch / "version.py").read_text())
    assert found
    return found[1]


def output_of(*command: str | Path) -> str:
    ran = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    return ran.stdout


@functools.cache
def headers_of_gcc() -> list[str]:
    """The folders of the headers of the C++ library of this machine's g++."""
    said = output_of("g++", "-E", "-v", "-x", "c++", os.devnull)
    return re.findall(r"^ (/.*/c\+\+/.*)$", said, re.M)


@functools.cache
def symbols_of_torch(torch: Path) -> set[str]:
    files = (torch / "lib" / name for name in OF_TORCH)
    return {name for file in files for name, defined, _ in symbols(file) if defined}


@functools.cache
def symbols_of_gcc() -> set[str]:
    """Those of this machine's g++ that the oldest machines for which wheels are have too."""

    def old(version: str) -> bool:
        kind, _, number = version.partition("_")
        numbers = [int(each) for each in number.split(".") if each.isdigit()]
        return kind in NEWEST and (*numbers,) <= NEWEST[kind]

    files = (Path(output_of("g++", f"-print-file-name={name}").strip()) for name in OF_GCC)
    return {name for file in files for name, defined, version in symbols(file) if old(version)}


def needed(library: Path) -> set[str]:
    """The symbols that torch and g++ must have: Python's are in the program, and glibc's have
    versions.
    """
    return {
        name
        for name, defined, version in symbols(library)
        if not (defined or version or name.startswith(("Py", "_Py")))
    }


def symbols(library: Path) -> Iterator[tuple[str, bool, str]]:
    """The symbols of a library: the name, whether it is defined there, and the version; without
    those that it can do without.
    """
    for line in output_of("readelf", "--dyn-syms", "--wide", library).splitlines():
        if found := SYMBOL.match(line):
            defined = found["section"] != "UND"
            if defined or found["kind"] != "WEAK":
                yield found["name"], defined, found["version"] or ""
