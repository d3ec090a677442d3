"""The run of a benchmark by its command: checks of the settings of several, the start of the ranks,
and the output of the result. Imports torch only when a benchmark runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import typer
from rich.console import Console

from weft.cli import options
from weft.cli.options import reject
from weft.measure.launched import on_ranks
from weft_tools.bench.benchmarks import shown
from weft_tools.bench.systems import SYSTEMS

Settings = TypeVar("Settings")


def check_baselines(settings: Any, possible: Sequence[str]) -> None:
    """Refuse baselines that are not `possible`, and any on an emulated link."""
    for name in settings.baselines:
        if name not in possible:
            names = ", ".join(("none", *possible))
            reject("--baseline", f"there is no baseline {name!r} on this device: use {names}")
        if getattr(settings, "link_gbps", None):
            why = f"{name} does not pass the emulated link, so the times cannot be compared"
            reject("--baseline", f"{why}: use --baseline none")


def placed(settings: Settings) -> Settings:
    """The settings for the device and the engine that they ask for, which exist; ranks that share a
    GPU, and calls that a graph replays, have no baseline unless asked for one.
    """
    on: Any = settings
    options.check_place(on)
    if on.device == "cpu":
        return settings
    import torch

    _, ranks = options.world_size(on.ranks)
    graph = getattr(on, "graph", False)
    if not hasattr(on, "baseline") or (ranks <= torch.cuda.device_count() and not graph):
        return settings
    if on.baseline and on.baselines and graph:
        reject("--baseline", "weft's calls alone are captured in graphs: omit one of them")
    if on.baseline and any(SYSTEMS[name].backend == "nccl" for name in on.baselines):
        reject("--baseline", "nccl needs a GPU for each rank: use --baseline none, or fewer ranks")
    found: Settings = replace(on, baseline=on.baseline or "none")
    return found


def sharing_one_gpu(settings: Any) -> bool:
    """Whether the ranks to start would share the only GPU here: as processes they would take turns
    on it, so they are threads. Options that need processes are then rejected.
    """
    if settings.device == "cpu":
        return False
    import torch

    rank, ranks = options.world_size(settings.ranks)
    together = rank is None and ranks > torch.cuda.device_count() == 1
    for option, given in (
        ("--neighbours", settings.neighbours is not None),
        ("--baseline", getattr(settings, "baselines", ())),
        ("--trace", getattr(settings, "trace", None)),
        ("--timeline", getattr(settings, "timeline", None)),
    ):
        if together and given:
            processes = "omit it, or start processes by torchrun"
            reject(option, f"ranks that share a GPU are threads of one process: {processes}")
    return together


def announce(text: str) -> None:
    """Print a line on stderr, of several ranks of a launcher once."""
    if not options.world_size(None)[0]:
        typer.echo(text, err=True)


def run_benchmark(
    settings: Any,
    measure: Callable[[Any], Any],
    to_json: Callable[[Any], dict[str, Any]] = lambda result: result,
    *,
    more: Callable[[Any], None] = lambda result: None,
    alone: str = "",
    together: bool = False,
    in_process: bool = False,
) -> None:
    """Run a benchmark with settings of `weft_tools.bench.settings`, and output the result as
    tables, file and picture.

    It runs on ranks started here, or on the ranks of a launcher, of which this process is one; or
    on ranks that are threads of this process, `together`; or `in_process`, by one call. `alone`:
    the reason to reject a single rank. `more` writes further files. Errors and wrong results end
    with exit status 1.
    """
    if together:
        from weft_tools.bench.threads import in_threads

        measure, in_process = partial(in_threads, measure), True
    rank, ranks = (0, settings.ranks or 2) if in_process else options.world_size(settings.ranks)
    if ranks < 2 and alone:
        reject("--ranks", alone)
    options.check_files(
        settings.json_file,
        getattr(settings, "trace", None),
        settings.plot,
        getattr(settings, "timeline", None),
    )
    threads = 1 if in_process else options.threads_for(settings.threads, ranks)
    settings = replace(settings, ranks=ranks, threads=threads)
    with options.failing("weft bench", settings.json_file):
        if rank is None and sys.stderr.isatty():  # the ranks' progress bar comes seconds later
            sys.stderr.write(f"starting {ranks} ranks\r")
            sys.stderr.flush()
        found = (
            measure(settings)
            if rank is not None
            else on_ranks(measure, ranks, settings, threads=threads)
        )
    result = to_json(found)
    if not rank:
        kind = shown(result)
        kind.print(result, Console(stderr=settings.json_file == "-"))
        more(found)
        options.write_json(result, settings.json_file)
        if settings.plot:
            kind.draw(result, settings.plot)
    if not result["verified"]:
        raise typer.Exit(1)
