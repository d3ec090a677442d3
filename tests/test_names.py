"""The names that `import weft` offers, without having loaded what they stand for."""

from __future__ import annotations

import subprocess
import sys


def said(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def test_names_are_listed_before_they_are_loaded():
    listed = said(
        "import rlcompleter, sys, weft; print(dir(weft), 'torch' in sys.modules, "
        "rlcompleter.Completer().complete('weft.laun', 0))"
    )
    assert "'all_reduce'" in listed
    assert "'nn'" in listed
    assert "'importlib'" not in listed
    assert "] False weft.launch(" in listed


def test_layers_are_found_and_names_that_are_nearly_right():
    listed = said("import weft; print(weft.nn.ColwiseParallel.__name__); weft.allreduce")
    assert listed.startswith("ColwiseParallel")
    assert "module 'weft' has no attribute 'allreduce'. Did you mean: 'all_reduce'?" in listed
