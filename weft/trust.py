"""Folders and files that nobody but this user and root can have written, so that what is stored in
them may be believed, and run.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

_LINKS = 40  # in a path, as of Linux


def rejection(folder: Path) -> str:
    """Why others may write what is in a folder, or put another in its place; "" if they cannot. Of
    a folder that does not exist yet, those above it count.

    A folder above may be everyone's if it is sticky, as /tmp, where only the owner of an entry
    replaces it.
    """
    for step, found, last in _steps(folder):
        if found.st_uid not in (os.getuid(), 0):
            return f"{step} belongs to {_user(found.st_uid)}"
        sticky = found.st_mode & stat.S_ISVTX and not last
        if stat.S_ISDIR(found.st_mode) and not sticky and _others_write(found):
            return f"others than its owner may write to {step}"
    return ""


def check_file(file: Path) -> None:
    """Raise `PermissionError` if others may write a file; its folder is judged by `rejection`."""
    found = file.lstat()
    if (
        not stat.S_ISREG(found.st_mode)
        or found.st_uid not in (os.getuid(), 0)
        or _others_write(found)
    ):
        raise PermissionError(f"{file} may have been written by another user")


def make(folder: Path) -> None:
    """Make a folder, and those above it that are missing, which others cannot write to. Raises
    `PermissionError` if another user was first.
    """
    for each in reversed((folder, *folder.parents)):
        if not each.exists():
            try:
                each.mkdir(0o755)
            except FileExistsError:  # another process was first
                continue
            each.chmod(0o755)  # whatever the umask
    if why := rejection(folder):
        raise PermissionError(why)
    folder.mkdir(exist_ok=True)  # raises unless it is a folder


def _steps(folder: Path) -> Iterator[tuple[str, os.stat_result, bool]]:
    """Every folder, and every link, by which a path leads to a folder, as far as they exist, and
    whether it is that folder.
    """
    at, ahead, links = "/", [*Path(os.path.abspath(folder)).parts[1:]], 0
    yield at, os.lstat(at), not ahead
    while ahead:
        name = ahead.pop(0)
        if name == "..":  # of a link
            at = os.path.dirname(at)
            continue
        step = os.path.join(at, name)
        try:
            found = os.lstat(step)
        except OSError:
            return
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > _LINKS:
                return
            yield step, found, False
            target = os.readlink(step)
            at = "/" if os.path.isabs(target) else at
            ahead = [part for part in Path(target).parts if part != "/"] + ahead
        elif stat.S_ISDIR(found.st_mode):
            yield step, found, not ahead
            at = step
        else:  # nothing can be in it
            return


def _others_write(found: os.stat_result) -> bool:
    """Whether others than the owner may write; a group of the owner alone has no others."""
    by_group = bool(found.st_mode & stat.S_IWGRP) and not _own_group(found.st_gid)
    return by_group or bool(found.st_mode & stat.S_IWOTH)


def _own_group(number: int) -> bool:
    """Whether a group has no members but this user, as where each user has one, and root."""
    try:
        name, _, _, members = grp.getgrgid(number)
        own = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
    return name in (own, "root") and {own, "root"}.issuperset(members)


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"
