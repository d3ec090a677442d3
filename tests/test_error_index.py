"""docs/errors.md and the source have the same messages: each that is listed exists, and each error
that a user can meet is listed.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import weft.errors

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/errors.md").read_text()
ROWS = re.findall(r"^\| `([^`]+)`", PAGE, re.MULTILINE)
OF_OTHERS = {  # torch's and Python's
    "ColwiseParallel currently only support nn.Linear and nn.Embedding!",
    "torch.distributed.all_gather_into_tensor is deprecated",
    "World(rank=0, ranks=1)",
    *(
        f"… got an unexpected keyword argument '{keyword}'"
        for keyword in ("async_op", "src", "group")
    ),
    "… takes 1 positional argument but 2 were given",
}
OF_WEFT = [
    name
    for name, kind in vars(weft.errors).items()
    if isinstance(kind, type) and issubclass(kind, weft.errors.WeftError)
]
ERRORS = (
    "TypeError",
    "ValueError",
    "RuntimeError",
    "ImportError",
    "OSError",
    "NotImplementedError",
    "FileNotFoundError",
    "ModuleNotFoundError",
    "AttributeError",
    *OF_WEFT,
)
# messages between ranks, checks of weft's own tables, and options of the command, whose boxes are
# described by a paragraph
INTERNAL = {
    "cli",
    "gpu/kernels/tiles.py",
    "engines/network.py",
    "engines/program.py: does not pause at instruction",
    "engines/reference.py",
    "ops/all_gather_matmul.py: the gradient of a weight needs the gathered a: pass keep=True",
    "measure/mutation.py",
    "ops/operator.py",
    "plan/messages.py",
    "plan/trace.py",
    "predict/__init__.py",
    "predict/simulator.py",
    "schedules/workload.py",
    "world/control.py",
    "world/listener.py: a port is from 0 to 65535; got",
    "world/relay.py",
    "world/remote.py",
    "world/tcp.py",
    "world/wire.py",
    "weft_bench",
}


def pieces(node):
    """The fixed parts of a message in the source."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [part.value for part in node.values if isinstance(part, ast.Constant)]
    return []


@cache
def trees():
    return {
        str(path.relative_to(root)): ast.parse(path.read_text())
        for root, package in ((ROOT / "weft", "."), (ROOT / "bench", "weft_bench"))
        for path in sorted((root / package).rglob("*.py"))
    }


@cache
def source():
    """All fixed parts of all texts in Python and C++, one a line."""
    python = (
        piece for tree in trees().values() for node in ast.walk(tree) for piece in pieces(node)
    )
    native = (
        "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', literals[0]))
        for path in sorted((ROOT / "native").rglob("*.?pp"))
        for literals in re.finditer(r'(?:"(?:[^"\\\n]|\\.)*"\s*)+', path.read_text())
    )
    return "\n".join([*python, *native])


@pytest.mark.parametrize("message", sorted({*ROWS} - OF_OTHERS))
def test_a_listed_message_is_in_the_source(message):
    parts = re.split(r"…|[;:,)] ", message)  # it may be composed at its punctuation
    fixed = [part.strip() for part in parts if re.search(r"\w{3}", part)]
    assert fixed, "only placeholders"
    missing = [part for part in fixed if part not in source()]
    assert not missing


def raised():
    """The file and the longest fixed part of the message of each error that is made with one."""
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                fixed = max(pieces(node.args[0]), key=len, default="").strip()
                if name in ERRORS and re.search(r"\w{3}", fixed):
                    yield file, fixed


def is_internal(file, fixed):
    return any(
        each == f"{file}: {fixed}" or each == file or file.startswith(f"{each}/")
        for each in INTERNAL
    )


def test_every_error_is_listed():
    listed = "\n".join(ROWS)
    assert not [
        f"{file}: {fixed}"
        for file, fixed in raised()
        if fixed not in listed and not is_internal(file, fixed)
    ]


def test_every_class_of_errors_is_described():
    assert len(OF_WEFT) >= 6
    for name in OF_WEFT:
        assert re.search(rf"`(weft\.)?{name}`", PAGE), name
