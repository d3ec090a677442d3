"""docs/tuning.md: the table of the constants that decide speed, compared with the code."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import math
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from weft.cli import app
from weft.cli.values import parse_sizes

ROOT = Path(__file__).parent.parent
PACKAGES = [
    "ops",
    "kernels",
    "schedules",
    "engines",
    "process_group",
    "world",
    "predict",
    "measure",
]
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
MATH = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: a**b,
    ast.LShift: lambda a, b: a << b,
}

# Numbers within expressions, by a pattern with one group.
INLINE = {
    "native/execute/lane_thread.cpp: PR_SET_TIMERSLACK": r"prctl\(PR_SET_TIMERSLACK, (\d+)\)",
    "native/execute/emulated_link.hpp: PR_SET_TIMERSLACK": r"PR_SET_TIMERSLACK, on\(\) \? (\d+)",
    "native/kernels/stores.cpp: next_": r"std::max<size_t>\((\d+), \(size_t\{64\} << 20\) / bytes",
}

# Constants that are no tuning, by the reason.
EXCEPTIONS = {
    "protocol: both ends of a message, or all ranks, must agree on it": """
        native/memory/mesh.cpp: kLongest
        weft/process_group/group.py: _TAGS
        weft/process_group/messages.py: _HEADER
        weft/world/control.py: LONGEST
        weft/world/relay.py: _TEXT
        weft/world/remote.py: _LARGEST_ITEM
        weft/world/remote.py: _COUNTER
        weft/world/rendezvous.py: _MESSAGE_BYTES
        weft/world/rendezvous.py: _TAG
    """,
    "format: numbers of dtypes, of the kernel's interfaces and of encodings": """
        native/execute/program.hpp: kAnyBlock
        native/execute/program.hpp: kRow
        weft/gpu/kernels/clock.py: TICK
        native/execute/deferred_work.hpp: kNone
        native/python/call_cache.hpp: kNone
        native/python/call_cache.hpp: kPrepared
        native/python/call_cache.hpp: kSeparate
        weft/gpu/kernels/signals.py: COMPARISONS
        weft/engines/network.py: _WRITABLE
        weft/engines/reference.py: NAN
        weft/kernels/int8.py: _LARGEST
        weft/predict/rates.py: ITEMSIZE
        weft/world/listener.py: _SIOCGIFADDR
        weft/world/signals.py: LARGEST
    """,
    "hardware: cache lines, pages, the widest access of a thread": """
        native/execute/binding.cpp: kPage
        native/kernels/stores.cpp: kPage
        native/kernels/strided.cpp: kLine
        weft/gpu/kernels/all_gather.py: VECTOR
        weft/gpu/kernels/all_gather.py: _LONG
        weft/gpu/kernels/symmetric.py: COUNTER
        weft/world/signals.py: COUNTER_BYTES
    """,
    "structure: the algorithm is for this number": """
        native/execute/program.hpp: kEagerSets
        native/memory/calls.hpp: kBytes
        native/kernels/stores.cpp: kSizes
        weft/gpu/kernels/tiles.py: SOURCES
        weft/schedules/device_options.py: TILES
        weft/gpu/options.py: _STREAMS
    """,
    "results: with other numbers results, or their bits, would be wrong": """
        native/memory/calls.hpp: kHeaders
        weft/engines/engine.py: OUTSTANDING
        weft/kernels/methods.py: _LEAST
        weft/ops/agreement.py: _LONGEST
        weft/ops/fused.py: _SAME_BITS
    """,
    "time limit: seconds until something counts as failed, or between checks whether it has": """
        native/kernels/clock.hpp: kLongestWait
        native/kernels/clock.hpp: kStopped
        native/memory/calls.hpp: kSecondTry
        native/memory/signals.hpp: kSlice
        native/memory/transfers.hpp: kNever
        native/memory/transfers.hpp: kForever
        weft/gpu/counters.py: _POLL_SECONDS
        weft/gpu/kernels/symmetric.py: MAX_POLLS
        weft/gpu/kernels/symmetric.py: _POLLS_PER_SECOND
        weft/engines/engine.py: _STOP_SECONDS
        weft/engines/network.py: _POLL_SECONDS
        weft/measure/fuzz.py: _TIMEOUT
        weft/measure/timing.py: TIMEOUT
        weft/process_group/group.py: _DETECTION
        weft/process_group/messages.py: _LIVENESS
        weft/world/listener.py: _RETRY
        weft/ops/between_hosts.py: _LOOK
        weft/ops/between_hosts.py: _NOTICED
        weft/ops/signalling.py: _FOREVER
        weft/world/lanes.py: _LOOK
        weft/world/relay.py: _LINGER
        weft/world/relay.py: _NOTICED
        weft/world/details.py: _ANSWERS
        weft/world/launcher.py: _LONG
        weft/world/reports.py: _PEER_ENDS
        weft/world/stopped.py: _NOTICED
        weft/world/stopped.py: _RAISED
        weft/world/rendezvous.py: STARTING
        weft/world/rendezvous.py: _GIVE_UP
        weft/world/rendezvous.py: _NAMED
        weft/world/rendezvous.py: _PATIENCE
        weft/world/rendezvous.py: _RETRY
        weft/world/world.py: _TIMEOUT
    """,
    "capacity: more than programs need; bounds memory": """
        native/execute/executor.hpp: kNames
        native/memory/transfers.hpp: kOutstanding
        native/python/call_cache.hpp: Computation::kMost
        native/python/call_cache.hpp: CallCache::kMost
        weft/engines/engine.py: _CACHED
        weft/world/listener.py: _LISTEN_BACKLOG
        weft/world/flight.py: _PEER_CALLS
        weft/world/flight.py: _WORLDS
        weft/world/tcp.py: _BUFFERS
        weft/world/listener.py: _UNIDENTIFIED
    """,
    "measurement: sizes and rounds at which a machine or a result is examined": """
        weft/engines/equivalence.py: COLUMNS
        weft/engines/equivalence.py: LARGEST
        weft/engines/equivalence.py: RANDOM_ORDERS
        weft/engines/equivalence.py: SETTINGS
        weft/engines/equivalence.py: TOGETHER
        weft/engines/recording.py: _ROUNDS
        weft/measure/calibrate.py: _ASLEEP_US
        weft/measure/calibrate.py: _COLUMNS
        weft/measure/calibrate.py: _COPIED
        weft/measure/calibrate.py: _DELAYS
        weft/measure/calibrate.py: _GBPS
        weft/measure/calibrate.py: _MESSAGES
        weft/measure/calibrate.py: _PASSES
        weft/measure/calibrate.py: _PRODUCT
        weft/measure/calibrate.py: _ROUNDS
        weft/measure/calibrate.py: _ROW
        weft/measure/calibrate.py: _ROWS
        weft/measure/calibrate.py: _SENT
        weft/measure/accumulation.py: _PRIME
        weft/measure/calibrate.py: _WARM
        weft/measure/calibrate.py: _WIDTHS
        weft/measure/fuzz.py: POOL
        weft/measure/fuzz.py: _BATCH
        weft/measure/fuzz.py: _CALLS
        weft/measure/fuzz.py: _MULTIPLIED
        weft/measure/fuzz.py: _NUMBERS
        weft/measure/fuzz.py: _ROWS
        weft/measure/fuzz.py: _WIDEST
        weft/measure/timing.py: BUDGET
        weft/measure/timing.py: FEWEST
        weft/gpu/tuning.py: _COPYING
        weft/gpu/tuning.py: _LINKS
        weft/measure/tune.py: _PIECES
        weft/gpu/tuning.py: _SHARES
        weft/predict/answers.py: _WORTH
    """,
}
EXCEPTED = [
    name.strip() for names in EXCEPTIONS.values() for name in names.split("\n") if name.strip()
]


class Row(NamedTuple):
    """A row of the table; `name` is "path: constant", the path from the root."""

    name: str
    value: str
    unit: str
    decides: str
    machine: str
    date: str
    command: str
    gain: str


def rows():
    """All rows of the tables."""
    found = []
    for line in (ROOT / "docs/tuning.md").read_text().splitlines():
        if line.startswith("| `"):
            name, value, *others = (cell.strip() for cell in line.strip("|").split(" | "))
            path = name.strip("` ")
            path = path if path.startswith("native/") else f"weft/{path}"
            found.append(Row(path, value.strip("`"), *others))
    return found


ROWS = rows()


class NotANumber(Exception):
    """An expression that is no constant number, tuple or mapping of numbers."""


def evaluated(node, path=None):
    """The number, or the tuple or mapping of numbers, of a Python expression. Names are constants of
    the module at `path`.
    """
    match node:
        case ast.Constant(bool() | int() | float() as value):
            return value
        case ast.UnaryOp(ast.USub(), operand):
            return -evaluated(operand, path)
        case ast.BinOp(left, op, right) if type(op) in MATH:
            return MATH[type(op)](evaluated(left, path), evaluated(right, path))
        case ast.Tuple(elts) | ast.List(elts) if elts:
            return tuple(evaluated(each, path) for each in elts)
        case ast.Dict(keys, values) if any(isinstance(key, ast.Constant) for key in keys):
            return {
                ast.literal_eval(key): evaluated(value, path)
                for key, value in zip(keys, values, strict=True)
                if isinstance(key, ast.Constant)
            }
        case ast.IfExp(_, body, orelse):
            return evaluated(body, path), evaluated(orelse, path)
        case ast.Name(name) if path and name.isupper():
            value = getattr(importlib.import_module(module_of(path)), name)
            if isinstance(value, int | float):
                return value
    raise NotANumber(ast.dump(node))


def module_of(path):
    return path.removesuffix(".py").replace("/", ".")


@functools.cache
def python_constants(path):
    """The numeric constants of a module, and the tuples of defaults of its records."""
    found = {}
    for statement in ast.parse((ROOT / path).read_text()).body:
        match statement:
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), _, value):
                pairs = [(name, value)]
            case ast.Assign([ast.Tuple(names)], ast.Tuple(values)):
                pairs = [
                    (name.id, value)
                    for name, value in zip(names, values, strict=True)
                    if isinstance(name, ast.Name)
                ]
            case _:
                continue
        for name, value in pairs:
            if re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name):
                with contextlib.suppress(NotANumber):
                    found[name] = evaluated(value, path)
    return found


@functools.cache
def defaults(path, record):
    """The defaults of all fields of a class in a module."""
    for statement in ast.parse((ROOT / path).read_text()).body:
        if isinstance(statement, ast.ClassDef) and statement.name == record:
            fields = [f for f in statement.body if isinstance(f, ast.AnnAssign)]
            return tuple(evaluated(field.value, path) for field in fields)
    raise AssertionError(f"{path} has no class {record}")


def from_cpp(text):
    """The value of a C++ expression; None if it is no number that this function can evaluate."""
    text = re.sub(r"std::max\(([^,]+), cache_share\(\)\)", r"\1", text.strip())
    text = re.sub(r"(?:size_t|u?int\d+_t)\{([^}]+)\}", r"\1", text).replace("'", "")
    try:
        return evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, NotANumber):
        return None


@functools.cache
def cpp_constants(path):
    """The numeric constants of a source file: those of a class are named with it, too."""
    text = re.sub(r"//.*", "", (ROOT / path).read_text())
    found = {}
    statement = r"(?:constexpr|static const)\s+(?!bool\b)[\w:]+\s+(k[A-Z]\w*\s*=[^;]*);"
    for declared in re.finditer(statement, text):
        records = re.findall(r"\b(?:class|struct) (\w+)[^;{()]*\{", text[: declared.start()])
        for each in re.split(r",\s*(?=k[A-Z]\w*\s*=)", declared[1]):
            name, value = re.split(r"\s*=\s*", each, maxsplit=1)
            found[(records or [""])[-1], name] = from_cpp(value)
    return found


def names_of_cpp(path):
    """The constants' names, with their class if the file has several of a name."""
    constants = cpp_constants(path)
    names = [name for _, name in constants]
    return {f"{record}::{name}" if names.count(name) > 1 else name for record, name in constants}


