"""``weft predict``: predicted times of operators on a machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from weft.cli import options
from weft.cli.common import FUSED, Dtype, EmulatedGbps, EmulatedLatency, Json, Plot, Trace
from weft.cli.conditions import Also, Unless
from weft.cli.options import reject
from weft.cli.values import (
    SHAPE,
    Shape,
    not_negative,
    of_sizes,
    option,
    parse_sizes,
    positive,
    product,
)
from weft.schedules.operators import OPERATORS
from weft.version import __version__
from weft_tools.cli import predictions, shared
from weft_tools.predict import COLLECTIVES, answers, candidates, copies, trace, workload
from weft_tools.predict import machine as profiles
from weft_tools.predict import overlap as concurrent

COLLECTIVE, COPY, OVERLAP = Also({"a collective"}), Also({"copy"}), Also({"overlap"})
SWEEP = Also({"--sweep"})
MOVING = Also({*COLLECTIVE, *COPY, *OVERLAP})
EVERY = Also({*MOVING, *SWEEP})
"""Modes, as `weft.cli.conditions` has them, in which some options have no effect."""


def _swept(settings: Question, name: str) -> str:
    swept = (settings.sweep or "").startswith(f"{name}=")
    return "the sweep sets it: omit it" if swept else ""


def _emulated(settings: Question) -> str:
    return (
        "--link-gbps emulates a link in its place: omit one of them" if settings.link_gbps else ""
    )


def _no_bytes(settings: Question) -> str:
    record = COLLECTIVES.get(settings.operator.replace("-", "_"))
    if settings.operator in ("copy", "overlap"):
        return ""
    if record is None:
        return f"{settings.operator} takes --shape in place of it"
    return "" if record.algorithms else f"{settings.operator} moves no bytes: omit it"


def _no_pieces(settings: Question) -> str:
    names = [settings.operator.replace("-", "_")] if settings.operator != "mlp" else [*OPERATORS]
    records = [OPERATORS[name] for name in names if name in OPERATORS]
    having = [each for each in records if settings.algorithm in each.algorithms]
    if all(settings.algorithm in each.uncut for each in having or records):
        return f"{settings.algorithm} does not cut shards into pieces: use another --algorithm"
    return ""


def _no_curve(settings: Question) -> str:
    return (
        "" if settings.sweep else "only a sweep is drawn as curves: add --sweep, or use --timeline"
    )


@dataclass(frozen=True)
class Question:
    """Predict the time of an operator by each algorithm, and its bottleneck; runs nothing.

    For example: would overlap help the MLP of a 70B model, with 8192 hidden and 28672 intermediate
    features, on 8 GPUs with links of 200 GB/s?

    weft predict mlp --machine h100-nvlink-8 --ranks 8 --shape 8192x8192x28672 --link 200
    """

    operator: Annotated[
        str,
        typer.Argument(
            help="mlp: both operators of a gated MLP, whose --shape is tokens x hidden x "
            "intermediate. copy: put and get. overlap: a product beside an all-gather that it does "
            "not need. Collectives and copy take --bytes in place of --shape, overlap takes both."
        ),
        (*FUSED, "mlp", *(name.replace("_", "-") for name in COLLECTIVES), "copy", "overlap"),
        EVERY,
    ]
    machine: Annotated[
        str,
        typer.Option(
            help=f"The machine: {', '.join(profiles.machines())}, or this, after weft calibrate. "
            "Default: this if it is calibrated, else cpu.",
            autocompletion=profiles.names,
        ),
        EVERY,
    ] = ""
    ranks: Annotated[
        int,
        typer.Option("--ranks", "-n", min=1, help="Number of ranks."),
        MOVING,
        SWEEP,
        Unless(partial(_swept, name="ranks")),
    ] = 2
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Compute threads per rank, if the profile has cores; default: all."
        ),
        EVERY,
    ] = None
    bytes: Annotated[
        str | None,
        of_sizes(
            "Of each rank in a collective, or of a copy; default 8:16M:8, and 64M for overlap."
        ),
        MOVING,
        Unless(_no_bytes),
    ] = None
    hosts: Annotated[
        int,
        typer.Option(min=1, help="Number of hosts, each with the same number of ranks."),
        COLLECTIVE,
        SWEEP,
    ] = 1
    shape: Annotated[
        Shape, product("M rows of all ranks, times each rank's (K, N) weight."), OVERLAP, SWEEP
    ] = SHAPE
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Dtype of the inputs; default: float32, or the profile's first."),
        OVERLAP,
        SWEEP,
    ] = None
    out_dtype: Annotated[
        Dtype | None, typer.Option(help="Dtype of the output; default: the inputs'."), SWEEP
    ] = None
    algorithm: Annotated[
        str,
        typer.Option(
            help="An algorithm of the operator, or auto for the fastest.",
            autocompletion=options.algorithms,
        ),
        SWEEP,
    ] = "auto"
    chunk_rows: Annotated[
        int | None,
        typer.Option(min=1, help="Rows per piece; default: the fastest."),
        SWEEP,
        Unless(_no_pieces),
    ] = None
    link: Annotated[
        float | None,
        option(
            positive,
            "GB/s",
            "Bandwidth of the link between ranks, in place of the profile's.",
            keep=False,
        ),
        EVERY,
        Unless(partial(_swept, name="link")),
        Unless(_emulated),
    ] = None
    latency_us: Annotated[
        float | None,
        option(not_negative, "US", "Latency of the link, in place of the profile's.", keep=False),
        EVERY,
        Unless(_emulated),
    ] = None
    link_gbps: Annotated[
        EmulatedGbps, COLLECTIVE, OVERLAP, SWEEP, Unless(partial(_swept, name="link"))
    ] = None
    link_latency_us: Annotated[EmulatedLatency, COLLECTIVE, OVERLAP, SWEEP] = 0.0
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT=A:B[:F]",
            help="Predict for ranks, m, k, n or link from A to B, times F each (default 2).",
        ),
        SWEEP,
    ] = None
    json_file: Annotated[Json, EVERY] = None
    plot: Annotated[Plot, SWEEP, Unless(_no_curve)] = None
    trace: Trace = None
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png|svg", help="Draw the predicted instructions over time."),
    ] = None

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that the user has chosen, as in `weft.cli.conditions`."""
        collective = self.operator.replace("-", "_") in COLLECTIVES
        chosen = {
            COLLECTIVE: collective,
            COPY: self.operator == "copy",
            OVERLAP: self.operator == "overlap",
            SWEEP: self.sweep,
        }
        return tuple(name for mode, wanted in chosen.items() if wanted for name in mode)

    def changed(self, name: str, value: float) -> Question:
        """The question with another value of `name`: ranks, link, or m, k or n of the shape."""
        other: dict[str, Any] = {name: value}
        if name in ("ranks", "link"):
            return replace(self, **other)
        return replace(self, shape=replace(self.shape, **other))

    def cases(self, machine: Any) -> Iterator[tuple[Any, ...]]:
        """``(workload, machine, algorithm, chunk rows)`` of each operator, in order."""
        dtype, on = self.dtype_on(machine), self.linked(machine)
        m, k, n = self.shape
        parts = {self.operator.replace("-", "_"): (m, k, n)}
        if self.operator == "mlp":
            if n % self.ranks:
                uneven = f"the {n} columns within the MLP cannot be divided over {self.ranks} ranks"
                reject("--shape", f"{uneven}: use a multiple of {self.ranks}")
            width = n // self.ranks
            parts = {"all_gather_matmul": (m, k, 2 * width), "matmul_reduce_scatter": (m, width, k)}
        for operator, shape in parts.items():
            algorithms = OPERATORS[operator].algorithms
            if self.algorithm not in ("auto", *algorithms):
                names = f"{operator} has {', '.join(algorithms)} and auto"
                reject("--algorithm", f"{names}; got {self.algorithm!r}")
            case = workload(operator, self.ranks, shape, dtype, self.out_dtype or dtype)
            if not candidates(case, on, self.algorithm, self.chunk_rows):
                why = f"uses peers' memory, which cannot be done on {on.name} over this link"
                reject("--algorithm", f"{self.algorithm} {why}: use auto")
            yield case, on, self.algorithm, self.chunk_rows

    def dtype_on(self, machine: Any) -> str:
        """The dtype of the inputs, of which the machine knows products."""
        dtypes = [name.removesuffix(" packed") for name in machine.products]
        if self.dtype and self.dtype not in dtypes:
            rates = f"{machine.name} has product rates for {', '.join(dict.fromkeys(dtypes))}"
            reject("--dtype", f"{rates}; got {self.dtype}")
        return self.dtype or ("float32" if "float32" in dtypes else dtypes[0])

    def sizes(self, default: str) -> list[int]:
        """The numbers of bytes."""
        return parse_sizes(self.bytes or default)

    def linked(self, machine: Any) -> Any:
        """The machine with the hosts and links of the options."""
        if self.threads and machine.cores is None:
            reject("--threads", f"{machine.name} has no cores to divide: omit it")
        with options.rejecting("--threads"):
            on = machine.of_ranks(self.ranks, self.threads)
        on = on.emulating(self.link_gbps, self.link_latency_us) if self.link_gbps else on
        if self.ranks % self.hosts:
            uneven = f"{self.ranks} ranks cannot be divided evenly over {self.hosts} hosts"
            reject("--hosts", f"{uneven}: use another --ranks")
        if self.hosts > 1:
            with options.rejecting("--hosts"):
                on = on.over([rank * self.hosts // self.ranks for rank in range(self.ranks)])
        if self.link is not None or self.latency_us is not None:
            on = on.with_link(self.ranks, self.link, self.latency_us)
        return on


def predict(settings: Question) -> None:
    """Print the answer to a question, and write its files."""
    options.check_files(settings.json_file, settings.trace, settings.plot, settings.timeline)
    if settings.hosts > 1 and settings.link_gbps:
        reject("--hosts", "only ranks of one host have an emulated link: use --link")
    machine = shared.load_machine(settings.machine)
    console = Console(stderr=settings.json_file == "-")
    moving = {"copy": _copy, "overlap": _overlap}.get(settings.operator)
    if settings.operator.replace("-", "_") in COLLECTIVES:
        result = _collective(settings, machine, console)
    elif moving:
        result = moving(settings, machine, console)
    elif settings.sweep:
        if settings.operator == "mlp":
            reject("--sweep", "a sweep needs a single operator")
        result = _sweep(settings, machine, console)
    else:
        result = _operators(settings, machine, console)
    options.write_json(result, settings.json_file)


def _collective(settings: Question, machine: Any, console: Console) -> dict[str, Any]:
    name = settings.operator.replace("-", "_")
    moves_nothing = not COLLECTIVES[name].algorithms
    sizes = [0] if moves_nothing else settings.sizes("8:16M:8")
    with options.rejecting("--machine"):
        found = answers.collective(name, sizes, settings.ranks, settings.linked(machine))
    predictions.show_collective(found, console)
    return found


def _copy(settings: Question, machine: Any, console: Console) -> dict[str, Any]:
    if settings.ranks < 2:
        reject("--ranks", options.SINGLE_RANK)
    kinds = copies.SYNCHRONOUS, copies.ASYNCHRONOUS
    on = [settings.linked(profiles.variant(machine, kind)) for kind in kinds]
    found = answers.copy(settings.sizes("8:16M:8"), settings.ranks, *on)
    predictions.show_copies(found, console)
    return found


def _overlap(settings: Question, machine: Any, console: Console) -> dict[str, Any]:
    if settings.ranks < 2:
        reject("--ranks", options.SINGLE_RANK)
    by_kernel = profiles.variant(machine, concurrent.KERNEL)
    dtype = settings.dtype_on(machine)
    ways = {"overlapped": machine}
    if by_kernel is not machine:
        ways = {"overlapped by kernel": by_kernel, "overlapped by copy engine": machine}
    m, k, n = settings.shape
    cases = [
        concurrent.Beside(settings.ranks, m, k, n, dtype, size) for size in settings.sizes("64M")
    ]
    on = {name: settings.linked(one) for name, one in ways.items()}
    found = answers.beside(cases, on, settings.linked(machine))
    predictions.show_overlap(found, console)
    return found


def _sweep(question: Question, machine: Any, console: Console) -> dict[str, Any]:
    assert question.sweep
    name, values = _parse_sweep(question.sweep)
    cases = [case for value in values for case in question.changed(name, value).cases(machine)]
    results = [answers.answer(*case) for case in shared.tracked("predicting", cases)]
    predictions.show_sweep(name, results, values, console)
    if question.plot:
        from weft_tools.bench.pictures.predictions import draw_sweep

        draw_sweep(name, results, values, question.plot)
    return {"sweep": name, "values": values, "results": results}


def _parse_sweep(text: str) -> tuple[str, list[int]]:
    """The swept quantity and its values."""
    name, _, span = text.partition("=")
    names = {"ranks": "ranks", "shape": "m", "m": "m", "k": "k", "n": "n", "link": "link"}
    with suppress(ValueError):
        values = parse_sizes(span)
        if name in names and ":" in span:
            return names[name], values
    expected = "expected ranks, m (or shape), k, n or link, and an increasing range A:B or A:B:F"
    return reject("--sweep", f"{expected}, such as ranks=2:64; got {text!r}")


def _operators(question: Question, machine: Any, console: Console) -> dict[str, Any]:
    cases = [*question.cases(machine)]
    results = [answers.answer(*case) for case in shared.tracked("predicting", cases)]
    for result in results:
        predictions.show(result, console)
    if question.operator == "mlp":
        console.print(answers.total(results), highlight=False, soft_wrap=True)
    if question.trace or question.timeline:
        _draw(question, [case[:2] for case in cases], results)
    return results[0] if len(results) == 1 else {"results": results}


def _draw(question: Question, cases: list[tuple[Any, ...]], results: list[dict[str, Any]]) -> None:
    """Write the traces of the baseline and of the fastest algorithm of every operator."""
    traces = []
    for (case, on), result in zip(cases, results, strict=True):
        fastest = answers.variant(result)
        baseline = OPERATORS[case.operator].baseline
        for variant in dict.fromkeys([*candidates(case, on, baseline), fastest]):
            title = f"{result['predicted']}, {variant}, predicted"
            traces.append(trace(case, variant, on, title))
    title = f"{question.operator} on {results[0]['machine']}"
    ranks = f"{question.ranks} ranks, equal ones shown once"
    about = f"predicted, not measured; weft {__version__}"
    shared.write_traces(question, traces, f"{title}: {ranks}", about)


app = typer.Typer(add_completion=False)
app.command()(options.command_from(Question, predict))
