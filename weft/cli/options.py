"""What commands share: options from dataclasses, what they may not be, who measures, and where
results go. Loads torch at need.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_origin, get_type_hints

import typer
from rich.console import Console

import weft.cache as cache
from weft.bench import repository
from weft.plan.trace import Trace
from weft.predict import machine

Given = TypeVar("Given")

ALONE = "a single rank has no peer to exchange anything with: use 2 or more"


def taking(kind: type[Given], command: Callable[[Given], None]) -> Callable[..., None]:
    """A command that takes as options the fields of a dataclass that say what option they are, and
    is called with one.

    Its help is what the dataclass says of itself.
    """
    hints = get_type_hints(kind, include_extras=True)
    every = [
        each
        for each in inspect.signature(kind).parameters.values()
        if get_origin(hints[each.name]) is Annotated
    ]

    def taken(**given: Any) -> None:
        command(kind(**given))

    parameters = [
        each.replace(kind=each.KEYWORD_ONLY, annotation=_annotation(hints[each.name]))
        for each in every
    ]
    taken.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    taken.__annotations__ = {each.name: each.annotation for each in parameters}
    taken.__name__, taken.__doc__ = command.__name__, kind.__doc__
    return taken


def _annotation(hint: Any) -> Any:
    """The annotation of an option; words that a field says are all that it may be."""
    option, *words = hint.__metadata__
    return Annotated[Literal[words[0]], option] if words else hint


def refuse(option: str, why: str) -> NoReturn:
    """End with exit status 2 because of what was given for `option`."""
    raise typer.BadParameter(why, param_hint=option)


@contextmanager
def refusing(option: str) -> Iterator[None]:
    """Refuse what was given for `option` if the ``with`` block finds it wrong, as it says in a
    `ValueError`.
    """
    try:
        yield
    except ValueError as error:
        refuse(option, str(error))


def load_machine(name: str) -> Any:
    """The profile of this name, or without one that of this machine; ends with exit status 2 if
    there is none.
    """
    with refusing("--machine"):
        found = machine.load(name) if name else machine.here()
    if not name and found.name != machine.THIS:
        unknown = f"This machine is not calibrated, so the profile {found.name} is taken; weft calibrate measures this one."
        typer.echo(unknown, err=True)
    return found


def from_repository(option: str, name: str) -> Any:
    """A module of the benchmarks that come with the repository; ends with exit status 2 if they are
    not there.
    """
    if not repository.there():
        refuse(option, f"this benchmark {repository.MISSING}")
    return repository.module(name)


def check_gloo(given: Any) -> None:
    """Refuse a baseline of a benchmark that only has gloo."""
    if given.baseline not in (None, "none", "gloo"):
        refuse("--baseline", f"there is no baseline {given.baseline!r}: use none or gloo")
    if given.baseline == "gloo" and given.link_gbps:
        unequal = "a baseline does not pass the emulated link, so they cannot be compared"
        refuse("--baseline", f"{unequal}: use --baseline none")


def need_gpu() -> None:
    """End with exit status 2 where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        refuse("--device", "torch finds no GPU here: leave it out, or use --device cpu")


def world_size(ranks: int | None) -> tuple[int | None, int]:
    """This process's rank among those that a launcher started, None without a launcher; and the
    number of ranks.
    """
    from weft.world.rendezvous import launcher_variables

    variables = launcher_variables(os.environ)
    if variables is None:
        return None, ranks or 2
    size = int(variables["WORLD_SIZE"])
    if ranks not in (None, size):
        refuse(
            "--ranks",
            f"a launcher has started {size} rank(s) already: leave --ranks out, or run weft bench "
            "by itself",
        )
    return int(variables["RANK"]), size


def threads_for(given: int | None, ranks: int) -> int:
    """Compute threads per rank: as given, or this host's cores shared out among its ranks, all of
    `ranks` without a launcher.
    """
    from weft.world.placement import threads_per_rank
    from weft.world.rendezvous import launcher_variables

    return given or threads_per_rank(
        int((launcher_variables(os.environ) or {}).get("LOCAL_WORLD_SIZE", ranks))
    )


