"""What the commands of ``weft bench`` share: common options, what they may not be, who measures, and where results go.

Loads torch only once a benchmark runs.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_type_hints

import typer
from rich.console import Console

Result = TypeVar("Result")
Settings = TypeVar("Settings")

Dtype = Literal["float16", "bfloat16", "float32", "float64"]
Fused = Literal["all-gather-matmul", "matmul-reduce-scatter", "matmul-all-reduce"]


OnDevice = Annotated[Literal["cpu", "cuda"], typer.Option(help="cpu: ranks are processes; cuda: ranks share this process's GPU.")]
Warmup = Annotated[int, typer.Option(min=0, help="Rounds before the measured ones.")]
Iterations = Annotated[int, typer.Option(min=1, help="Rounds measured.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the random data.")]
Gbps = Annotated[
    str | None, typer.Option(metavar="GBPS|auto", help="Emulate a slower link; auto: communicate takes as long as compute.")
]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="Write the result as JSON; -: stdout.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png|svg", help="Draw the result.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Compute threads per rank; by default the cores are shared out.")]


def taking(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose first argument is a dataclass has the dataclass' fields as options, behind those of its own."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command).parameters.values()
        shared = inspect.signature(kind).parameters.values()
        hints = get_type_hints(command, include_extras=True) | get_type_hints(kind, include_extras=True)

        def taken(**given: Any) -> None:
            command(kind(**{each.name: given.pop(each.name) for each in shared}), **given)

        parameters = [each.replace(kind=each.KEYWORD_ONLY, annotation=hints[each.name]) for each in (*own, *shared)]
        taken.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        taken.__annotations__ = {each.name: each.annotation for each in parameters}
        taken.__name__, taken.__doc__ = command.__name__, command.__doc__
        return taken

    return decorate


def settings(kind: type[Settings], given: Any, **more: Any) -> Settings:
    """The settings of a benchmark: what options of the same name say, and `more`."""
    named = {field.name: getattr(given, field.name) for field in fields(kind) if hasattr(given, field.name)}  # type: ignore[arg-type]
    return kind(**named | more)


def refuse(option: str, why: str) -> NoReturn:
    """End with exit status 2 because of what was given for `option`."""
    raise typer.BadParameter(why, param_hint=option)


def load_machine(name: str) -> Any:
    """The profile of this name, or without one that of this machine; ends with exit status 2 if there is none."""
    from weft.predict import machine

    try:
        found = machine.load(name) if name else machine.here()
    except ValueError as error:
        refuse("--machine", str(error))
    if not name and found.name != machine.THIS:
        unknown = f"This machine is not calibrated, so the profile {found.name} is taken; weft calibrate measures this one."
        typer.echo(unknown, err=True)
    return found


def need_gpu() -> None:
    """End with exit status 2 where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        refuse("--device", "torch finds no GPU here: leave it out, or use --device cpu")


def parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """Positive numbers from ``4,8,16``."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        refuse(option, f"expected positive numbers such as 4,8,16; got {text!r}")
    return tuple(int(part) for part in parts)


def world_size(ranks: int | None) -> tuple[int | None, int]:
    """This process's rank among those that a launcher started, None without a launcher; and the number of ranks."""
    from weft.world.rendezvous import launcher_variables

    variables = launcher_variables(os.environ)
    if variables is None:
        return None, ranks or 2
    size = int(variables["WORLD_SIZE"])
    if ranks not in (None, size):
        refuse("--ranks", f"a launcher has started {size} rank(s) already: leave --ranks out, or run weft bench by itself")
    return int(variables["RANK"]), size


def threads_for(given: int | None, ranks: int) -> int:
    """Compute threads per rank: as given, or this host's cores shared out among its ranks, all of `ranks` without a launcher."""
    from weft.world.launcher import threads_per_rank
    from weft.world.rendezvous import launcher_variables

    return given or threads_per_rank(int((launcher_variables(os.environ) or {}).get("LOCAL_WORLD_SIZE", ranks)))


def parse_shape(text: str) -> tuple[int, int, int]:
    """``MxKxN``."""
    sizes = text.lower().split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
        refuse("--shape", f"expected three positive numbers MxKxN such as 2048x2048x1024; got {text!r}")
    m, k, n = map(int, sizes)
    return m, k, n


def parse_sizes(text: str, option: str) -> list[int]:
    """Bytes from ``4K:64M:4`` and the like."""
    from weft.bench import sweep

    try:
        return sweep.parse_sizes(text)
    except ValueError as error:
        refuse(option, str(error))


def parse_gbps(text: str | None) -> float | str | None:
    """The bandwidth of an emulated link in 1e9 bits per second, ``"auto"``, or None without one."""
    if text in (None, "auto"):
        return text
    try:
        gbps = float(text)
    except ValueError:
        gbps = 0.0
    if not 0 < gbps < float("inf"):
        refuse("--link-gbps", f"expected a positive number of Gbit/s, or auto; got {text!r}")
    return gbps


def check_files(json_file: str | None, trace: Path | None, *pictures: Path | None) -> None:
    """Refuse files that could not be written, before anything is measured."""
    for picture in filter(None, pictures):
        if picture.suffix.lower() not in (".png", ".svg"):
            refuse("--plot / --timeline", f"pictures are .png or .svg files; got {picture}")
    for file in (json_file if json_file != "-" else None, trace, *pictures):
        if file and not Path(file).absolute().parent.is_dir():
            refuse("--json / --plot / --trace / --timeline", f"there is no directory for {file}; make it first")


def run(measure: Callable[..., Result], rank: int | None, ranks: int, *arguments: Any, threads: int) -> Result:
    """What `measure` finds on rank 0 of ranks started for it, or as the rank that a launcher made this.

    A failure, or something that these ranks cannot do, ends with exit status 1.
    """
    from weft.world.launcher import launch

    try:
        return measure(*arguments) if rank is not None else launch(measure, ranks, *arguments, threads=threads)[0]
    except (RuntimeError, ValueError) as error:
        typer.echo(f"weft bench: {error}", err=True)
        raise typer.Exit(1) from None


def write_json(result: dict[str, Any], file: str | None) -> None:
    """Write a result to where ``--json`` says."""
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    if file == "-":
        sys.stdout.write(text)
    elif file:
        Path(file).write_text(text)


def hand_over(
    measure: Callable[[Any], dict[str, Any]],
    settings: Any,
    joined: int | None,
    ranks: int,
    tell: Callable[[dict[str, Any], Console], None],
    draw: Callable[[dict[str, Any], Path], None],
    json_file: str | None,
    plot: Path | None,
) -> None:
    """Measure, and hand over a result that is a JSON object: as tables, file and picture. Wrong results end with status 1."""
    result = run(measure, joined, ranks, settings, threads=settings.threads)
    if not joined:
        tell(result, Console(stderr=json_file == "-"))
        write_json(result, json_file)
        if plot:
            draw(result, plot)
    if not result["verified"]:
        raise typer.Exit(1)
