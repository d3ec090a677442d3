"""Build weft's wheels, for x86-64 and Arm, glibc and musl, with zig as the compiler, and have
auditwheel check them; with --sources the sdist, and the sdist and the wheel of the tools, which are
Python alone.

Wheels are for the Python that runs this; that of 3.12 is installed on later ones too, by the stable
ABI, where there is none of their own. For glibc, for which there are builds of torch, they bring
the backend of process groups, compiled (backends.py). With --test the wheel for this machine is
installed beside the oldest and the newest of these torches, each time into an environment that has
nothing else, where no compiler is found: it runs the README's example, process groups, and the
tools.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from zipfile import ZipFile

import backends
from backends import HOME, ROOT, ZIG

DIST = ROOT / "dist"
TARGETS = [
    "x86_64-linux-gnu.2.28",
    "aarch64-linux-gnu.2.28",
    "x86_64-linux-musl",
    "aarch64-linux-musl",
]  # as zig calls them
STABLE = sys.version_info[:2] == (3, 12)
TAG = "cp312-abi3" if STABLE else f"cp3{sys.version_info.minor}-cp3{sys.version_info.minor}"


GROUPS = """
import torch
import torch.distributed as dist

dist.init_process_group("weft")
x, peer = torch.ones(1000), 1 - dist.get_rank()
dist.all_reduce(x)
if peer:
    dist.send(x, peer)
else:
    dist.recv(y := torch.zeros(1000), peer)
    assert y.eq(2).all()
dist.destroy_process_group()
"""


def run(*command: str | Path, **environment: str) -> None:
    tools = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    subprocess.run(command, env=os.environ | tools | environment, check=True)


def build(target: str, torches: list[Path], dist: Path) -> None:
    """The wheel for one platform, under the name that auditwheel finds it may have."""
    folder = HOME / target
    processor, _, library = target.partition(".")[0].split("-")
    settings = {
        "build-dir": folder / "build",
        "wheel.py-api": "cp312" if STABLE else "",
        "cmake.define.CMAKE_SYSTEM_NAME": "Linux",
        "cmake.define.CMAKE_SYSTEM_PROCESSOR": processor,
    }
    shutil.rmtree(folder, ignore_errors=True)
    run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder),
        *(f"-C{name}={value}" for name, value in settings.items()),
        ROOT,
        CXX=f"{ZIG} c++ -target {target}",
        # nanobind takes it for granted, but neither zig's library nor the stable ABI brings it
        CXXFLAGS="-include cstdio",
        ZIG_GLOBAL_CACHE_DIR=str(HOME / "cache"),
        SETUPTOOLS_EXT_SUFFIX=f".cpython-3{sys.version_info.minor}-{processor}-linux-{library}.so",
        _PYTHON_HOST_PLATFORM=f"linux-{processor}",
    )
    [wheel] = folder.glob("*.whl")
    run("wheel", "unpack", "--dest", folder / "unpacked", wheel)
    [unpacked] = (folder / "unpacked").iterdir()
    if library == "musl":
        # it has two names for itself; zig takes the one that its distributions, and auditwheel, do
        # not
        [module] = unpacked.glob("weft/*.so")
        run("patchelf", "--replace-needed", "libc.so", f"libc.musl-{processor}.so.1", module)
    else:
        backends.build(target, unpacked / "weft/process_group/backends", torches)
    run("wheel", "pack", "--dest-dir", folder, unpacked)
    others = (f"--exclude={name}" for name in backends.OF_TORCH)
    run("auditwheel", "repair", "--only-plat", *others, "--wheel-dir", dist, wheel)


def test(dist: Path, torch: str) -> None:
    """Install a wheel and a torch in an environment with Python only, and run the README's first
    program; then the tools, which it does not contain.
    """
    bare = HOME / "bare"
    python, constraints = bare / "bin/python", HOME / "constraints.txt"
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    others = [line for line in pinned if not line.startswith(("torch==", "triton=="))]
    constraints.write_text("\n".join([*others, f"torch=={torch}", ""]))
    pip = [python, "-m", "pip"]
    install = [*pip, "install", "--quiet", "--only-binary", ":all:", "--constraint", constraints]
    [wheel] = dist.glob(f"torch_weft-*-{TAG}-manylinux*_{platform.machine()}.whl")
    run(sys.executable, "-m", "venv", "--clear", bare)
    run(*install, f"{wheel}[cli]")
    run(*pip, "check")
    program = (ROOT / "README.md").read_text().split("```python\n", 1)[1].split("```", 1)[0]
    (bare / "example.py").write_text(program)
    (bare / "groups.py").write_text(GROUPS)
    weft = bare / "bin/weft"
    nowhere = {"PATH": "/nowhere", "WEFT_CACHE": str(bare / "cache")}
    for name in ("example.py", "groups.py"):
        subprocess.run([weft, "run", "-n", "2", name], cwd=bare, env=nowhere, check=True)
    if compiled := [*(bare / "cache").glob("torch/*.so")]:
        sys.exit(f"{wheel.name} brings no backend for torch {torch}: {compiled[0]} was compiled")
    bench = [weft, "bench", "all-reduce", "--sizes", "4K"]
    [tools] = dist.glob("torch_weft_tools-*.whl")
    missing = f'weft: weft bench comes with torch-weft-tools: run pip install "{tools}"\n'
    refused = subprocess.run(bench, cwd=bare, stderr=subprocess.PIPE, text=True)
    if (refused.returncode, refused.stderr) != (2, missing):
        sys.exit(f"expected {missing}got {refused.stderr}")
    with ZipFile(wheel) as contents:
        folders = {name.partition("/")[0] for name in contents.namelist()}
    own = re.compile(r"weft$|torch_weft[-.]")
    if strangers := {name for name in folders if not own.match(name)}:
        sys.exit(f"{wheel.name} also has {', '.join(sorted(strangers))}")
    run(*install, tools)
    run(*pip, "check")
    subprocess.run(bench, cwd=bare, check=True)
    print(f"{wheel.name} passes with torch {torch}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sources", action="store_true")
    parser.add_argument("--test", nargs="*", metavar="TORCH", help="versions, in place of two")
    parser.add_argument("--target", action="append", help="a platform, in place of all")
    parser.add_argument("--torch", action="append", type=Path, help="a folder, in place of all")
    parser.add_argument("--dist", type=Path, default=DIST, help="where wheels are put")
    options = parser.parse_args()
    begun = time.monotonic()
    if options.test is not None:
        oldest, *_, newest = backends.torches()
        for version in options.test or [oldest, newest]:
            test(options.dist, version)
    elif options.sources:
        run(sys.executable, "-m", "build", "--sdist", "--outdir", options.dist, ROOT)
        run(sys.executable, "-m", "build", "--outdir", options.dist, ROOT / "tools")
    else:
        torches = [folder.resolve() for folder in options.torch or []]
        torches = torches or [backends.download(version) for version in backends.torches()]
        for target in options.target or TARGETS:
            build(target, torches, options.dist)
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
