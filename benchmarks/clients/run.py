"""The tests that other projects have of their own, on gloo and on weft: ``make clients``.

Each client gets an environment of its own in ``.clients``, with the versions of constraints.txt
here. Its tests run twice, unchanged: as they are, on gloo, and with WEFT_REPLACES_GLOO=1. The table
shows what passed; a test that passes on gloo alone is named, and the exit status is 1. ``--json``
keeps all results.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import xml.etree.ElementTree as xml
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".clients"
LIMIT = 3600.0
"""Seconds of all tests of a client on one backend."""

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


class Client(NamedTuple):
    """A project whose tests run: the distributions to install, the function that lays its tests
    into a folder, and the arguments of pytest; `quick` are those of the part that takes few
    minutes.
    """

    name: str
    requirements: tuple[str, ...]
    lay_out: Callable[[Path, Path], None]
    tests: tuple[str, ...]
    quick: tuple[str, ...]


class Outcome(NamedTuple):
    """The result of one test, and its seconds."""

    result: str
    seconds: float


def _from_source(project: str) -> Callable[[Path, Path], None]:
    """Lays out the folder ``tests`` of a source distribution, with our files for it, if any."""

    def lay_out(python: Path, folder: Path) -> None:
        source = folder / "source"
        unbuilt = ("--no-deps", "--no-build-isolation", "--no-binary", project)
        _pip(python, "download", *unbuilt, "--dest", str(source), project)
        (archive,) = source.glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(source, filter="data")
        (unpacked,) = (each for each in source.iterdir() if each.is_dir())
        shutil.move(unpacked / "tests", folder / "tests")
        (folder / "tests/__init__.py").touch()
        for own in (HERE / project).glob("*.py"):
            shutil.copy(own, folder / "tests")
        shutil.rmtree(source)

    return lay_out


def _own(name: str) -> Callable[[Path, Path], None]:
    """Lays out a file of tests from here, for a project that publishes none."""

    def lay_out(python: Path, folder: Path) -> None:
        (folder / "tests").mkdir()
        shutil.copy(HERE / name, folder / "tests")

    return lay_out


def _installed_with_it(plugin: str) -> Callable[[Path, Path], None]:
    """Lays out a plug-in of pytest from here, for tests that a project's wheel has."""

    def lay_out(python: Path, folder: Path) -> None:
        shutil.copy(HERE / plugin, folder)

    return lay_out


_OF_TORCHFT = ("-p", "torchft_on_weft", "--pyargs", "torchft.process_group_test")

CLIENTS = (
    Client(
        "accelerate",
        ("accelerate", "transformers", "datasets", "evaluate", "scikit-learn", "parameterized"),
        _from_source("accelerate"),
        (
            "tests/test_cpu.py",
            "tests/test_grad_sync.py",
            "tests/test_scheduler.py",
            "tests/test_optimizer.py",
        ),
        ("tests/test_cpu.py",),
    ),
    Client(
        "transformers",
        ("transformers", "accelerate", "torchao", "parameterized"),
        _from_source("transformers"),
        ("tests/test_families.py",),
        ("tests/test_families.py", "-k", "tp_forward_0 or ep_forward_0 or fsdp2_save_load"),
    ),
    Client(
        "torchft",
        ("torchft", "parameterized", "opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk"),
        _installed_with_it("torchft_on_weft.py"),
        (*_OF_TORCHFT, "torchft.ddp_test", "torchft.manager_integ_test"),
        (*_OF_TORCHFT, "-k", "NormalGloo or gloo_apis or functional or managed"),
    ),
    Client(
        "lightning",
        ("lightning",),
        _own("test_lightning.py"),
        ("tests/test_lightning.py",),
        ("tests/test_lightning.py",),
    ),
    Client(
        "deepspeed",
        ("numpy", "setuptools", "wheel", "ninja", "deepspeed"),
        _own("test_deepspeed.py"),
        ("tests/test_deepspeed.py",),
        ("tests/test_deepspeed.py", "-k", "zero and 3 or communication"),
    ),
)


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Clients; by default all.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option(help="Few tests of each, in some minutes.")] = False,
    file: Annotated[Path | None, typer.Option("--json", help="Write all results here.")] = None,
) -> None:
    """Run the tests of other projects on gloo and on weft, and compare."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    known = {client.name: client for client in CLIENTS}
    if unknown := {*(names or [])} - {*known}:
        raise typer.BadParameter(f"no client {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in names or known]
    results: dict[str, dict[str, dict[str, Outcome]]] = {}
    with Progress(console=console, transient=True) as progress:
        steps = progress.add_task("", total=3 * len(chosen))
        for client in chosen:
            progress.update(steps, description=f"{client.name}: installing")
            folder = _installed(client)
            progress.advance(steps)
            results[client.name] = {}
            for backend, variable in (("gloo", "0"), ("weft", "1")):
                progress.update(steps, description=f"{client.name}: on {backend}")
                tests = client.quick if quick else client.tests
                results[client.name][backend] = _tested(folder, tests, variable)
                progress.advance(steps)
            if file:
                file.write_text(json.dumps(results, indent=1))
    console.print(_table(results))
    worse = [*_worse(results)]
    for text in worse:
        console.print(f"[bold red]wrong:[/] {escape(text)}", soft_wrap=True)
    raise typer.Exit(bool(worse))


def _installed(client: Client) -> Path:
    """The folder of a client's environment and tests."""
    folder = ENVIRONMENTS / client.name
    done = folder / "installed"
    python = folder / "bin/python"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        _pip(python, "install", "torch", "pytest", "pytest-timeout", *client.requirements)
        client.lay_out(python, folder)
        done.touch()
    subprocess.run([python, "-m", "pip", "uninstall", "-qq", "--yes", "torch-weft"], check=True)
    _pip(python, "install", str(_wheel()))
    return folder


