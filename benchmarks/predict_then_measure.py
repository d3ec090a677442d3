"""How good predictions are on this machine: random configurations are predicted, written down, and only then measured.

    weft calibrate                                        # what predictions go by; nothing is fitted to what follows
    python benchmarks/predict_then_measure.py predict     # writes benchmarks/own_machine.json
    python benchmarks/predict_then_measure.py measure     # measures the next of them, and again until all are done
    python benchmarks/predict_then_measure.py table

A configuration is an operator, shape, dtype, packed or plain weight, emulated link or none, algorithm, and chunk size. Its
predicted time is compared with the least of the measured runs, as the calibration's figures are the least of theirs. And the way
that is predicted to be the fastest is compared with the one that is measured to be.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from weft import launch, machine, predict
from weft.bench import tune
from weft.predict import Candidate, Case

FILE = Path(__file__).parent / "own_machine.json"
CONFIGURATIONS, SEED, RANKS, RUNS = 40, 2026, 2, 9
AT_ONCE = 10  # that are measured by one call
FLOPS = 3e9  # at most, so that all of it takes some minutes


def configurations() -> list[tuple[Case, tuple[float, float] | None, random.Random]]:
    """Random cases, and dice for how to do each."""
    dice = random.Random(SEED)
    found = []
    while len(found) < CONFIGURATIONS:
        operator = dice.choice(predict.OPERATORS)
        m, k, n = (int(2 ** dice.uniform(low, high)) for low, high in ((3, 11), (8, 11.3), (8, 11.3)))
        dtype, packed = dice.choice(("float32", "bfloat16", "float16", "float64")), dice.random() < 0.5
        link = (round(2 ** dice.uniform(0.5, 4), 2), 0.0) if dice.random() < 0.5 else None
        if 2 * m * k * n <= FLOPS:
            case = predict.case(operator, RANKS, (m, k, n), dtype, packed=packed)
            found.append((case, link, random.Random(dice.random())))
    return found


def foretell() -> list[dict[str, Any]]:
    """Predict every configuration in a way drawn at random, and which way is the fastest."""
    mine = machine.load(machine.THIS)
    rows = []
    for case, link, dice in configurations():
        on = mine.emulating(*link) if link else mine
        way = dice.choice(predict.candidates(case, on))
        ways = tune.ways(case, on)
        found = {"way": way, "predicted_ms": 1e3 * predict.time(case, way, on)}
        best = [{"way": way, "predicted_ms": 1e3 * seconds} for way, seconds in ways]
        rows.append({"case": case._asdict(), "link": link, **found, "best": best})
    return rows


def measure(rows: list[dict[str, Any]]) -> None:
    """Add what is measured of the next configurations."""
    questions = []
    rows = [row for row in rows if "least_ms" not in row][:AT_ONCE]
    for row in rows:
        case = Case(**{**row["case"], "rows": tuple(row["case"]["rows"])})
        asked = dict.fromkeys([Candidate(*row["way"]), *(Candidate(*best["way"]) for best in row["best"])])
        questions.append(tune.Question(case, [*asked], tuple(row["link"]) if row["link"] else None))
    answers = launch(tune.measure, RANKS, questions, RUNS, 1, threads=1)[0]
    for row, found in zip(rows, answers, strict=True):
        by_way = {answer.way: answer for answer in found}
        for entry in (row, *row["best"]):
            answer = by_way[Candidate(*entry["way"])]
            entry |= {"least_ms": answer.least, "median_ms": answer.median}


def table(rows: list[dict[str, Any]]) -> str:
    """The measured configurations as a Markdown table."""
    lines = ["| configuration | way | predicted | measured (median) | error | predicted best / best |", "|---|---|---|---|---|---|"]
    errors, misses = [], []
    for row in rows:
        case = row["case"]
        where = f"{row['link'][0]:g} Gbit/s" if row["link"] else "shared memory"
        size, lies = f"{sum(case['rows'])}x{case['k']}x{case['n']}", "packed" if case["packed"] else "plain"
        what = f"{case['operator']} {size} {case['dtype']} {lies}"
        errors.append(100 * (row["predicted_ms"] / row["least_ms"] - 1))
        misses.append(100 * (row["best"][0]["least_ms"] / min(best["least_ms"] for best in row["best"]) - 1))
        way = f"{Candidate(*row['way'])}, {row['way'][1]} rows"
        times = f"{row['predicted_ms']:.3f} ms | {row['least_ms']:.3f} ({row['median_ms']:.3f})"
        lines.append(f"| {what}, {where} | {way} | {times} | {errors[-1]:+.0f} % | {misses[-1]:+.0f} % |")
    mean, worst = sum(map(abs, errors)) / len(errors), max(map(abs, errors))
    right = sum(miss <= 5 for miss in misses)
    lines += ["", f"Mean error **{mean:.1f} %**, worst **{worst:.0f} %**; the way predicted to be the fastest is within 5 % of the"]
    return "\n".join([*lines, f"fastest measured one in **{right} of {len(rows)}** configurations."])


def main() -> None:
    """Do what is asked for."""
    step = sys.argv[1] if len(sys.argv) == 2 else ""
    if step not in ("predict", "measure", "table"):
        sys.exit(f"{__doc__}\nexpected predict, measure or table")
    rows = foretell() if step == "predict" else json.loads(FILE.read_text())
    if step == "measure":
        measure(rows)
    if step == "table":
        print(table(rows))
    else:
        FILE.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{step}: {sum('least_ms' in row for row in rows)} of {len(rows)} configurations in {FILE.name} are measured")


if __name__ == "__main__":
    main()