def value_of(row):
    """The value in the code."""
    path, _, name = row.name.partition(": ")
    if row.name in INLINE:
        [found] = re.findall(INLINE[row.name], (ROOT / path).read_text())
        return int(found)
    if path.startswith("native/"):
        record, _, name = name.rpartition("::")
        [found] = [
            value
            for (scope, each), value in cpp_constants(path).items()
            if each == name and record in ("", scope)
        ]
        return found
    record, _, attribute = name.partition(".")
    if attribute:  # of a record with its defaults
        return getattr(getattr(importlib.import_module(module_of(path)), record)(), attribute)
    if not name.isupper():
        return defaults(path, name)
    return python_constants(path)[name]


def scaled(row):
    """The value in the table, in the unit of the code: bytes, and seconds or in native code
    nanoseconds.
    """
    value, unit = evaluated(ast.parse(row.value, mode="eval").body), UNITS.get(row.unit, 1)
    if unit == 1:
        return value
    return value * unit * (1e9 if unit < 1 and row.name.startswith("native/") else 1)


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_the_table_has_the_value_of_the_code(row):
    stated, actual = scaled(row), value_of(row)
    if isinstance(actual, int | float):
        assert math.isclose(stated, actual, rel_tol=1e-12)
    else:
        assert stated == actual


