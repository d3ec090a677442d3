"""Compile the native core with every compiler and for every kind of Linux that weft is for, and run
its tests there.

Debian's compilers are unpacked into folders of their own, one for a release, since no release has
them all; nothing is installed. For musl the compiler is zig. It takes a minute to make its
libraries before it can link, so it only compiles, unless --run-musl is given. Programs for Arm run
in qemu. Needs root, apt with a mirror of Debian, and pip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import nanobind

ROOT = Path(__file__).parents[1]
HOME = ROOT / "build/portable"
ARM = "aarch64-linux-gnu"
# By release of Debian: the compilers, and their packages.
COMPILERS = {
    "bookworm": {
        "g++-11": ["g++-11", f"g++-11-{ARM}"],
        "g++-12": ["g++-12", f"g++-12-{ARM}", "qemu-user-static"],
        "clang++-14": ["clang-14"],
    },
    "trixie": {"g++-13": ["g++-13", f"g++-13-{ARM}"], "g++-14": ["g++-14", f"g++-14-{ARM}"]},
}
QEMU = HOME / "bookworm/usr/bin/qemu-aarch64-static"
UNUSED = [
    "./usr/share/*",
    "./usr/lib/gcc*/lto1",
    "./usr/lib/gcc/*san.*",
    "./usr/bin/qemu-[!a]*",
    "./usr/bin/qemu-a[!a]*",
]
SOURCES = sorted(
    str(path.relative_to(ROOT / "native"))
    for path in (ROOT / "native").glob("*/*.cpp")
    if path.parent.name != "python"  # which needs Python
)
FLAGS = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
COLUMNS = ["x86-64, glibc", "Arm, glibc", "x86-64, musl", "Arm, musl", "the module"]

BEGUN = time.monotonic()
DOWNLOAD = 100.0  # seconds that all downloads may take
UNAVAILABLE = 75  # exit status where there is no mirror of Debian, or nothing can be unpacked

Command = list[str | Path]


@dataclass(frozen=True, eq=False)
class Build:
    """A cell of the table: its row and column, the commands that must succeed, and its text
    then.
    """

    compiler: str
    column: str
    commands: list[Command]
    meaning: str


def download(command: Command) -> None:
    """Run a command that downloads, as long as the time of all downloads allows."""
    left = BEGUN + DOWNLOAD - time.monotonic()
    subprocess.run(command, check=True, timeout=max(left, 0))


def unpack(release: str) -> Path:
    """A folder with the compilers of a release and all that they need, in which weft's sources are
    in /weft.
    """
    root = HOME / release
    if not (root / "complete").exists():
        shutil.rmtree(root, ignore_errors=True)
        for folder in (
            "usr/bin",
            "usr/sbin",
            "usr/lib",
            "usr/lib64",
            "tmp",
            "lists/lists/partial",
            "cache/archives/partial",
        ):
            (root / folder).mkdir(parents=True)
        for folder in ("bin", "sbin", "lib", "lib64"):
            (root / folder).symlink_to(f"usr/{folder}")
        targets = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Label: Debian"]
        mirror = subprocess.run(targets, check=True, capture_output=True, text=True).stdout.split()[
            0
        ]
        (root / "sources").write_text(
            f"deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {mirror} {release} "
            "main\n"
        )
        options = {
            "Dir::Etc::SourceList": root / "sources",
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State": root / "lists",
            "Dir::State::status": "/dev/null",
            "Dir::Cache": root / "cache",
            "Acquire::Languages": "none",
            "APT::Sandbox::User": "root",
        }
        apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
        packages = [package for several in COMPILERS[release].values() for package in several]
        download([*apt, "update"])
        download(
            [*apt, "install", "--yes", "--download-only", "--no-install-recommends", *packages]
        )
        tar: Command = [
            "tar",
            "-x",
            "--keep-directory-symlink",
            "-C",
            root,
            *(f"--exclude={name}" for name in UNUSED),
        ]
        for package in (root / "cache/archives").glob("*.deb"):
            with subprocess.Popen(
                ["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE
            ) as files:
                subprocess.run(tar, stdin=files.stdout, check=True)
            package.unlink()
        (root / "complete").touch()
    shutil.rmtree(root / "weft", ignore_errors=True)
    shutil.copytree(ROOT / "native", root / "weft")
    calls = "process_group/message_calls.h"  # which the native core and the backend include
    (root / "weft/process_group").mkdir()
    shutil.copy(ROOT / "weft" / calls, root / "weft" / calls)
    shutil.copytree(sysconfig.get_path("include"), root / "weft/headers/python")
    shutil.copytree(nanobind.include_dir(), root / "weft/headers/nanobind")
    return root


def install_zig() -> Path:
    folder = HOME / "zig"
    zig = folder / "ziglang/zig"
    if not zig.exists():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--constraint",
            ROOT / "constraints.txt",
            "--target",
            folder,
        ]
        download([*pip, "ziglang"])
    return zig


def builds_of(release: str) -> Iterator[Build]:
    """The builds by the compilers of an unpacked release."""
    root = HOME / release
    within: Command = ["chroot", root]
    sources = [
        "-I/weft",
        *(f"/weft/{source}" for source in SOURCES),
        "-rdynamic",
    ]  # a team is looked up in the program itself
    for name in COMPILERS[release]:
        crossed = [name, f"--target={ARM}"] if name.startswith("clang") else [f"{ARM}-{name}"]
        own, foreign = f"/weft/core-{name}", f"/weft/core-{name}-arm"
        yield Build(
            name,
            COLUMNS[0],
            [[*within, name, *FLAGS, *sources, "-o", own], [*within, own]],
            "passes",
        )
        run = [QEMU, "-L", root / "usr" / ARM, f"{root}{foreign}"]
        yield Build(
            name, COLUMNS[1], [[*within, *crossed, *FLAGS, *sources, "-o", foreign], run], "passes"
        )
        bindings = [f"/weft/python/{path.name}" for path in (ROOT / "native/python").glob("*.cpp")]
        headers = [
            "-I/weft",
            "-isystem",
            "/weft/headers/python",
            "-isystem",
            "/weft/headers/nanobind",
            "-fvisibility=hidden",
            "-fsyntax-only",
        ]
        yield Build(
            name,
            COLUMNS[4],
            [[*within, name, *FLAGS, *headers, *bindings]],
            "compiles",
        )


def builds_for_musl(zig: Path, run: bool) -> Iterator[Build]:
    for column, target, runner in (
        (COLUMNS[2], "x86_64-linux-musl", []),
        (COLUMNS[3], "aarch64-linux-musl", [QEMU]),
    ):
        folder = HOME / target
        folder.mkdir(exist_ok=True)
        compiler: Command = [
            "env",
            "-C",
            folder,
            f"ZIG_GLOBAL_CACHE_DIR={HOME / 'cache'}",
            zig,
            "c++",
            "-target",
            target,
        ]
        sources = [f"-I{ROOT / 'native'}", *(ROOT / "native" / source for source in SOURCES)]
        if run:
            commands = [[*compiler, *FLAGS, *sources, "-o", "core"], [*runner, folder / "core"]]
        else:
            commands = [[*compiler, *FLAGS, *sources, "-c"]]
        yield Build("clang of zig", column, commands, "passes" if run else "compiles")


def failure(build: Build) -> str:
    """The error of a build; empty if it succeeds."""
    for command in build.commands:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
        )
        if done.returncode:
            return f"{build.compiler}, {build.column}: {' '.join(map(str, command))}\n{done.stdout}"
    return ""


def main() -> int:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        zig = pool.submit(install_zig)
        try:
            list(pool.map(unpack, COMPILERS))
            zig.result()
            for release in COMPILERS:
                subprocess.run(
                    ["chroot", HOME / release, next(iter(COMPILERS[release])), "--version"],
                    check=True,
                    stdout=subprocess.DEVNULL,
                )
        except (subprocess.SubprocessError, OSError, IndexError) as error:
            print(f"NOT CHECKED: the compilers cannot be had on this machine: {error}")
            return UNAVAILABLE
        builds = [build for release in COMPILERS for build in builds_of(release)]
        builds += builds_for_musl(zig.result(), "--run-musl" in sys.argv)
        print(
            f"{len(builds)} builds; compilers unpacked after {time.monotonic() - BEGUN:.0f} s",
            flush=True,
        )
        failures = dict(zip(builds, pool.map(failure, builds), strict=True))
    print("".join(failures.values()), end="")
    cells = {
        (build.compiler, build.column): "FAILS" if failures[build] else build.meaning
        for build in builds
    }
    for compiler in ["", *dict.fromkeys(build.compiler for build in builds)]:
        row = [cells.get((compiler, column), "") if compiler else column for column in COLUMNS]
        print(f"{compiler:14}", *(f"{cell:14}" for cell in row))
    print(f"{time.monotonic() - BEGUN:.0f} s")
    return 1 if any(failures.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
