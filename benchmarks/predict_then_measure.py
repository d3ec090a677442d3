"""The accuracy of predictions on this machine: random configurations are predicted, the predictions
are saved, and only then are the configurations measured.

    weft calibrate    # the basis of predictions; nothing is fitted to the measurements below
    # predict to FILE, measure, and add the measurements:
    python benchmarks/predict_then_measure.py run FILE --seed 1
    python benchmarks/predict_then_measure.py table FILE

One configuration is an operator, shape, dtype, packed or plain weight, emulated link or none,
algorithm, and number of pieces. K and N are multiples of 32, as in most models; rows are any
number. A measurement is the execution by the engine, from a barrier to the end on the slowest rank,
in passes over all configurations; of the passes' medians the lower quartile counts, as in
calibration. The variant with the fastest prediction is also compared with the fastest measured one.
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
from weft_tools.predict import Variant, Workload, machine

CONFIGURATIONS, RANKS = 40, 2
PASSES, RUNS = (
    5,
    3,
    # passes over all configurations, and runs of each in a pass: the speed of the machine varies
)
FLOPS = 3e9  # at most, so that a run takes some minutes
DTYPES = {"float32": 5, "bfloat16": 2, "float16": 1, "float64": 1}  # the weights of the draw

app = typer.Typer(help=__doc__, no_args_is_help=True, rich_markup_mode=None)


def configurations(seed: int) -> list[tuple[Workload, tuple[float, float] | None, random.Random]]:
    """Random cases, each with a random generator that selects its variant."""
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


def predicted(seed: int) -> list[dict[str, Any]]:
    """Predictions of every configuration: of a random variant, and of all variants by speed."""
    mine = machine.load(machine.THIS)
    rows = []
    for case, link, dice in configurations(seed):
        on = mine.emulating(*link) if link else mine
        variant = dice.choice(predict.candidates(case, on))
        found = {"way": variant, "predicted_ms": 1e3 * predict.time(case, variant, on)}
        ranking = [
            {"way": variant, "predicted_ms": 1e3 * seconds}
            for variant, seconds in predict.rank(case, on)
        ]
        rows.append({"case": case._asdict(), "link": link, **found, "ways": ranking})
    return rows


def measure(rows: list[dict[str, Any]]) -> None:
    """Add the measured times to the predictions."""
    questions = []
    for row in rows:
        case = Workload(**{**row["case"], "rows": tuple(row["case"]["rows"])})
        variants = dict.fromkeys(
            [Variant(*row["way"]), *(Variant(*entry["way"]) for entry in row["ways"])]
        )
        questions.append(
            tune.TuningCase(case, [*variants], tuple(row["link"]) if row["link"] else None)
        )
    passes = [launch(tune.measure, RANKS, questions, RUNS, 1, threads=1)[0] for _ in range(PASSES)]
    for row, *found in zip(rows, *passes, strict=True):
        for entry in (row, *row["ways"]):
            answers = [
                answer
                for answers in found
                for answer in answers
                if answer.variant == Variant(*entry["way"])
            ]
            medians = sorted(answer.median for answer in answers)
            entry |= {"measured_ms": medians[PASSES // 4], "median_ms": statistics.median(medians)}


def summary(rows: list[dict[str, Any]]) -> str:
    """The configurations as a Markdown table, and their errors."""
    lines = [
        "| configuration | variant | predicted | measured (median) | error | predicted best / "
        "best |",
        "|---|---|---|---|---|---|",
    ]
    errors, misses = [], []
    for row in rows:
        case = row["case"]
        where = f"{row['link'][0]:g} Gbit/s" if row["link"] else "shared memory"
        size = f"{sum(case['rows'])}x{case['k']}x{case['n']}"
        weight = "packed" if case["packed"] else "plain"
        description = f"{case['operator']} {size} {case['dtype']} {weight}"
        errors.append(100 * (row["predicted_ms"] / row["measured_ms"] - 1))
        misses.append(
            100
            * (
                row["ways"][0]["measured_ms"] / min(entry["measured_ms"] for entry in row["ways"])
                - 1
            )
        )
        variant = f"{Variant(*row['way'])}, {row['way'][1]} pieces"
        times = f"{row['predicted_ms']:.3f} ms | {row['measured_ms']:.3f} ({row['median_ms']:.3f})"
        lines.append(
            f"| {description}, {where} | {variant} | {times} | {errors[-1]:+.0f} % | "
            f"{misses[-1]:+.0f} % |"
        )
    mean = sum(map(abs, errors)) / len(errors)
    worst = max(map(abs, errors))
    right = sum(miss <= 5 for miss in misses)
    lines += [
        "",
        f"Mean error **{mean:.1f} %**, worst **{worst:.0f} %**; the variant predicted to be the "
        "fastest is within 5 % of the",
    ]
    return "\n".join(
        [*lines, f"fastest measured one in **{right} of {len(rows)}** configurations."]
    )


@app.command()
def run(
    file: Path,
    seed: Annotated[int, typer.Option(help="Of the random configurations.")],
) -> None:
    """Predict, save the predictions, measure, and save the measurements."""
    found = {"seed": seed, "calibrated": machine.calibrated(), "configurations": predicted(seed)}
    file.write_text(json.dumps(found, indent=1) + "\n")
    measure(found["configurations"])
    file.write_text(json.dumps(found, indent=1) + "\n")
    table(file)


@app.command()
def table(file: Path) -> None:
    """Print the results of `run` as a Markdown table."""
    print(summary(json.loads(file.read_text())["configurations"]))


if __name__ == "__main__":
    app()