def test_every_constant_is_in_the_table_or_excepted_once():
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for package in PACKAGES
        for path in (ROOT / "weft" / package).rglob("*.py")
        for name in python_constants(str(path.relative_to(ROOT)))
    } | {
        f"{path.relative_to(ROOT)}: {name}"
        for pattern in ("*.cpp", "*.hpp")
        for path in (ROOT / "native").rglob(pattern)
        if "tests" not in path.parts
        for name in names_of_cpp(str(path.relative_to(ROOT)))
    }
    listed = [row.name for row in ROWS] + EXCEPTED
    assert not [name for name in listed if listed.count(name) > 1]
    missing = sorted(found.difference(listed))
    assert not missing, "neither in docs/tuning.md nor in EXCEPTIONS"
    removed = sorted({*EXCEPTED} - found)
    assert not removed, "exceptions that are no constants"
    assert len(ROWS) > 60


@pytest.mark.parametrize("command", sorted({row.command for row in ROWS}))
def test_the_commands_of_the_table_exist(command):
    words = shlex.split(re.sub(r"^torchrun … -m ", "", command.strip("`")))
    if words[:3] == ["python", "-m", "timeit"]:
        _, setup, statement = words[3:]
        exec(f"{setup}\n{statement}", {})
        return
    if words[0] != "weft":
        [script] = [word for word in words if "/" in word]
        assert (ROOT / script).exists()
        return
    found, context, words = typer.main.get_command(app), None, words[1:]
    while hasattr(found, "commands"):
        context = type(found).context_class(found, parent=context, info_name=found.name)
        found, words = found.get_command(None, words[0]), words[1:]
    options = found.make_context(found.name, words, parent=context).params
    assert parse_sizes(options.get("sizes") or "8")


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_every_row_states_its_origin(row):
    assert row.decides
    assert row.gain
    assert row.machine
    assert re.fullmatch(r"2026-\d\d-\d\d( or before)?|not recorded", row.date)


