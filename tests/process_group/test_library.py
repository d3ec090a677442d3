"""The compiled library of the backend: compiled once, and loaded only as it was compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from weft import trust
from weft.process_group import compiled

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
    assert trust.refusal(library.parent) == ""


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
    assert Path(copy).read_bytes() == own.read_bytes() or len([*copy.parent.glob("*.so")]) == 1
