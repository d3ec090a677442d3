"""Fit the machine profiles to published results, and print the errors of the simulator.

    python benchmarks/fit_machines.py            # prints the tables of errors
    python benchmarks/fit_machines.py --write    # also writes the profiles, and the tables in docs

The fit of each of the `published.SYSTEMS` minimises the sum of squared logarithms of predicted /
published by a pattern search over the logarithms of the parameters. *Leave one out* fits to all
points but one and predicts that one, for every point.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from published import SYSTEMS, Parameters, Point, System

from weft_tools.predict.machine import LinkRate, Machine

HERE = Path(__file__).parent
PROFILES = HERE.parent / "weft" / "predict" / "machines"
PAGE = HERE / "published_errors.md"
BEGIN, END = "<!-- tables of fit_machines.py -->", "<!-- end of tables -->"


def predict(system: System, parameters: Parameters, point: Point) -> float:
    """The predicted figure."""
    return point.predicted(system.machine(parameters, point.variant))


def fit(system: System, points: Sequence[Point]) -> Parameters:
    """The parameters with the least squared logarithmic error."""

    def error(parameters: Parameters) -> float:
        return sum(
            math.log(predict(system, parameters, point) / point.published) ** 2 for point in points
        )

    best = dict(system.begin)
    least = error(system.begin)
    step = 0.2
    while step > 0.005:
        improved = False
        for name in best:
            for factor in (math.exp(step), math.exp(-step)):
                tried = best | {name: best[name] * factor}
                if name.endswith("slowdown") and tried[name] < 1:
                    tried[name] = 1.0
                if (found := error(tried)) < least * (1 - 1e-3):
                    best = tried
                    least = found
                    improved = True
                    break
        step = step if improved else step / 2
    return best


class Errors(NamedTuple):
    """The errors of the predictions of a system's points, in percent: fitted to all points, and to
    all but the predicted one; and of its tests, to which nothing is fitted.
    """

    system: System
    parameters: Parameters
    fitted: list[float]
    left_out: list[float]
    tested: list[float]


def measure(system: System) -> Errors:
    """Fit a system, with and without each of its points."""

    def error(parameters: Parameters, point: Point) -> float:
        return 100 * (predict(system, parameters, point) / point.published - 1)

    best = fit(system, system.points)
    left_out = []
    for point in system.points:
        others = [other for other in system.points if other is not point]
        left_out.append(error(fit(system, others), point))
    fitted, tested = (
        [error(best, point) for point in points] for points in (system.points, system.tests)
    )
    return Errors(system, best, fitted, left_out, tested)


def table(errors: Errors) -> str:
    """The errors as a Markdown table."""
    system, parameters, fitted, left_out, tested = errors
    values = ", ".join(f"{name} {value:.4g}" for name, value in parameters.items())
    title = (
        f"**{system.title}**: {len(parameters)} parameters from {len(system.points)} figures "
        f"({values})"
    )
    lines = [fill(title, 100, break_on_hyphens=False), ""]
    lines += ["| | published | predicted | error | left out |", "|---|---|---|---|---|"]
    for point, error, left in zip(system.points, fitted, left_out, strict=True):
        lines.append(f"{_cells(point, error)} | {left:+.1f} % |")
    lines.append(f"| mean of absolute errors | | | {_mean(fitted)} | {_mean(left_out)} |")
    if tested:
        lines += [
            f"{_cells(point, error)} | not fitted |"
            for point, error in zip(system.tests, tested, strict=True)
        ]
        lines.append(f"| mean of those not fitted | | | {_mean(tested)} | |")
    return "\n".join(lines)


def _cells(point: Point, error: float) -> str:
    published, predicted = (
        f"{value:,.0f}" if point.cycles else f"{1e3 * value:.3f} ms"
        for value in (point.published, point.published * (1 + error / 100))
    )
    return f"| {point.label} | {published} | {predicted} | {error:+.1f} %"


def _mean(errors: Sequence[float]) -> str:
    return f"**{sum(map(abs, errors)) / len(errors):.1f} %**"


def profile_of(system: System) -> str:
    """The name of the profile that a system's figures go to."""
    return system.of or system.machine(system.begin, "").name


def profile(all_errors: Sequence[Errors], name: str) -> str:
    """The TOML profile of a machine, with the residuals of the fit."""
    own = [
        errors
        for errors in all_errors
        if profile_of(errors.system) == name and errors.system.shipped
    ]
    lines = [
        "# Written by benchmarks/fit_machines.py --write; see docs/prediction.md and "
        "tools/weft_tools/predict/machine.py."
    ]
    residuals: dict[str, float] = {}
    machine = None
    variants = []
    for system, parameters, fitted, *_ in own:
        residuals |= {
            point.label: round(error, 1) for point, error in zip(system.points, fitted, strict=True)
        }
        if not system.of:
            machine = system.machine(parameters, "")
        of_system = (
            dict.fromkeys(point.variant for point in system.points)
            if system.of
            else system.variants
        )
        variants += [(variant, system.machine(parameters, variant)) for variant in of_system]
    assert machine is not None
    plain = _entries(machine, "residuals", "products")
    lines += [f"{key} = {value}" for key, value in plain.items()]
    for name, product in machine.products.items():
        lines += [
            "",
            f"[products.{name}]",
            *(
                f"{key} = {_toml(value)}"
                for key, value in asdict(product).items()
                if value is not None
            ),
        ]
    for variant, other in variants:
        changed = {
            key: value
            for key, value in _entries(other, "residuals", "products", "name").items()
            if plain.get(key) != value
        }
        lines += [
            "",
            f"[variants.{variant}]",
            *(f"{key} = {value}" for key, value in changed.items()),
        ]
    lines += ["", "[residuals]  # percent by which predictions miss the published figures"]
    return (
        "\n".join([*lines, *(f'"{label}" = {error}' for label, error in residuals.items())]) + "\n"
    )


def _entries(machine: Machine, *but: str) -> dict[str, str]:
    """A machine's fields as TOML, without fields that have their default."""
    default = Machine("", {}, (), 0, 0)
    values = {
        key: value
        for key, value in vars(machine).items()
        if key not in but and value != getattr(default, key)
    }
    return {key: _toml(value) for key, value in values.items()}


def _toml(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.5g}"
        case tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case LinkRate():
            fields = {key: field for key, field in asdict(value).items() if field}
            return (
                "{ " + ", ".join(f"{key} = {_toml(field)}" for key, field in fields.items()) + " }"
            )
        case _:
            return json.dumps(value)


def main() -> None:
    """Print the tables; with --write also write them, and the profiles."""
    all_errors = []
    for make in SYSTEMS:
        all_errors.append(errors := measure(make()))
        print(table(errors), end="\n\n", flush=True)
    if "--write" in sys.argv[1:]:
        for name in dict.fromkeys(profile_of(errors.system) for errors in all_errors):
            (PROFILES / f"{name}.toml").write_text(profile(all_errors, name))
        page = PAGE.read_text()
        before = page[: page.index(BEGIN) + len(BEGIN)]
        after = page[page.index(END) :]
        PAGE.write_text("\n\n".join([before, *map(table, all_errors), after]))


if __name__ == "__main__":
    main()
