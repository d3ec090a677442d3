"""The library of the backend: the one of weft's wheel that is for this torch, or else compiled once,
and loaded only as it was compiled.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import group, on_ranks

import weft
from weft import trust
from weft.process_group import compiled, libraries

COMPILER = """#!/bin/sh
echo $$ >> {folder}/runs
while [ "$1" != -o ]; do shift; done
[ -e {folder}/fails ] && { echo half > "$2"; exit 1; }
exec cp {folder}/library "$2"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache, and in place of a compiler a script, which notes its runs."""
    (tmp_path / "library").write_bytes(os.urandom(10_000))
    script = tmp_path / "c++"
    script.write_text(COMPILER.replace("{folder}", str(tmp_path)))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def runs(folder):
    file = folder / "runs"
    return len(file.read_text().splitlines()) if file.exists() else 0


def files(folder):
    return sorted(each.name for each in (folder / "cache" / "torch").iterdir())


def test_it_is_compiled_once_and_whole(folder):
    library = compiled._compiled()
    assert library.read_bytes() == (folder / "library").read_bytes()
    assert compiled._compiled() == library
    assert runs(folder) == 1
    assert files(folder) == [library.name, "lock"]


@pytest.mark.parametrize("part", [0.0, 0.5, 0.999])
def test_one_that_was_cut_off_is_compiled_anew(folder, part):
    library = compiled._compiled()
    os.truncate(library, int(10_000 * part))
    assert compiled._compiled() == library
    assert library.stat().st_size == 10_000
    library.write_bytes(os.urandom(10_000))
    assert compiled._compiled().read_bytes() == (folder / "library").read_bytes()
    assert runs(folder) == 3
    assert files(folder) == [library.name, "lock"]


def test_one_that_another_user_may_have_written_is_compiled_anew(folder):
    library = compiled._compiled()
    library.chmod(0o777)
    assert compiled._compiled() == library
    trust.check_file(library)
    if os.geteuid() == 0:
        os.chown(library, 65534, -1)
        assert compiled._compiled() == library
        trust.check_file(library)
        assert runs(folder) == 3


def test_a_compiler_that_fails_leaves_nothing(folder):
    (folder / "fails").touch()
    with pytest.raises(subprocess.CalledProcessError):
        compiled._compiled()
    assert files(folder) == ["lock"]


def test_the_mask_of_new_files_does_not_matter(folder):
    before = os.umask(0)
    try:
        library = compiled._compiled()
    finally:
        os.umask(before)
    trust.check_file(library)
    assert trust.rejection(library.parent) == ""


def test_a_lock_that_is_held_has_a_limit(folder, monkeypatch):
    compiled._compiled().unlink()
    monkeypatch.setattr(compiled, "LIMIT", 0.1)
    with (
        compiled._alone(folder / "cache" / "torch" / "lock"),
        pytest.raises(TimeoutError, match=r"has locked .*/torch/lock for 0\.1 s, to compile it"),
    ):
        compiled._compiled()


def test_processes_that_start_together_compile_once(folder):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(compiled._compiled())) for _ in range(4)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len({*found}) == 1
    assert len(found) == 4
    assert runs(folder) == 1


PYTHON = sysconfig.get_config_var("SOABI")
HEADERS = Path(torch.__file__).parent / "include"


@pytest.fixture(scope="module")
def library():
    """One for the torch that is installed."""
    return compiled._compiled()


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The folder of the libraries that weft brings, on a machine without a compiler."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(libraries, "FOLDER", tmp_path / "backends")
    (tmp_path / "backends").mkdir()
    return tmp_path / "backends"


def brings(wheel, contents, version=torch.__version__, headers=HEADERS, python=PYTHON):
    """Let the wheel have a library of these contents; its file."""
    (wheel / "made").write_bytes(contents)
    return libraries.keep(wheel / "made", wheel, libraries.name(version, headers, python))


def loaded():
    return compiled.backend.__wrapped__()


def test_the_library_of_the_wheel_needs_no_compiler(wheel, library):
    own = brings(wheel, library.read_bytes())
    assert loaded().__file__ == str(own)


def test_the_other_releases_and_builds_of_a_torch_have_its_library(wheel, library):
    number = libraries.minor(torch.__version__)
    own = brings(wheel, library.read_bytes(), f"{number}.9+cu999")
    assert loaded().__file__ == str(own)


def copied_headers(folder):
    for header in libraries._CLASSES:
        if (HEADERS / header).exists():
            (folder / header).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(HEADERS / header, folder / header)
    return folder


@pytest.mark.parametrize("other", ["version", "headers", "python"])
def test_a_library_for_another_torch_is_not_loaded(wheel, library, tmp_path, other):
    headers = copied_headers(tmp_path / "include")
    named = {"headers": headers}
    if other == "version":
        named["version"] = "2.8.0"
    elif other == "python":
        named["python"] = "cpython-39-x86_64-linux-gnu"
    else:
        with open(headers / "torch/csrc/distributed/c10d/Work.hpp", "a") as header:
            header.write("// a build of another maker")
    brings(wheel, library.read_bytes(), **named)
    with pytest.raises(weft.WeftError, match="there is no C\\+\\+ compiler"):
        loaded()


def no_library(contents):
    return b"text"


def of_another_interface(contents):
    """A library that refers to a class which this torch does not have."""
    assert b"4c10d7Backend" in contents
    return contents.replace(b"4c10d7Backend", b"4c10d7Bockend")


def with_types_of_its_own(contents):
    """A library that does not find the types which torch has registered in pybind11."""
    name = b"__pybind11_internals_v"
    assert name in contents
    return contents.replace(name, name.replace(b"v", b"w"))


@pytest.mark.parametrize("change", [no_library, of_another_interface, with_types_of_its_own])
def test_a_library_that_cannot_be_loaded_is_compiled(wheel, library, monkeypatch, caplog, change):
    own = brings(wheel, change(library.read_bytes()))
    (wheel.parent / "library").write_bytes(library.read_bytes())
    script = wheel.parent / "c++"
    script.write_text(COMPILER.replace("{folder}", str(wheel.parent)))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wheel.parent}:/usr/bin:/bin")
    assert Path(loaded().__file__).parent == wheel.parent / "cache/torch"
    assert f"{own} does not serve torch {torch.__version__}: " in caplog.text


def test_one_of_the_wheel_that_was_cut_off_is_not_loaded(wheel, library):
    own = brings(wheel, library.read_bytes())
    os.truncate(own, own.stat().st_size // 3)
    with pytest.raises(weft.WeftError, match="there is no C\\+\\+ compiler"):
        loaded()


@pytest.mark.parametrize(
    ("versions", "brought"),
    [([], "none"), (["2.10.0", "2.9.1+cpu"], "those for torch 2.9, 2.10")],
)
def test_the_error_says_what_would_do(wheel, versions, brought):
    for version in versions:
        brings(wheel, b"", version, wheel)
    brings(wheel, b"", "2.11.0", wheel, "cpython-39-x86_64-linux-gnu")
    with pytest.raises(weft.WeftError) as raised:
        loaded()
    assert str(raised.value) == (
        f"weft has no backend for torch {torch.__version__} with this Python (it brings {brought}), "
        "and compiling one failed: there is no C++ compiler. Install a compiler for C++20, such as "
        "g++, or set CXX to one, or install a wheel of weft that brings one for this torch"
    )


def test_the_error_has_the_words_of_the_compiler(wheel, monkeypatch):
    script = wheel.parent / "own"
    script.write_text("#!/bin/sh\necho a fatal error >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(weft.WeftError, match=r"compiling one failed: a fatal error\. Install"):
        loaded()


def one_without_compiler(_):
    with tempfile.TemporaryDirectory() as folder:
        if (rank := int(os.environ["RANK"])) == 1:
            os.environ.update(WEFT_CACHE=folder, CXX=f"{folder}/none")
        why = r"compiling one failed: .*No such file or directory"
        kind = weft.WeftError if rank == 1 else weft.PeerLost
        with pytest.raises(kind, match=why) as raised, group():
            pass
        assert type(raised.value) is kind
        assert not dist.is_initialized()


def test_all_ranks_learn_that_one_has_no_backend():
    on_ranks(one_without_compiler, 2, context=contextlib.nullcontext)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="it compiles")
def test_a_process_with_one_that_was_cut_off_starts(tmp_path):
    own = compiled._compiled()
    copy = tmp_path / "torch" / own.name
    copy.parent.mkdir()
    shutil.copy(own, copy)
    os.truncate(copy, own.stat().st_size // 3)
    code = "from weft.process_group import compiled; assert compiled.backend()"
    environment = os.environ | {"WEFT_CACHE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=500)
    [library] = copy.parent.glob("*.so")
    assert library.stat().st_size > own.stat().st_size // 2
