"""``weft predict``: what operators would take on a machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from weft.cli import options
from weft.cli.options import Dtype, Json, Plot, refuse


class Operator(str, Enum):
    """What can be predicted."""

    all_gather_matmul = "all-gather-matmul"
    matmul_reduce_scatter = "matmul-reduce-scatter"
    matmul_all_reduce = "matmul-all-reduce"
    mlp = "mlp"


def predict(
    operator: Annotated[Operator, typer.Argument(help="mlp: both of a gated MLP; --shape is then tokens x hidden x intermediate.")],
    machine: Annotated[str, typer.Option(help="A profile; without one, this machine if it is calibrated, else cpu.")] = "",
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="How many share the work.")] = 2,
    hosts: Annotated[int, typer.Option(min=1, help="Over how many hosts they are spread, as many on each.")] = 1,
    shape: Annotated[str, typer.Option(metavar="MxKxN", help="M rows in all, times each rank's (K, N).")] = "2048x2048x1024",
    dtype: Annotated[Dtype | None, typer.Option(help="Of the inputs; by default the first that the machine has.")] = None,
    out_dtype: Annotated[Dtype | None, typer.Option(help="Of the output; by default the inputs'.")] = None,
    algorithm: Annotated[str, typer.Option(help="One of the operator's, or auto for the fastest.")] = "auto",
    chunk_rows: Annotated[int | None, typer.Option(min=1, help="Rows per piece; by default the fastest.")] = None,
    link: Annotated[float | None, typer.Option(metavar="GB/s", help="Another bandwidth of the link that joins all ranks.")] = None,
    latency_us: Annotated[float | None, typer.Option(min=0, help="Another latency of that link.")] = None,
    link_gbps: Annotated[float | None, typer.Option(help="Gbit/s of an emulated link, as of weft bench.")] = None,
    link_latency_us: Annotated[float, typer.Option(min=0, help="Latency of the emulated link.")] = 0.0,
    compare: Annotated[Path | None, typer.Option(metavar="FILE", help="The JSON of a weft bench run, which says the rest.")] = None,
    sweep: Annotated[
        str | None, typer.Option(metavar="WHAT=A:B[:F]", help="ranks, m, k, n or link, from A to B by factor F.")
    ] = None,
    json_file: Json = None,
    plot: Plot = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace for https://ui.perfetto.dev.")] = None,
    timeline: Annotated[Path | None, typer.Option(metavar="FILE.png|svg", help="Draw what would run when.")] = None,
) -> None:
    """What an operator would take: every algorithm, what holds it up, and what would change that. Nothing is run.

    Would overlap help the MLP of a 70B model, 8192 wide and 28672 deep, on 8 GPUs with links of 200 GB/s?

    weft predict mlp --machine h100-nvlink-8 --ranks 8 --shape 8192x8192x28672 --link 200
    """
    options.check_files(json_file, trace, plot, timeline)
    measured = _measured(compare, operator) if compare else None
    if measured:
        ranks, shape = measured["ranks"], "x".join(str(measured["shape"][name]) for name in "mkn")
        dtype, out_dtype = Dtype(measured["dtype"]), Dtype(measured["out_dtype"])
        algorithm, chunk_rows, hosts = measured["algorithm"], measured["chunk_rows"], measured.get("hosts", 1)
        if measured["link"]:
            link_gbps, link_latency_us = measured["link"]["gbps"], measured["link"]["latency_us"]
    size = options.parse_shape(shape)
    if hosts > 1 and link_gbps:
        refuse("--hosts", "links between hosts are real ones: use --link instead of --link-gbps")
    question = _Question(operator, ranks, hosts, *size, link, latency_us, dtype, out_dtype, algorithm, chunk_rows)
    question = replace(
        question, machine=options.load_machine(machine), emulated=(link_gbps, link_latency_us) if link_gbps else None
    )
    console = Console(stderr=json_file == "-")
    from weft.bench import predictions

    if sweep:
        if operator is Operator.mlp or measured:
            refuse("--sweep", "a sweep is of one operator, without --compare")
        what, values = _sweep(sweep)
        results = [predictions.answer(*asked) for value in values for asked in question.changed(what, value).asked()]
        predictions.show_sweep(what, results, values, console)
        if plot:
            predictions.draw_sweep(what, results, values, plot)
        options.write_json({"sweep": what, "values": values, "results": results}, json_file)
        return
    if plot:
        refuse("--plot", "curves are drawn of a sweep: add --sweep, or use --timeline")
    results = []
    for asked in question.asked():
        results.append(predictions.answer(*asked))
        predictions.show(results[-1], console)
    if operator is Operator.mlp:
        console.print(predictions.total(results), highlight=False, soft_wrap=True)
    if measured:
        predictions.show_comparison(results[0], measured, console)
    _draw(question, results, trace, timeline)
    options.write_json(results[0] if len(results) == 1 else {"results": results}, json_file)


@dataclass(frozen=True)
class _Question:
    """What is asked, as the options say it."""

    operator: Operator
    ranks: int
    hosts: int
    m: int
    k: int
    n: int
    link: float | None
    latency_us: float | None
    dtype: Dtype | None
    out_dtype: Dtype | None
    algorithm: str
    chunk_rows: int | None
    machine: Any = None
    emulated: tuple[float, float] | None = None

    def changed(self, what: str, value: float) -> _Question:
        """The same with another value of one thing."""
        options: dict[str, Any] = {what: value}
        return replace(self, **options)

    def asked(self) -> Iterator[tuple[Any, ...]]:
        """``(case, machine, algorithm, chunk rows)`` of each operator in turn."""
        from weft import predict

        known = [name.removesuffix(" packed") for name in self.machine.products]
        dtype = self.dtype.value if self.dtype else known[0]
        if dtype not in known:
            refuse("--dtype", f"{self.machine.name} has product rates for {', '.join(dict.fromkeys(known))}; got {dtype}")
        on = self.machine.emulating(*self.emulated) if self.emulated else self.machine
        if self.ranks % self.hosts:
            refuse("--hosts", f"{self.ranks} ranks are not spread evenly over {self.hosts} hosts: give another --ranks")
        if self.hosts > 1:
            try:
                on = on.over([rank * self.hosts // self.ranks for rank in range(self.ranks)])
            except ValueError as error:
                refuse("--hosts", str(error))
        if self.link is not None or self.latency_us is not None:
            on = on.with_link(self.ranks, self.link, self.latency_us)
        parts = {self.operator.value.replace("-", "_"): (self.m, self.k, self.n)}
        if self.operator is Operator.mlp:
            if self.n % self.ranks:
                refuse("--shape", f"the {self.n} columns within the MLP must divide over {self.ranks} ranks")
            width = self.n // self.ranks
            parts = {"all_gather_matmul": (self.m, self.k, 2 * width), "matmul_reduce_scatter": (self.m, width, self.k)}
        for operator, shape in parts.items():
            if self.algorithm not in ("auto", *predict.ALGORITHMS[operator]):
                refuse("--algorithm", f"{operator} has {', '.join(predict.ALGORITHMS[operator])} and auto; got {self.algorithm!r}")
            out = self.out_dtype.value if self.out_dtype else dtype
            case = predict.case(operator, self.ranks, shape, dtype, out)
            if not predict.candidates(case, on, self.algorithm, self.chunk_rows):
                refuse(
                    "--algorithm",
                    f"{self.algorithm} reads peers' memory, which cannot be done on {on.name} over this link",
                )
            yield case, on, self.algorithm, self.chunk_rows


def _measured(path: Path, operator: Operator) -> dict[str, Any]:
    try:
        measured: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        refuse("--compare", f"cannot read {path}: {error}")
    if "times_ms" not in measured or measured.get("benchmark") != operator.value:
        refuse("--compare", f"{path} is not the JSON of weft bench {operator.value}")
    return measured


def _sweep(text: str) -> tuple[str, list[int]]:
    what, _, span = text.partition("=")
    names = {"ranks": "ranks", "shape": "m", "m": "m", "k": "k", "n": "n", "link": "link"}
    fields = span.split(":")
    if what not in names or not 2 <= len(fields) <= 3 or not all(field.isdecimal() and int(field) for field in fields):
        refuse(
            "--sweep", f"expected ranks, m (or shape), k, n or link, from, to and maybe a factor, such as ranks=2:64; got {text!r}"
        )
    value, last, factor = int(fields[0]), int(fields[1]), int(fields[2]) if len(fields) == 3 else 2
    if last < value or factor < 2:
        refuse("--sweep", f"goes upwards, by a factor of at least 2; got {text!r}")
    values = []
    while value <= last:
        values.append(value)
        value *= factor
    return names[what], values


def _draw(question: _Question, results: list[dict[str, Any]], trace: Path | None, timeline: Path | None) -> None:
    """Write what would run when: the sequential way beside the fastest, of every operator."""
    if not trace and not timeline:
        return
    from weft import predict
    from weft.bench.timeline import draw
    from weft.plan.trace import to_perfetto
    from weft.predict import Candidate

    traces = []
    for (case, on, _, _), result in zip(question.asked(), results, strict=True):
        best = Candidate(result["algorithm"], result["chunk_rows"], result["order"])
        ways = dict.fromkeys([*predict.candidates(case, on, "sequential"), best])
        traces += [predict.trace(case, way, on, f"{result['predicted']}, {way}, predicted") for way in ways]
    if trace:
        trace.write_text(json.dumps(to_perfetto(*traces)))
    if timeline:
        draw(
            traces,
            timeline,
            f"{question.operator.value} on {question.machine.name}: {question.ranks} ranks, of equal ones the first",
        )
