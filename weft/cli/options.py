"""Functions that commands share: options from dataclasses, checks of options, and output of
results. Imports torch only if a command needs it.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_origin, get_type_hints

import typer
from rich.console import Console

import weft.cache as cache
from weft.cli import conditions
from weft.cli.common import ENGINES
from weft.schedules.operators import PLANNERS

Settings = TypeVar("Settings")

SINGLE_RANK = "a single rank has no peer to exchange anything with: use 2 or more"


def plain(message: str, cause: BaseException | None) -> str:
    """A message of the library that converts options, in the words of weft's own, with the value
    that was given; other messages as they are.
    """
    for words, ours in (
        (r"Input should be a valid integer.*", "expected an integer"),
        (r"Input should be a valid number.*", "expected a number"),
        (r"Input should be greater than or equal to (\S+)", r"expected at least \1"),
        (r"Input should be less than or equal to (\S+)", r"expected at most \1"),
        (r"Input should be greater than (\S+)", r"expected more than \1"),
    ):
        if re.fullmatch(words, message):
            given = [each["input"] for each in getattr(cause, "errors", list)()]
            return re.sub(words, ours, message) + (f"; got {given[0]}" if given else "")
    return message.removeprefix("Value error, ")


def command_from(kind: type[Settings], run: Callable[[Settings], None]) -> Callable[..., None]:
    """A command that calls `run` with a `kind`, a dataclass whose annotated fields are the options
    of the command and whose docstring is its help.
    """
    hints = get_type_hints(kind, include_extras=True)
    fields = [
        field
        for field in inspect.signature(kind).parameters.values()
        if get_origin(hints[field.name]) is Annotated
    ]

    def command(context: typer.Context, **values: Any) -> None:
        settings = kind(**values)
        _reject_ignored(settings, [name for name in values if _given(context, name)])
        run(settings)

    parameters = [
        inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    ]
    parameters += [
        field.replace(kind=field.KEYWORD_ONLY, annotation=_annotation(hints[field.name]))
        for field in fields
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {field.name: field.annotation for field in parameters}
    command.__name__ = run.__name__
    command.__doc__ = kind.__doc__
    return command


def _annotation(hint: Any) -> Any:
    """The annotation of an option; words in a field's annotation are its only values."""
    option, *more = hint.__metadata__
    words = next((each for each in more if type(each) is tuple), None)
    return Annotated[Literal[words] if words else hint.__origin__, option]


def _given(context: typer.Context, name: str) -> bool:
    """Whether the user has given a parameter, be it with its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _reject_ignored(settings: Any, given: Sequence[str]) -> None:
    """Refuse the first of the `given` options that has no effect on these settings."""
    if getattr(settings, "ranks", 0) is None:
        settings = replace(settings, ranks=world_size(None)[1])
    for name, why in conditions.ignored(settings, given):
        reject(conditions.option(type(settings), name), why)


def reject(option: str, why: str) -> NoReturn:
    """End with exit status 2 because of the value of `option`."""
    raise typer.BadParameter(why, param_hint=option)


@contextmanager
def rejecting(option: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Refuse the value of `option` if the ``with`` block raises an error of this kind, for the
    reason that it states.
    """
    try:
        yield
    except kind as error:
        reject(option, str(error))


def check_place(settings: Any) -> None:
    """Refuse an engine that the device does not have, and a GPU that is not there."""
    engine = settings.place["engine"]
    if engine not in ENGINES[settings.device]:
        names = " or ".join(ENGINES[settings.device])
        reject("--engine", f"{engine} is none of --device {settings.device}: use {names}")
    if settings.device == "cuda":
        need_gpu("--device cuda")


def algorithms(context: typer.Context) -> list[str]:
    """The algorithms of the operator among a command's words, for shell completion."""
    named = (PLANNERS.get(word.replace("-", "_")) for word in context.args)
    return [name for planner in named if planner for name in planner.algorithms]


