"""Functions that commands of the tools share: the machine of predictions, and pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import typer

from weft.cli.options import rejecting
from weft.measure.progress import progress
from weft.plan.trace import Trace, to_perfetto
from weft_tools.predict import machine

Case = TypeVar("Case")


def load_machine(name: str) -> Any:
    """The profile of this name, or without a name this machine's; ends with exit status 2 if there
    is none.
    """
    with rejecting("--machine"):
        found = machine.load(name) if name else machine.here()
    if not name and found.name != machine.THIS:
        text = (
            f"This machine is not calibrated, so the profile {found.name} is taken; weft calibrate "
            "measures this machine."
        )
        typer.echo(text, err=True)
    return found


def tracked(task: str, cases: Sequence[Case]) -> Iterator[Case]:
    """The cases one by one, with a progress bar."""
    with progress(task, len(cases)) as advance:
        for case in cases:
            yield case
            advance()


def write_traces(settings: Any, traces: Sequence[Trace], title: str, about: str) -> None:
    """Write traces to the files of ``--trace`` and ``--timeline``; `about` is a line on the run."""
    if settings.trace:
        settings.trace.write_text(json.dumps(to_perfetto(*traces, about=about)))
    if settings.timeline:
        from weft_tools.bench.pictures import timeline

        timeline.draw(traces, settings.timeline, title, about)
