"""The names of `import weft`, which are listed before their modules are loaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from weft_tools.predict.machine import tomllib


def output_of(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@pytest.mark.slow
def test_names_are_listed_before_they_are_loaded():
    listed = output_of(
        "import rlcompleter, sys, weft; print(dir(weft), 'torch' in sys.modules, "
        "rlcompleter.Completer().complete('weft.laun', 0))"
    )
    assert "'all_reduce'" in listed
    assert "'nn'" in listed
    assert "'importlib'" not in listed
    assert "] False weft.launch(" in listed


WITHOUT = "import sys; sys.modules |= dict.fromkeys(('typer', 'rich'));"


@pytest.mark.parametrize("arguments", [["--version"], ["run", "script.py"], []])
def test_the_command_without_its_extra_names_it(arguments):
    code = f"{WITHOUT} import runpy; runpy.run_module('weft', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert 'pip install -e "' in line
    assert "typer, rich" in line


@pytest.mark.slow
def test_the_library_needs_no_extra():
    """Every module is imported without libraries of extras, and without the tools, except
    those of commands, GPUs and vLLM.
    """
    imported = output_of(
        f"""{WITHOUT} sys.modules["triton"] = None
import importlib, pkgutil, weft
for module in pkgutil.walk_packages(weft.__path__, "weft."):
    folder = module.name.split(".")[1]
    if folder not in ("__main__", "cli", "doctor", "gpu", "predict", "torchft", "vllm"):
        importlib.import_module(module.name)
print(weft.all_reduce.__name__, "weft.measure.tune" in sys.modules, "weft_tools" in sys.modules)
"""
    )
    assert imported == "all_reduce True False\n"


def test_layers_are_found_and_misspelt_names_get_a_suggestion():
    listed = output_of("import weft; print(weft.nn.ColwiseParallel.__name__); weft.allreduce")
    assert listed.startswith("ColwiseParallel")
    assert "module 'weft' has no attribute 'allreduce'. Did you mean: 'all_reduce'?" in listed


def test_a_first_call_loads_neither_simulator_nor_measurements():
    """An operator may look up what was measured, but simulates nothing."""
    loaded = output_of(
        """
import sys, torch, weft
with weft.local_world(2) as local:
    print(*local.run(lambda: weft.all_reduce(torch.ones(4))), len(local.run(
        lambda: weft.all_gather_matmul(torch.ones(2, 8), torch.ones(8, 4)))))
tools = {"predict", "measure", "cli", "doctor"}
names = [name.split(".") for name in sys.modules]
print([name for name in names if name[0] == "weft_tools" or name[0] == "weft" and {*name[1:2]} & tools])
"""
    )
    assert loaded == "tensor([2., 2., 2., 2.]) tensor([2., 2., 2., 2.]) 2\n[]\n"


@pytest.mark.slow
def test_threads_may_load_names_at_once():
    loaded = output_of(
        """
import sys, torch, weft
from concurrent.futures import ThreadPoolExecutor
sys.setswitchinterval(1e-5)
with ThreadPoolExecutor(16) as pool:
    print(len([*pool.map(lambda name: getattr(weft, name), reversed(weft.__all__))]) > 40)
"""
    )
    assert loaded == "True\n"


ROOT = Path(__file__).parents[1]
BY_NAME = [("weft.world.backend", "weft.gpu.backend")]
"""The imports of modules by their names that run up: of a backend, which few programs need."""


def layers():
    """The packages of weft from the top down, as the linter has them."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return linter["contracts"][0]["layers"]


def imports_by_name(path):
    """The modules of weft that a file imports by strings."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            text = node.args[0]
            if isinstance(text, ast.JoinedStr):
                text = text.values[0]
            if isinstance(text, ast.Constant) and str(text.value).startswith("weft"):
                yield text.value.rstrip(".")


def test_imports_by_names_run_down_the_house_too():
    """The linter does not see these."""
    floor = {name: at for at, name in enumerate(layers())}
    modules = [*(ROOT / "weft").rglob("*.py")]
    of = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in modules
    }
    arrows = [(one, other) for one, path in of.items() for other in imports_by_name(path)]
    assert arrows
    up = [
        (one, other)
        for one, other in arrows
        if one != "weft"
        and (not other.startswith("weft.") or floor[other.split(".")[1]] < floor[one.split(".")[1]])
    ]
    assert up == BY_NAME
