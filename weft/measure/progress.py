"""The progress bar of a measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic


@contextmanager
def progress(task: str, steps: int, *, shown: bool = True) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, if `shown` and stderr is a terminal; the yielded function advances
    it by one step.

    That function draws it, since a thread would disturb the measurement.
    """
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
    if not (shown and console.is_terminal):
        yield lambda: None
        return
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        number, drawn = bar.add_task(task, total=steps), 0.0

        def advance() -> None:
            nonlocal drawn
            bar.advance(number)
            if monotonic() - drawn > 0.1:
                drawn = monotonic()
                bar.refresh()

        yield advance
