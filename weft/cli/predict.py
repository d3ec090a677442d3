"""``weft predict``: what operators would take on a machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from weft.bench.settings import FUSED, SHAPE, Dtype, Json, Plot, Shape, Trace, parse_sizes, product
from weft.cli import options
from weft.cli.options import refuse
from weft.predict import COLLECTIVES, answers, candidates, trace, workload
from weft.schedules.operators import OPERATORS


@dataclass(frozen=True)
class Question:
    """What an operator would take: every algorithm, what holds it up, and what would change that.
    Nothing is run.

    Would overlap help the MLP of a 70B model, 8192 wide and 28672 deep, on 8 GPUs with links of 200
    GB/s?

    weft predict mlp --machine h100-nvlink-8 --ranks 8 --shape 8192x8192x28672 --link 200
    """

    operator: Annotated[
        str,
        typer.Argument(
            help="mlp: both of a gated MLP; --shape is then tokens x hidden x intermediate. Collectives take --bytes."
        ),
        (*FUSED, "mlp", *(name.replace("_", "-") for name in COLLECTIVES)),
    ]
    machine: Annotated[
        str,
        typer.Option(help="A profile; without one, this machine if it is calibrated, else cpu."),
    ] = ""
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="How many share the work.")] = 2
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Of each rank, where the profile tells cores; by default all."),
    ] = None
    bytes: Annotated[
        str, typer.Option(metavar="FIRST:LAST:FACTOR,…", help="Of each rank, in a collective.")
    ] = "8:16M:8"
    hosts: Annotated[
        int, typer.Option(min=1, help="Over how many hosts they are spread, as many on each.")
    ] = 1
    shape: Annotated[Shape, product("M rows in all, times each rank's (K, N).")] = SHAPE
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the inputs; by default the first that the machine has.")
    ] = None
    out_dtype: Annotated[
        Dtype | None, typer.Option(help="Of the output; by default the inputs'.")
    ] = None
    algorithm: Annotated[
        str, typer.Option(help="One of the operator's, or auto for the fastest.")
    ] = "auto"
    chunk_rows: Annotated[
        int | None, typer.Option(min=1, help="Rows per piece; by default the fastest.")
    ] = None
    link: Annotated[
        float | None,
        typer.Option(metavar="GB/s", help="Another bandwidth of the link that joins all ranks."),
    ] = None
    latency_us: Annotated[
        float | None, typer.Option(min=0, help="Another latency of that link.")
    ] = None
    link_gbps: Annotated[
        float | None, typer.Option(help="Gbit/s of an emulated link, as of weft bench.")
    ] = None
    link_latency_us: Annotated[float, typer.Option(min=0, help="Latency of the emulated link.")] = (
        0.0
    )
    compare: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The JSON of a weft bench run, which says the rest."),
    ] = None
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT=A:B[:F]", help="ranks, m, k, n or link, from A to B by factor F."
        ),
    ] = None
    json_file: Json = None
    plot: Plot = None
    trace: Trace = None
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE.png|svg", help="Draw what would run when.")
    ] = None

    def changed(self, what: str, value: float) -> Question:
        """The question with another value of one thing: ranks, link, or m, k or n of the shape."""
        other: dict[str, Any] = {what: value}
        if what in ("ranks", "link"):
            return replace(self, **other)
        return replace(self, shape=replace(self.shape, **other))

    def as_measured(self) -> tuple[Question, dict[str, Any] | None]:
        """The question that the benchmark to compare with answers, and its result; without one, the
        question itself.
        """
        if not self.compare:
            return self, None
        try:
            found: dict[str, Any] = json.loads(self.compare.read_text())
        except (OSError, ValueError) as error:
            refuse("--compare", f"cannot read {self.compare}: {error}")
        if "times_ms" not in found or found.get("benchmark") != self.operator:
            refuse("--compare", f"{self.compare} is not the JSON of weft bench {self.operator}")
        link = found["link"] or {"gbps": self.link_gbps, "latency_us": self.link_latency_us}
        same = ("ranks", "dtype", "out_dtype", "algorithm", "chunk_rows")
        changes: dict[str, Any] = {name: found[name] for name in same}
        changes |= {f"link_{name}": value for name, value in link.items()}
        changes |= {"shape": Shape(**found["shape"]), "hosts": found.get("hosts", 1)}
        return replace(self, **changes), found

    def cases(self, machine: Any) -> Iterator[tuple[Any, ...]]:
        """``(workload, machine, algorithm, chunk rows)`` of each operator in turn."""
        known = [name.removesuffix(" packed") for name in machine.products]
        dtype = self.dtype or known[0]
        if dtype not in known:
            rates = f"{machine.name} has product rates for {', '.join(dict.fromkeys(known))}"
            refuse("--dtype", f"{rates}; got {dtype}")
        on = self.linked(machine)
        m, k, n = self.shape
        parts = {self.operator.replace("-", "_"): (m, k, n)}
        if self.operator == "mlp":
            if n % self.ranks:
                uneven = f"the {n} columns within the MLP must divide over {self.ranks} ranks"
                refuse("--shape", uneven)
            width = n // self.ranks
            parts = {"all_gather_matmul": (m, k, 2 * width), "matmul_reduce_scatter": (m, width, k)}
        for operator, shape in parts.items():
            predicted = OPERATORS[operator].predicted
            if self.algorithm not in ("auto", *predicted):
                names = f"{operator} has {', '.join(predicted)} and auto"
                refuse("--algorithm", f"{names}; got {self.algorithm!r}")
            case = workload(operator, self.ranks, shape, dtype, self.out_dtype or dtype)
            if not candidates(case, on, self.algorithm, self.chunk_rows):
                why = f"reads peers' memory, which cannot be done on {on.name} over this link"
                refuse("--algorithm", f"{self.algorithm} {why}")
            yield case, on, self.algorithm, self.chunk_rows

    def linked(self, machine: Any) -> Any:
        """The machine with the hosts and links that are asked for."""
        with options.refusing("--threads"):
            on = machine.of_ranks(self.ranks, self.threads)
        on = on.emulating(self.link_gbps, self.link_latency_us) if self.link_gbps else on
        if self.ranks % self.hosts:
            uneven = f"{self.ranks} ranks are not spread evenly over {self.hosts} hosts"
            refuse("--hosts", f"{uneven}: give another --ranks")
        if self.hosts > 1:
            with options.refusing("--hosts"):
                on = on.over([rank * self.hosts // self.ranks for rank in range(self.ranks)])
        if self.link is not None or self.latency_us is not None:
            on = on.with_link(self.ranks, self.link, self.latency_us)
        return on


def predict(given: Question) -> None:
    """Answer a question."""
    options.check_files(given.json_file, given.trace, given.plot, given.timeline)
    question, measured = given.as_measured()
    if question.hosts > 1 and question.link_gbps:
        refuse("--hosts", "links between hosts are real ones: use --link instead of --link-gbps")
    machine, console = options.load_machine(given.machine), Console(stderr=given.json_file == "-")
    if given.operator.replace("-", "_") in COLLECTIVES:
        result = _collective(given, machine, console)
    elif given.sweep:
        if given.operator == "mlp" or measured:
            refuse("--sweep", "a sweep is of one operator, without --compare")
        result = _sweep(question, machine, console)
    else:
        result = _operators(question, measured, machine, console)
    options.write_json(result, given.json_file)


def _collective(given: Question, machine: Any, console: Console) -> dict[str, Any]:
    from weft.cli.predictions import show_collective

    if given.sweep or given.plot or given.trace or given.timeline:
        refuse("--sweep", "of a collective there is a table by --bytes, and --json")
    name = given.operator.replace("-", "_")
    sizes = [0] if name == "barrier" else parse_sizes(given.bytes)
    with options.refusing("--machine"):
        found = answers.collective(name, sizes, given.ranks, given.linked(machine))
    show_collective(found, console)
    return found


def _sweep(question: Question, machine: Any, console: Console) -> dict[str, Any]:
    from weft.cli import predictions

    assert question.sweep
    what, values = _parse_sweep(question.sweep)
    cases = [case for value in values for case in question.changed(what, value).cases(machine)]
    results = [answers.answer(*case) for case in cases]
    predictions.show_sweep(what, results, values, console)
    if question.plot:
        predictions.draw_sweep(what, results, values, question.plot)
    return {"sweep": what, "values": values, "results": results}


def _parse_sweep(text: str) -> tuple[str, list[int]]:
    what, _, span = text.partition("=")
    names = {"ranks": "ranks", "shape": "m", "m": "m", "k": "k", "n": "n", "link": "link"}
    with suppress(ValueError):
        values = parse_sizes(span)
        if what in names and ":" in span:
            return names[what], values
    expected = (
        "ranks, m (or shape), k, n or link, from, to and maybe a factor of at least 2, upwards"
    )
    return refuse("--sweep", f"expected {expected}, such as ranks=2:64; got {text!r}")


def _operators(
    question: Question, measured: dict[str, Any] | None, machine: Any, console: Console
) -> dict[str, Any]:
    from weft.cli import predictions

    if question.plot:
        refuse("--plot", "curves are drawn of a sweep: add --sweep, or use --timeline")
    cases = [*question.cases(machine)]
    results = [answers.answer(*case) for case in cases]
    for result in results:
        predictions.show(result, console)
    if question.operator == "mlp":
        console.print(answers.total(results), highlight=False, soft_wrap=True)
    if measured:
        predictions.show_comparison(results[0], measured, console)
    if question.trace or question.timeline:
        _draw(question, [case[:2] for case in cases], results)
    return results[0] if len(results) == 1 else {"results": results}


def _draw(question: Question, cases: list[tuple[Any, ...]], results: list[dict[str, Any]]) -> None:
    """Write the traces of every operator: of the sequential algorithm, and of the fastest."""
    traces = []
    for (case, on), result in zip(cases, results, strict=True):
        fastest = answers.variant(result)
        for variant in dict.fromkeys([*candidates(case, on, "sequential"), fastest]):
            title = f"{result['predicted']}, {variant}, predicted"
            traces.append(trace(case, variant, on, title))
    title = f"{question.operator} on {results[0]['machine']}"
    ranks = f"{question.ranks} ranks, of equal ones the first"
    options.write_traces(question, traces, f"{title}: {ranks}")
