"""The cache directory: its path, the validation of its files, and concurrent measurements."""

from __future__ import annotations

import errno
import json
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch

from weft import cache
from weft.kernels import fastest
from weft.ops import stored
from weft.schedules.workload import Variant, Workload
from weft_tools.predict import machine

NOT_AS_EXPECTED = (
    "[]",
    "{",
    "",
    "null",
    "3",
    '"plain"',
    '{"plain": 1}',
    '{"plain": {"1": "abacus"}, "links": [1]}',
    '{"a": ["direct", 0, "peer"]}',
)


def is_a_number(value):
    return value + 1


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_path_of_the_directory(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(cache.directory()).endswith("/cache"), "the requested directory comes first"
    monkeypatch.delenv("WEFT_CACHE")
    assert str(cache.directory()) == "/x/weft"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/y")
    assert str(cache.directory()) == "/y/.cache/weft"


def test_processors_are_told_apart():
    x86 = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nflags\t\t: fpu"
    assert cache._named(f"{x86}\n\n{x86.replace('17', '1')}") == "AMD EPYC:25:17"
    neoverse = "processor\t: 0\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\n"
    parts = [cache._named(f"{neoverse}CPU part\t: {part}\n") for part in ("0xd0c", "0xd40")]
    assert parts == ["0x41:0x3:0xd0c", "0x41:0x3:0xd40"]
    assert cache._named("processor\t: 0\nisa\t: rv64\n") == platform.machine()


def test_without_a_home_directory(monkeypatch):
    """As in a container with an unknown user id: measurements are repeated in each process."""

    def unknown():
        raise RuntimeError("Could not determine home directory.")

    assert cache.directory() is not None
    monkeypatch.setattr(Path, "home", unknown)
    assert cache.directory() is not None, "the requested directory needs no home"
    for name in ("XDG_CACHE_HOME", "WEFT_CACHE"):
        monkeypatch.delenv(name, raising=False)
    assert cache.directory() is None
    assert cache.stored("a", is_a_number) is None
    assert cache.once("a", lambda: 5, is_a_number) == 5
    with pytest.raises(OSError, match="no home directory to store measurements in: set WEFT_CACHE"):
        cache.store("a", 5)


@pytest.mark.parametrize("text", NOT_AS_EXPECTED)
def test_malformed_files_are_ignored(text, directory, monkeypatch):
    monkeypatch.setattr(
        fastest,
        "_measure",
        lambda *_: {
            layout: {
                size: {str(rows): "mm" for rows in cases} for size, cases in fastest.CASES.items()
            }
            for layout in fastest.LAYOUTS
        },
    )
    workload = Workload("all_gather_matmul", (8, 8), 4, 4, "float32", "float32")
    name = stored.key(workload, "1 thread")
    measured = stored.Measured(Variant("direct", 8, "peer"), 2.5)

    def tables():
        fastest._table.__wrapped__(torch.float32, torch.float32, 1)
        stored.remember(name, measured)
        machine.remember({"products": {}})

    tables()
    files = [*directory.iterdir()]
    assert sorted(file.name.split("-")[0] for file in files) == ["fastest", "machine", "variants"]
    for file in files:
        file.write_text(text)
    stored._entries.cache_clear()
    assert (
        fastest._table.__wrapped__(torch.float32, torch.float32, 1)["columns"]["large"]["512"]
        == "mm"
    )
    assert stored.find(name) is None
    assert machine.calibrated() is None
    tables()
    assert stored.find(name) == measured
    assert all(json.loads(file.read_text()) for file in files), (
        "a valid file replaces the malformed one"
    )


def test_another_version_measures_again(monkeypatch):
    mine = cache.of_this_machine("a")
    monkeypatch.setattr(cache, "__version__", "0.0.1")
    assert cache.of_this_machine("a") != mine


@pytest.mark.parametrize("links", [True, False], ids=["with links", "without links"])
@pytest.mark.parametrize("before", [None, "[]"], ids=["none before", "one that does not fit"])
def test_one_of_several_concurrent_measurements_is_kept(links, before, directory, monkeypatch):
    def refused(*_):
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", refused)
    if before:
        directory.mkdir()
        (directory / "a.json").write_text(before)
    measuring = Barrier(8)

    def found(number):
        def measure():
            measuring.wait(20)
            return number

        return cache.once("a", measure, is_a_number)

    with ThreadPoolExecutor(8) as threads:
        (winner,) = set(threads.map(found, range(8)))
    assert cache.stored("a", is_a_number) == winner
    assert [file.name for file in directory.iterdir()] == ["a.json"]


@pytest.mark.parametrize("fails", ["flush", "replace"])
def test_a_full_disk_leaves_no_file_behind(directory, monkeypatch, fails):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    if fails == "replace":
        monkeypatch.setattr(os, "replace", full)
    else:
        monkeypatch.setattr(json, "dump", full)
    with pytest.raises(OSError, match="No space left"):
        cache.store("x", {"a": 1})
    assert not [*directory.iterdir()]
    if fails == "flush":
        assert cache.once("x", lambda: 7, lambda value: True) == 7
        assert not [*directory.iterdir()]
