"""weft's styles in transformers' registry, and versions of transformers that have none."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType

import pytest
from support.ranks import on_ranks

import weft
from weft.huggingface.styles import Style


def test_every_style_is_replaced_once():
    pytest.importorskip("transformers", "5.23", reason="the registry is that of transformers 5.23")
    on_ranks(_replaced_once, 1, context=contextlib.nullcontext)


def _replaced_once(_):
    from transformers.distributed import (
        expert_parallel,  # noqa: F401, which has styles of its own
        tensor_parallel,
        utils,
    )

    styles = tensor_parallel.ALL_PARALLEL_STYLES
    before = dict(styles.items())
    weft.huggingface.enable()
    weft.huggingface.enable()
    assert utils.get_distributed_backend("cpu") == "weft"
    assert utils.get_distributed_backend("cuda") == "nccl"
    assert list(styles) == list(before)
    for name, style in styles.items():
        assert type(style) is Style
        assert style.style is before[name]
    for name in ("colwise", "colwise_gather_output", "rowwise", "embedding_rowwise"):
        assert name in styles


@pytest.fixture
def installed(monkeypatch):
    """Install a transformers without content, of a version; None removes transformers."""

    def install(version):
        for name in [*sys.modules]:
            if name.startswith("transformers."):
                monkeypatch.delitem(sys.modules, name)
        fake = None if version is None else ModuleType("transformers")
        if fake:
            fake.__version__, fake.__path__ = version, []
        monkeypatch.setitem(sys.modules, "transformers", fake)

    return install


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, r"needs transformers 5\.23 or newer \(pip install transformers accelerate\)"),
        ("4.57.1", r"needs transformers 5\.23 or newer; got 4\.57\.1"),
        ("5.9.0.dev0", r"needs transformers 5\.23 or newer; got 5\.9\.0\.dev0"),
        ("6.0.0", r"transformers 6\.0\.0 keeps its parallel styles elsewhere than 5\.23 and 5\.24"),
    ],
)
def test_unsupported_versions_are_named(installed, version, words):
    installed(version)
    with pytest.raises(ImportError, match=words):
        weft.huggingface.enable()