@functools.cache
def _wheel() -> Path:
    """A wheel of this checkout, made once for all clients of a run."""
    folder = ENVIRONMENTS / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    _pip(Path(sys.executable), "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    return wheel


def _pip(python: Path, command: str, *words: str) -> None:
    files = (ROOT / "constraints.txt", HERE / "constraints.txt")
    constraints = [word for file in files for word in ("--constraint", str(file))]
    subprocess.run(
        [python, "-m", "pip", command, "-qq", *constraints, *words],
        check=True,
        stdin=subprocess.DEVNULL,
    )


def _tested(folder: Path, tests: tuple[str, ...], variable: str) -> dict[str, Outcome]:
    """The outcome of each test; of none if pytest ended early."""
    (folder / "pytest.ini").write_text("[pytest]\n")  # in place of this project's settings
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    environment = {**os.environ, "WEFT_REPLACES_GLOO": variable, "OMP_NUM_THREADS": "1"}
    environment["PYTHONHASHSEED"] = "0"  # torchft names its tests by the order of a set
    environment["PATH"] = f"{folder / 'bin'}{os.pathsep}{environment['PATH']}"
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "600")
    log = folder / f"{'weft' if variable == '1' else 'gloo'}.log"
    with log.open("w") as printed:
        subprocess.run(
            [folder / "bin/python", *command, f"--junitxml={report}", *tests],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            timeout=LIMIT,
        )
    return dict(_outcomes(report))


def _outcomes(report: Path) -> Iterator[tuple[str, Outcome]]:
    for case in xml.parse(report).iter("testcase"):
        result = PASSED
        for mark in case:
            if mark.tag in ("failure", "error"):
                result = FAILED
            elif mark.tag == "skipped":
                result = SKIPPED
        name = f"{case.get('classname')}::{case.get('name')}"
        yield name, Outcome(result, float(case.get("time", 0)))


Results = Mapping[str, Mapping[str, Mapping[str, Outcome]]]


def _table(results: Results) -> Table:
    table = Table(title="Tests of other projects, unchanged")
    table.add_column("client")
    for backend in ("gloo", "weft"):
        for column in (PASSED, FAILED, SKIPPED, "s"):
            table.add_column(f"{backend}\n{column}", justify="right")
    for name, by_backend in results.items():
        cells = []
        for backend in ("gloo", "weft"):
            outcomes = by_backend[backend].values()
            counts = [sum(each.result == r for each in outcomes) for r in (PASSED, FAILED, SKIPPED)]
            cells += [*map(str, counts), f"{sum(each.seconds for each in outcomes):.0f}"]
        table.add_row(name, *cells)
    return table


def _worse(results: Results) -> Iterator[str]:
    """The tests that pass on gloo and not on weft, and clients of which none passes."""
    for name, by_backend in results.items():
        if not any(outcome.result == PASSED for outcome in by_backend["gloo"].values()):
            yield f"{name}: no test passes on gloo either (.clients/{name}/gloo.log)"
        for test, outcome in by_backend["gloo"].items():
            here = by_backend["weft"].get(test)
            if outcome.result == PASSED and (here is None or here.result != PASSED):
                why = "did not run" if here is None else here.result
                yield f"{name}: {test} {why} on weft (.clients/{name}/weft.log)"


if __name__ == "__main__":
    typer.run(main)
