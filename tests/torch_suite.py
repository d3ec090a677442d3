"""torch's own suite for backends of torch.distributed, on weft: ``make torch-suite`` (the number of ranks is WORLD_SIZE).

What it skips for the name of the backend, though weft has it, is run too.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

os.environ.setdefault("BACKEND", "weft")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())

import torch
from torch.testing._internal.common_distributed import DistTestCases

import weft  # noqa: F401  (registers the backend)

for feature in ("ddp", "subgroup", "cuda"):
    DistTestCases.backend_feature[feature].add("weft")
DistTestCases.backend_feature["plugin"].add("weft")


def _suite() -> ModuleType:
    """The module of the suite, with weft wherever it wants gloo by name."""
    spec = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    for old, new in (
        ('BACKEND != "gloo"', 'BACKEND not in ("gloo", "weft")'),
        ('BACKEND == "gloo"', 'BACKEND in ("gloo", "weft")'),
        ('require_backend_is_available({"gloo"})', 'require_backend_is_available({"gloo", "weft"})'),
    ):
        assert old in source
        source = source.replace(old, new)
    module = sys.modules["torch_distributed_test"] = ModuleType("torch_distributed_test")
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


_module = _suite()


class TestWeft(_module.TestDistBackend, _module.DistributedTest._DistTestBase):
    """All of the suite, each test on processes of its own."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)
