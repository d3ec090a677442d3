"""Nothing is believed that another user may have written."""

from __future__ import annotations

import json
import os
import tempfile

import pytest

from weft import cache, trust

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
ANOTHER = 65534


def is_a_number(value):
    return value + 1


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "cache"
    trust.make(made)
    return made


def test_a_folder_of_this_user(folder):
    assert trust.rejection(folder) == ""
    assert trust.rejection(folder / "a" / "b") == "", "which does not exist yet"
    assert trust.rejection(cache.Path("/dev/null")) == "", "nothing can be in it"
    link = folder.parent / "link"
    link.symlink_to("cache")
    assert trust.rejection(link / "torch") == ""
    link.unlink()
    link.symlink_to("link")
    assert trust.rejection(link) == "", "it leads nowhere"
    link.unlink()
    link.symlink_to(folder / "new")
    folder.chmod(0o1777)
    for new in folder / "new", link:
        assert trust.rejection(new) == "", "nobody else can replace it once it is there"


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757])
def test_a_folder_that_others_write_to(folder, mode):
    folder.chmod(mode)
    assert trust.rejection(folder) == f"others than its owner may write to {folder}"
    inner = folder / "inner"
    inner.mkdir()
    # of a sticky folder others cannot replace what is this user's
    assert (trust.rejection(inner) == "") == (mode == 0o1777)
    link = folder.parent / "link"
    link.symlink_to(inner if mode == 0o1777 else folder)
    assert (trust.rejection(link) == "") == (mode == 0o1777)


def test_folders_of_a_group(folder, monkeypatch):
    folder.chmod(0o775)
    for name, members, refused in (
        ("root", [], False),
        ("root", ["someone"], True),
        ("staff", [], True),
    ):
        monkeypatch.setattr(
            trust.grp, "getgrgid", lambda number, found=(name, "x", 0, members): found
        )
        assert bool(trust.rejection(folder)) == refused, name


@needs_root
def test_a_folder_of_another_user(folder):
    for path in (folder, folder / "inner"):
        os.chown(folder, ANOTHER, -1)
        assert trust.rejection(path).startswith(f"{folder} belongs to user ")
    os.chown(folder, 0, -1)
    link = folder.parent / "link"
    link.symlink_to(folder)
    os.chown(link, ANOTHER, -1, follow_symlinks=False)
    assert trust.rejection(link).startswith(f"{link} belongs to user ")


def test_new_folders_are_this_users_alone(tmp_path):
    before = os.umask(0)
    try:
        trust.make(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert trust.rejection(tmp_path / "a" / "b") == ""
    (tmp_path / "a").chmod(0o777)
    with pytest.raises(PermissionError, match="others than its owner may write"):
        trust.make(tmp_path / "a" / "c")


def test_another_folder_serves_in_place_of_one_that_others_write_to(
    tmp_path, folder, monkeypatch, caplog
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("WEFT_CACHE", str(folder))
    folder.chmod(0o1777)
    (folder / "a.json").write_text("7")
    own = tmp_path / f"weft-{os.getuid()}"
    for value in (1, 2):
        assert cache.once("a", lambda value=value: value, is_a_number) == 1
    assert json.loads((own / "a.json").read_text()) == 1
    [record] = caplog.records
    assert f"{folder} is no safe cache directory (others than" in record.getMessage()
    assert f"{own} is used; set WEFT_CACHE to a folder of yours" in record.getMessage()


@needs_root
def test_nothing_is_stored_without_a_safe_folder(tmp_path, folder, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("WEFT_CACHE", str(folder))
    folder.chmod(0o777)
    taken = tmp_path / f"weft-{os.getuid()}"
    taken.mkdir()
    os.chown(taken, ANOTHER, -1)
    assert cache.directory() is None
    assert cache.once("a", lambda: 3, is_a_number) == 3
    assert "nothing is stored" in caplog.text


@pytest.mark.parametrize("kind", ["mode", pytest.param("owner", marks=needs_root), "link"])
def test_a_value_that_another_user_may_have_written_is_replaced(folder, monkeypatch, kind):
    monkeypatch.setenv("WEFT_CACHE", str(folder))
    file = folder / "a.json"
    file.write_text("7")
    assert cache.stored("a", is_a_number) == 7
    if kind == "mode":
        file.chmod(0o666)
    elif kind == "owner":
        os.chown(file, ANOTHER, -1)
    else:
        file.rename(folder / "elsewhere")
        file.symlink_to("elsewhere")
    assert cache.stored("a", is_a_number) is None
    assert cache.once("a", lambda: 5, is_a_number) == 5
    assert cache.stored("a", is_a_number) == 5
