"""How good predictions are on this machine: random configurations are predicted, written down, and
only then measured.

    weft calibrate                                                # what predictions go by; nothing
    is fitted to what follows python benchmarks/predict_then_measure.py run FILE --seed 1   # writes
    predictions to FILE, measures, and adds what it took python benchmarks/predict_then_measure.py
    table FILE

A configuration is an operator, shape, dtype, packed or plain weight, emulated link or none,
algorithm, and chunk size. K and N are multiples of 32, as in most models; rows are any number. What
is measured is the execution by the engine, from a barrier to the end on the slower rank, in passes
over all configurations; of the passes' medians the lower quartile counts, as in calibration. And
the way that is predicted to be the fastest is compared with the one that is measured to be.
"""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

from weft import launch, predict
from weft.measure import tune
from weft.predict import Variant, Workload, machine

CONFIGURATIONS, RANKS = 40, 2
PASSES, RUNS = (
    5,
    3,
    # over all configurations, and of each in a pass: the machine is faster at one time than at another
)
FLOPS = 3e9  # at most, so that all of it takes some minutes
DTYPES = {"float32": 5, "bfloat16": 2, "float16": 1, "float64": 1}  # and how often each is drawn

app = typer.Typer(help=__doc__, no_args_is_help=True, rich_markup_mode=None)


def configurations(seed: int) -> list[tuple[Workload, tuple[float, float] | None, random.Random]]:
    """Random cases, and dice for how to do each."""
    dice = random.Random(seed)
    found = []
    while len(found) < CONFIGURATIONS:
        operator = dice.choice([*predict.OPERATORS])
        m, k, n = (
            int(2 ** dice.uniform(3, 11)),
            *(32 * int(2 ** dice.uniform(3, 6.3)) for _ in range(2)),
        )
        [dtype] = dice.choices([*DTYPES], [*DTYPES.values()])
        packed = dice.random() < 0.5
        link = (round(2 ** dice.uniform(0.5, 4), 2), 0.0) if dice.random() < 0.5 else None
        if 2 * m * k * n <= FLOPS:
            found.append(
                (
                    predict.workload(operator, RANKS, (m, k, n), dtype, packed=packed),
                    link,
                    random.Random(dice.random()),
                )
            )
    return found


def foretell(seed: int) -> list[dict[str, Any]]:
    """Predict every configuration in a way drawn at random, and which way is the fastest."""
    mine = machine.load(machine.THIS)
    rows = []
    for case, link, dice in configurations(seed):
        on = mine.emulating(*link) if link else mine
        way = dice.choice(predict.candidates(case, on))
        found = {"way": way, "predicted_ms": 1e3 * predict.time(case, way, on)}
        ways = [
            {"way": way, "predicted_ms": 1e3 * seconds} for way, seconds in predict.rank(case, on)
        ]
        rows.append({"case": case._asdict(), "link": link, **found, "ways": ways})
    return rows


def measure(rows: list[dict[str, Any]]) -> None:
    """Add what is measured."""
    questions = []
    for row in rows:
        case = Workload(**{**row["case"], "rows": tuple(row["case"]["rows"])})
        asked = dict.fromkeys(
            [Variant(*row["way"]), *(Variant(*entry["way"]) for entry in row["ways"])]
        )
        questions.append(tune.Question(case, [*asked], tuple(row["link"]) if row["link"] else None))
    passes = [launch(tune.measure, RANKS, questions, RUNS, 1, threads=1)[0] for _ in range(PASSES)]
    for row, *found in zip(rows, *passes, strict=True):
        for entry in (row, *row["ways"]):
            answers = [
                answer
                for answers in found
                for answer in answers
                if answer.way == Variant(*entry["way"])
            ]
            medians = sorted(answer.median for answer in answers)
            entry |= {"measured_ms": medians[PASSES // 4], "median_ms": statistics.median(medians)}


def summary(rows: list[dict[str, Any]]) -> str:
    """The configurations as a Markdown table, and their errors."""
    lines = [
        "| configuration | way | predicted | measured (median) | error | predicted best / best |",
        "|---|---|---|---|---|---|",
    ]
    errors, misses = [], []
    for row in rows:
        case = row["case"]
        where = f"{row['link'][0]:g} Gbit/s" if row["link"] else "shared memory"
        size, lies = (
            f"{sum(case['rows'])}x{case['k']}x{case['n']}",
            "packed" if case["packed"] else "plain",
        )
        what = f"{case['operator']} {size} {case['dtype']} {lies}"
        errors.append(100 * (row["predicted_ms"] / row["measured_ms"] - 1))
        misses.append(
            100
            * (
                row["ways"][0]["measured_ms"] / min(entry["measured_ms"] for entry in row["ways"])
                - 1
            )
        )
        way = f"{Variant(*row['way'])}, {row['way'][1]} pieces"
        times = f"{row['predicted_ms']:.3f} ms | {row['measured_ms']:.3f} ({row['median_ms']:.3f})"
        lines.append(
            f"| {what}, {where} | {way} | {times} | {errors[-1]:+.0f} % | {misses[-1]:+.0f} % |"
        )
    mean, worst = sum(map(abs, errors)) / len(errors), max(map(abs, errors))
    right = sum(miss <= 5 for miss in misses)
    lines += [
        "",
        f"Mean error **{mean:.1f} %**, worst **{worst:.0f} %**; the way predicted to be the "
        "fastest is within 5 % of the",
    ]
    return "\n".join(
        [*lines, f"fastest measured one in **{right} of {len(rows)}** configurations."]
    )


@app.command()
def run(
    file: Path,
    seed: Annotated[int, typer.Option(help="Of the configurations; another one is another test.")],
) -> None:
    """Predict, write that down, measure, and write that down too."""
    found = {"seed": seed, "calibrated": machine.calibrated(), "configurations": foretell(seed)}
    file.write_text(json.dumps(found, indent=1) + "\n")
    measure(found["configurations"])
    file.write_text(json.dumps(found, indent=1) + "\n")
    table(file)


@app.command()
def table(file: Path) -> None:
    """Print what `run` found as a Markdown table."""
    print(summary(json.loads(file.read_text())["configurations"]))


if __name__ == "__main__":
    app()
