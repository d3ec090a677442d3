"""The progress bar of a measurement."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol


class Advance(Protocol):
    """Advance a progress bar by one step; a `task`, which begins now, is shown at once."""

    def __call__(self, task: str = ...) -> None: ...


def unseen(task: str = "") -> None:
    """The `Advance` of no bar."""


@contextmanager
def progress(task: str, steps: int, *, shown: bool = True) -> Iterator[Advance]:
    """A progress bar on stderr, if `shown`; the yielded function advances it. If stderr is no
    terminal, a line announces each kind of task, by its first word, when it begins.

    That function draws it, since a thread would disturb the measurement.
    """
    if not shown:
        yield unseen
        return
    # of the extra cli, which the library does not need
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(task)
        return
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        number = bar.add_task(task, total=steps)
        drawn = 0.0
        latest = task

        def advance(task: str = "") -> None:
            nonlocal drawn, latest
            begins = task not in ("", latest)
            latest = task or latest
            bar.update(number, advance=1, description=latest)
            if begins or monotonic() - drawn > 0.1:
                drawn = monotonic()
                bar.refresh()

        yield advance


def _lines(task: str) -> Advance:
    """Tell of the task, and of each that follows, once it begins."""
    kind = ""

    def advance(task: str = "") -> None:
        nonlocal kind
        began = task.partition(" ")[0].rstrip(":")
        if began not in ("", kind):
            kind = began
            sys.stderr.write(f"{kind} ...\n")
            sys.stderr.flush()

    advance(task)
    return advance