def check_files(json_file: str | None, trace: Path | None, *pictures: Path | None) -> None:
    """Refuse files that could not be written, before anything is measured."""
    for picture in filter(None, pictures):
        if picture.suffix.lower() not in (".png", ".svg"):
            refuse("--plot / --timeline", f"pictures are .png or .svg files; got {picture}")
    for file in (json_file if json_file != "-" else None, trace, *pictures):
        if file:
            _check_writable(Path(file))


def _check_writable(file: Path) -> None:
    """Refuse a file that cannot be written; one that is there stays as it is."""
    option, new = "--json / --plot / --trace / --timeline", not file.exists()
    if not file.absolute().parent.is_dir():
        refuse(option, f"there is no directory for {file}; make it first")
    try:
        file.open("ab").close()
    except OSError as error:
        refuse(option, f"{file} cannot be written: {error.strerror}")
    if new:
        file.unlink(missing_ok=True)


def check_remembered() -> None:
    """Refuse to measure what could not be remembered."""
    try:
        cache.check()
    except OSError as error:
        why = f"nothing can be remembered in {cache.directory()}: {error.strerror}"
        refuse("WEFT_CACHE", f"{why}; let this variable name a directory that can be written")


@contextmanager
def failing(command: str, json_file: str | None = None) -> Iterator[None]:
    """End with exit status 1 for what fails, or cannot be done here, in the ``with`` block.

    Where the result goes to stdout nothing else does: what gloo says of its connections in torch
    2.9, here or in ranks that are started, goes to stderr.
    """
    with ExitStack() as stack:
        if json_file == "-":
            sys.stdout.flush()
            stack.callback(os.close, kept := os.dup(1))
            stack.callback(os.dup2, kept, 1)
            os.dup2(2, 1)
        try:
            yield
        except (RuntimeError, ValueError, OSError) as error:
            typer.echo(f"{command}: {error}", err=True)
            raise typer.Exit(1) from None


def write_json(result: dict[str, Any], file: str | None) -> None:
    """Write a result to where ``--json`` says."""
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    if file == "-":
        sys.stdout.write(text)
    elif file:
        Path(file).write_text(text)


def write_traces(given: Any, traces: Sequence[Trace], title: str) -> None:
    """Write traces to where ``--trace`` and ``--timeline`` say."""
    from weft.pictures.timeline import draw
    from weft.plan.trace import to_perfetto

    if given.trace:
        given.trace.write_text(json.dumps(to_perfetto(*traces)))
    if given.timeline:
        draw(traces, given.timeline, title)


def hand_over(
    given: Any,
    measure: Callable[[Any], Any],
    tell: Callable[[Any, Console], None],
    draw: Callable[[dict[str, Any], Path], None],
    to_json: Callable[[Any], dict[str, Any]] = lambda result: result,
    *,
    alone: str = "",
    here: bool = False,
) -> None:
    """Measure what settings of `weft.bench.settings` say, and hand over the result as tables, file
    and picture.

    Measures on ranks started for it, or as the rank that a launcher made this, or `here`, in this
    process. `alone`: why there must be two. A failure, something that these ranks cannot do, and
    wrong results end with exit status 1.
    """
    joined, ranks = (0, given.ranks or 2) if here else world_size(given.ranks)
    if ranks < 2 and alone:
        refuse("--ranks", alone)
    check_files(
        given.json_file, getattr(given, "trace", None), given.plot, getattr(given, "timeline", None)
    )
    threads = 1 if here else threads_for(given.threads, ranks)
    settings = replace(given, ranks=ranks, threads=threads)
    from weft.world.launcher import launch

    with failing("weft bench", given.json_file):
        found = (
            measure(settings)
            if joined is not None
            else launch(measure, ranks, settings, threads=threads)[0]
        )
    result = to_json(found)
    if not joined:
        tell(found, Console(stderr=given.json_file == "-"))
        write_json(result, given.json_file)
        if given.plot:
            draw(result, given.plot)
    if not result["verified"]:
        raise typer.Exit(1)
