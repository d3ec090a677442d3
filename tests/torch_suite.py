"""torch's own suite for backends of torch.distributed, on weft: ``make torch-suite`` (the number of
ranks is WORLD_SIZE).

Tests that the suite skips by the name of the backend, although weft can pass them, run too.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from torch.testing._internal import common_distributed

import weft  # noqa: F401  (torch knows it from then on)

os.environ.setdefault("BACKEND", "weft")
os.environ.setdefault("WORLD_SIZE", "2")
_folder = tempfile.TemporaryDirectory(prefix="weft-torch-suite-")
os.environ["TEMP_DIR"] = _folder.name

for features in common_distributed.DistTestCases.backend_feature.values():
    features.add("weft")
if int(os.environ["WORLD_SIZE"]) > 2:  # the suite calls fewer than 8 ranks small
    common_distributed.skip_if_small_worldsize = lambda function: function

LIKE_WEFT = ("gloo", "mpi", "weft")
RELAXED = {
    'BACKEND != "gloo"': f"BACKEND not in {LIKE_WEFT}",
    'BACKEND == "gloo"': f"BACKEND in {LIKE_WEFT}",
    'BACKEND != "mpi"': f"BACKEND not in {LIKE_WEFT}",
    'require_backend_is_available({"gloo"})': f"require_backend_is_available({LIKE_WEFT})",
    'get("backend_name"), dist.get_backend(group_id)': 'get("backend_name"), "custom"',
}
"""Conditions of the suite, and their replacements for backends that can do the same as weft, and for
the name that DDP logs of every backend that is not torch's.
"""


def _suite() -> ModuleType:
    """The module of the suite, with weft among its backends."""
    spec = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    for old, new in RELAXED.items():
        assert old in source
        source = source.replace(old, new)
    module = sys.modules["torch_distributed_test"] = ModuleType("torch_distributed_test")
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


_module = _suite()


class TestWeft(_module.TestDistBackend, _module.DistributedTest._DistTestBase):
    """All tests of the suite, each on processes of its own."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)