def need_gpu(option: str) -> None:
    """End with exit status 2 without a GPU; `option` has asked for one."""
    import torch

    if not torch.cuda.is_available():
        reject(option, "torch finds no GPU here: without this option, ranks compute on the CPU")


def world_size(ranks: int | None) -> tuple[int | None, int]:
    """This process's rank in a job that a launcher started, None without a launcher; and the number
    of ranks.
    """
    from weft.launchers.variables import launcher_variables

    variables = launcher_variables(os.environ)
    if variables is None:
        return None, ranks or 2
    size = int(variables["WORLD_SIZE"])
    if ranks not in (None, size):
        reject(
            "--ranks",
            f"a launcher has already started {size} rank(s): omit --ranks, or run weft without the "
            "launcher",
        )
    return int(variables["RANK"]), size


def threads_for(threads: int | None, ranks: int) -> int:
    """Compute threads per rank: `threads`, or this host's cores divided among its ranks, which are
    all `ranks` without a launcher.
    """
    from weft.host.placement import threads_per_rank
    from weft.launchers.variables import launcher_variables

    return threads or threads_per_rank(
        int((launcher_variables(os.environ) or {}).get("LOCAL_WORLD_SIZE", ranks))
    )


def check_files(json_file: str | None, trace: Path | None, *pictures: Path | None) -> None:
    """Refuse files that cannot be written, before anything is measured."""
    for picture in filter(None, pictures):
        if picture.suffix.lower() not in (".png", ".svg"):
            reject("--plot / --timeline", f"pictures must be .png or .svg files; got {picture}")
    for file in (json_file if json_file != "-" else None, trace, *pictures):
        if file:
            check_writable(Path(file), "--json / --plot / --trace / --timeline")


def check_writable(file: Path, option: str) -> None:
    """Refuse the file of an option if it cannot be written; an existing file is not changed."""
    new = not file.exists()
    if not file.absolute().parent.is_dir():
        reject(option, f"the directory of {file} does not exist; make it first")
    try:
        file.open("ab").close()
    except OSError as error:
        reject(option, f"{file} cannot be written: {error.strerror}")
    if new:
        file.unlink(missing_ok=True)


def check_cache() -> None:
    """Refuse to measure if the cache directory cannot be written."""
    try:
        cache.check()
    except OSError as error:
        why = f"measurements cannot be stored in {cache.directory()}: {error.strerror}"
        reject("WEFT_CACHE", f"{why}; set this variable to a directory that can be written")


@contextmanager
def failing(command: str, json_file: str | None = None) -> Iterator[None]:
    """Print errors of the ``with`` block and end with exit status 1, or with 2 for a `ValueError`,
    which tells what a rank cannot do and what would do; of a signal that ends the process, print
    its name.

    If the JSON goes to stdout, all other output of this process and of started ranks, such as the
    messages of gloo on its connections in torch 2.9, goes to stderr.
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
            rejected = re.search(r"failed: ValueError: ([^\n]*)", str(error))
            text = rejected[1] if rejected else error
            typer.echo(f"{command}: {text}", err=True)
            raise typer.Exit(2 if rejected or isinstance(error, ValueError) else 1) from None
        except KeyboardInterrupt:
            _stopped(command, signal.SIGINT)
            raise typer.Exit(128 + signal.SIGINT) from None
        except SystemExit as stopped:  # of another signal that the launcher of ranks handles
            if isinstance(stopped.code, int) and stopped.code > 128:
                _stopped(command, signal.Signals(stopped.code - 128))
            raise


def _stopped(command: str, by: signal.Signals) -> None:
    """Say that a signal has stopped a command, whose progress bar hides the cursor."""
    Console(stderr=True).show_cursor()
    typer.echo(f"{command}: stopped by {by.name}", err=True)


def write_json(result: dict[str, Any], file: str | None) -> None:
    """Write a result to the file of ``--json``; ``-`` is stdout."""
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    if file == "-":
        sys.stdout.write(text)
    elif file:
        Path(file).write_text(text)
