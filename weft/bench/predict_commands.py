"""``weft predict``, ``weft calibrate`` and ``weft tune``: what operators would take, on which machine, and what they do take."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from weft.bench import options
from weft.bench.options import Dtype, Json, Plot, refuse


class Operator(str, Enum):
    """What can be predicted."""

    all_gather_matmul = "all-gather-matmul"
    matmul_reduce_scatter = "matmul-reduce-scatter"
    matmul_all_reduce = "matmul-all-reduce"
    mlp = "mlp"


class Tunable(str, Enum):
    """What can be tuned."""

    all_gather_matmul = "all-gather-matmul"
    matmul_reduce_scatter = "matmul-reduce-scatter"
    matmul_all_reduce = "matmul-all-reduce"


def predict(
    operator: Annotated[Operator, typer.Argument(help="mlp: both of a gated MLP; --shape is then tokens x hidden x intermediate.")],
    machine: Annotated[str, typer.Option(help="A profile; without one, this machine if it is calibrated, else cpu.")] = "",
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="How many share the work.")] = 2,
    shape: Annotated[str, typer.Option(metavar="MxKxN", help="M rows in all, times each rank's (K, N).")] = "2048x2048x1024",
    dtype: Annotated[Dtype | None, typer.Option(help="Of the inputs; by default the first that the machine has.")] = None,
    out_dtype: Annotated[Dtype | None, typer.Option(help="Of the output; by default the inputs'.")] = None,
    algorithm: Annotated[str, typer.Option(help="One of the operator's, or auto for the fastest.")] = "auto",
    chunk_rows: Annotated[int | None, typer.Option(min=1, help="Rows per piece; by default the fastest.")] = None,
    link: Annotated[float | None, typer.Option(metavar="GB/s", help="Another bandwidth of the link that joins the ranks.")] = None,
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
        algorithm, chunk_rows = measured["algorithm"], measured["chunk_rows"]
        if measured["link"]:
            link_gbps, link_latency_us = measured["link"]["gbps"], measured["link"]["latency_us"]
    size = options.parse_shape(shape)
    question = _Question(operator, ranks, *size, link, latency_us, dtype, out_dtype, algorithm, chunk_rows)
    question = replace(question, machine=_machine(machine), emulated=(link_gbps, link_latency_us) if link_gbps else None)
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


def calibrate(
    ranks: Annotated[int | None, typer.Option("--ranks", "-n", min=2, help="That measure together; one per core.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads per rank.")] = 1,
    json_file: Json = None,
) -> None:
    """Measure this machine for predictions, and remember it as the profile this. Takes about half a minute."""
    from weft import calibrate as calibration
    from weft.launcher import launch

    count = ranks or max(2, len(os.sched_getaffinity(0)) // threads)
    try:
        profile = launch(calibration.measure, count, threads, threads=threads)[0]
        calibration.store(profile)
    except (RuntimeError, OSError) as error:
        typer.echo(f"weft calibrate: {error}", err=True)
        raise typer.Exit(1) from None
    console = Console(stderr=json_file == "-")
    table = Table("", "", Column("spread", justify="right"), box=SIMPLE_HEAD, pad_edge=False)
    spread = profile["spread"]
    for name, product in profile["products"].items():
        worst = max(percent for what, percent in spread.items() if what.rpartition(" ")[0] == name)
        rate = f"{1e3 * product['tflops']:.1f} GFLOP/s, weight {product['weight_gbs']:.1f} GB/s, {product['fixed_us']:.0f} us"
        table.add_row(f"product, {name}", rate, f"{worst:.0f} %")
    for what, text in (
        ("memory_gbs", f"{profile['memory_gbs']:.1f} GB/s"),
        ("links", f"{profile['links'][0]['gbs']:.1f} GB/s"),
        ("reduce_gbs", f"{profile['reduce_gbs']:.1f} GB/s"),
        ("notify_us", f"{profile['notify_us']:.1f} us"),
        ("launch_us", f"{profile['launch_us']:.1f} us"),
        ("interference", f"compute {profile['compute_slowdown']:.2f}x, communicate {profile['communicate_slowdown']:.2f}x slower"),
    ):
        table.add_row(what, text, f"{max([v for k, v in spread.items() if k.startswith(what)], default=0):.0f} %")
    console.print(table)
    console.print("Each figure is of the least disturbed run; spread: by how much the median run took longer.", highlight=False)
    options.write_json(profile, json_file)


def tune(
    operator: Annotated[Tunable, typer.Argument(help="What to tune.")],
    shape: Annotated[list[str], typer.Option(metavar="MxKxN", help="A shape of weft bench; may be given several times.")],
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=2, help="How many to start.")] = 2,
    dtype: Annotated[Dtype, typer.Option(help="Of the inputs.")] = Dtype.float32,
    out_dtype: Annotated[Dtype | None, typer.Option(help="Of the output: the inputs' or float32.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="The weight is a plain tensor, not packed.")] = False,
    staged: Annotated[bool, typer.Option("--staged", help="The input of all-gather-matmul is not in symmetric memory.")] = False,
    link_gbps: Annotated[float | None, typer.Option(help="Gbit/s of an emulated link.")] = None,
    link_latency_us: Annotated[float, typer.Option(min=0, help="Latency of the emulated link.")] = 0.0,
    iterations: Annotated[int, typer.Option(min=1, help="Rounds measured.")] = 10,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Compute threads per rank; by default the cores are shared out.")
    ] = None,
    json_file: Json = None,
) -> None:
    """Measure the candidates for given shapes on this machine, and remember the winners: from now on auto takes them."""
    from weft import predict
    from weft.bench import tune as tuning
    from weft.launcher import threads_per_rank

    if staged and operator is not Tunable.all_gather_matmul:
        refuse("--staged", "only the input of all-gather-matmul can lie in symmetric memory")
    on, link = _machine(""), (link_gbps, link_latency_us) if link_gbps else None
    on = on.emulating(*link) if link else on
    questions = []
    for text in shape:
        case = predict.case(operator.value.replace("-", "_"), ranks, options.parse_shape(text), dtype.value)
        case = case._replace(out_dtype=(out_dtype or dtype).value, packed=not plain, symmetric=not staged)
        questions.append(tuning.Question(case, [way for way, _ in tuning.ways(case, on)], link))
    try:
        answers = tuning.tune(questions, iterations, threads or threads_per_rank(ranks))
    except (RuntimeError, OSError) as error:
        typer.echo(f"weft tune: {error}", err=True)
        raise typer.Exit(1) from None
    console, results = Console(stderr=json_file == "-"), []
    for text, (case, _, _), found in zip(shape, questions, answers, strict=True):
        rows = tuning.show(case, on, found)
        results.append({"operator": operator.value, "shape": text, "ways": rows})
        table = Table(f"{operator.value} {text}", box=SIMPLE_HEAD, pad_edge=False)
        for name in ("rows per piece", "predicted ms", "measured ms"):
            table.add_column(name, justify="right")
        for row, answer in zip(rows, found, strict=True):
            table.add_row(str(answer.way), str(answer.way.chunk_rows), f"{row['predicted_ms']:.3f}", f"{row['measured_ms']:.3f}")
        console.print(table)
        console.print(f"Remembered: {found[0].way}, at most {found[0].way.chunk_rows} rows per transfer.", highlight=False)
    options.write_json({"tuned": results}, json_file)


@dataclass(frozen=True)
class _Question:
    """What is asked, as the options say it."""

    operator: Operator
    ranks: int
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
                    f"{self.algorithm} reads peers' memory in place, which cannot be done on {on.name} over this link",
                )
            yield case, on, self.algorithm, self.chunk_rows


def _machine(name: str) -> Any:
    from weft import machine

    try:
        found = machine.load(name) if name else machine.here()
    except ValueError as error:
        refuse("--machine", str(error))
    if not name and found.name != machine.THIS:
        unknown = f"This machine is not calibrated, so the profile {found.name} is taken; weft calibrate measures this one."
        typer.echo(unknown, err=True)
    return found


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
    from weft.predict import Candidate
    from weft.trace import to_perfetto

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
