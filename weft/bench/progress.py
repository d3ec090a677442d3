"""A progress bar on a terminal, and nothing in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress(what: str, steps: int, *, shown: bool = True) -> Iterator[Callable[[], None]]:
    """A bar on stderr that the yielded function moves on by one step, if `shown` and stderr is a
    terminal.

    It is drawn within that function and not by a thread, which would disturb what is measured.
    """
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield lambda: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task, drawn = bar.add_task(what, total=steps), 0.0

        def advance() -> None:
            nonlocal drawn
            bar.advance(task)
            if monotonic() - drawn > 0.1:
                drawn = monotonic()
                bar.refresh()

        yield advance
