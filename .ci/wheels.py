"""Build weft's sdist and its wheels, for x86-64 and Arm, glibc and musl, with zig as the compiler,
and have auditwheel check them; and the sdist and the wheel of its benchmarks, which are Python
alone.

Wheels are for the Python that runs this: from 3.12 on, by its stable ABI, for all later ones too;
3.10 and 3.11 need wheels of their own. With --test the wheel for this machine is installed into an
environment that has nothing else, which runs the README's example, and then the benchmarks.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import ziglang

ROOT = Path(__file__).parents[1]
DIST, HOME = ROOT / "dist", ROOT / "build/wheels"
ZIG = Path(ziglang.__file__).with_name("zig")
TARGETS = [
    "x86_64-linux-gnu.2.28",
    "aarch64-linux-gnu.2.28",
    "x86_64-linux-musl",
    "aarch64-linux-musl",
]  # as zig calls them
STABLE = sys.version_info >= (3, 12)
TAG = "cp312-abi3" if STABLE else f"cp3{sys.version_info.minor}-cp3{sys.version_info.minor}"


def run(*command: str | Path, **environment: str) -> None:
    tools = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    subprocess.run(command, env=os.environ | tools | environment, check=True)


def build(target: str) -> None:
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
    if (
        library == "musl"
        # musl has two names for itself; zig takes the one that its distributions, and auditwheel,
        # do not
    ):
        run("wheel", "unpack", "--dest", folder / "unpacked", wheel)
        [unpacked] = (folder / "unpacked").iterdir()
        [module] = unpacked.glob("weft/*.so")
        run("patchelf", "--replace-needed", "libc.so", f"libc.musl-{processor}.so.1", module)
        run("wheel", "pack", "--dest-dir", folder, unpacked)
    run("auditwheel", "repair", "--only-plat", "--wheel-dir", DIST, wheel)


def test() -> None:
    """Install a wheel in an environment with Python only, and run the README's first program; then
    its benchmarks, which it does not contain.
    """
    bare = HOME / "bare"
    python, constraints = bare / "bin/python", ROOT / "constraints.txt"
    [wheel] = DIST.glob(f"torch_weft-*-{TAG}-manylinux*_{platform.machine()}.whl")
    run(sys.executable, "-m", "venv", "--clear", bare)
    run(python, "-m", "pip", "install", "--quiet", "--constraint", constraints, f"{wheel}[cli]")
    program = (ROOT / "README.md").read_text().split("```python\n", 1)[1].split("```", 1)[0]
    (bare / "example.py").write_text(program)
    weft = bare / "bin/weft"
    subprocess.run([weft, "run", "-n", "2", "example.py"], cwd=bare, check=True)
    bench = [weft, "bench", "all-reduce", "--sizes", "4K"]
    [benchmarks] = DIST.glob("torch_weft_bench-*.whl")
    missing = f'weft: weft bench comes with torch-weft-bench: run pip install "{benchmarks}"\n'
    refused = subprocess.run(bench, cwd=bare, stderr=subprocess.PIPE, text=True)
    if (refused.returncode, refused.stderr) != (2, missing):
        sys.exit(f"expected {missing}got {refused.stderr}")
    with ZipFile(wheel) as contents:
        folders = {name.partition("/")[0] for name in contents.namelist()}
    own = re.compile(r"weft$|torch_weft[-.]")
    if others := {name for name in folders if not own.match(name)}:
        sys.exit(f"{wheel.name} also has {', '.join(sorted(others))}")
    run(python, "-m", "pip", "install", "--quiet", "--constraint", constraints, benchmarks)
    subprocess.run(bench, cwd=bare, check=True)


def main() -> None:
    if "--test" in sys.argv:
        return test()
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST, ROOT)
    for target in TARGETS:
        build(target)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT / "bench")
    print(*sorted(path.name for path in DIST.iterdir()), sep="\n")
    return None


if __name__ == "__main__":
    main()