def test_constants_that_depend_on_each_other_agree():
    """Equal numbers, and limits of limits, that the code states in two places."""
    from weft.checks import LONGEST as LONGEST_WAIT

    number = {
        name: value
        for path in (
            "native/kernels/clock.hpp",
            "native/memory/calls.hpp",
            "native/memory/mesh.cpp",
        )
        for (_, name), value in cpp_constants(path).items()
    }

    def python(path, name):
        return python_constants(f"weft/{path}")[name]

    assert number["kLongestWait"] == LONGEST_WAIT
    # a rank may be this number of calls ahead of a peer, which may have as many outstanding (H3)
    assert 2 * python("engines/engine.py", "OUTSTANDING") <= number["kHeaders"]
    # a longer message than the core sends is recognized
    assert python("world/control.py", "LONGEST") == number["kLongest"] + 1
    # a block of a product has the bits of all its rows from the same number of rows on
    assert python("ops/fused.py", "_SAME_BITS") == python("kernels/methods.py", "_LEAST")
    # a counter has a cache line
    line = python("world/signals.py", "COUNTER_BYTES")
    assert 8 * python("gpu/kernels/symmetric.py", "COUNTER") == line
    counter = (ROOT / "native/memory/signals.hpp").read_text()
    assert f"struct alignas({line}) Counter" in counter
    # variants are measured only on links that may be worth hiding, and kept apart from noise
    assert python("ops/fused.py", "_MEASURED_FROM") < python("ops/fused.py", "_WORTH_HIDING")
