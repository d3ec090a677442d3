"""weft hides communication behind compute in tensor-parallel programs.

Public names are imported when they are first used, so that plans can be written and verified
without loading torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from weft import variables
from weft.version import __version__

# an older Python reads this file and the two above, but not the others
if sys.version_info < (3, 10):  # noqa: UP036
    raise ImportError(f"weft needs Python 3.10 or newer; this is {sys.version.split()[0]}")

if TYPE_CHECKING:
    from weft import huggingface, nn
    from weft.compiler.async_tp import enable_async_tp
    from weft.errors import (
        Excluded,
        MismatchError,
        PeerLost,
        PeerTimeout,
        PlanError,
        SymmetricMemoryError,
        WeftError,
    )
    from weft.experts.moe import moe
    from weft.experts.packed import PackedExperts, pack_experts
    from weft.experts.sums import expert_sums
    from weft.experts.weights import Experts
    from weft.explanation import explain
    from weft.kernels.function import weight
    from weft.kernels.int8 import quantize
    from weft.kernels.packed import PackedWeight, pack
    from weft.kernels.weights import PreparedWeight
    from weft.launchers.launcher import launch
    from weft.nn.warmup import warmup
    from weft.ops.all_gather import all_gather, all_gather_async
    from weft.ops.all_gather_matmul import all_gather_matmul
    from weft.ops.all_gather_matmul_reduce_scatter import all_gather_matmul_reduce_scatter
    from weft.ops.all_reduce import all_reduce, all_reduce_async
    from weft.ops.all_to_all import all_to_all, all_to_all_async
    from weft.ops.all_to_all_matmul import all_to_all_matmul
    from weft.ops.all_to_all_matmul_all_to_all import all_to_all_matmul_all_to_all
    from weft.ops.barrier import barrier
    from weft.ops.broadcast import broadcast, broadcast_async
    from weft.ops.matmul_all_reduce import matmul_all_reduce
    from weft.ops.matmul_all_to_all import matmul_all_to_all
    from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter
    from weft.ops.onesided import Transfer, get, get_async, put, put_async, put_notify
    from weft.ops.reduce_scatter import reduce_scatter, reduce_scatter_async
    from weft.ops.signalling import notify, test, wait
    from weft.plan import Launch, Plan
    from weft.plan.proof import verify
    from weft.schedules.device_options import DeviceOptions
    from weft.world import World, init, join
    from weft.world.local import LocalWorld, local_world
    from weft.world.signals import Signals

_HOMES = {
    "weft.errors": [
        "Excluded",
        "MismatchError",
        "PeerLost",
        "PeerTimeout",
        "PlanError",
        "SymmetricMemoryError",
        "WeftError",
    ],
    "weft.launchers.launcher": ["launch"],
    "weft.world.local": ["LocalWorld", "local_world"],
    "weft.compiler.async_tp": ["enable_async_tp"],
    "weft.experts.moe": ["moe"],
    "weft.experts.packed": ["PackedExperts", "pack_experts"],
    "weft.experts.sums": ["expert_sums"],
    "weft.experts.weights": ["Experts"],
    "weft.explanation": ["explain"],
    "weft.kernels.function": ["weight"],
    "weft.kernels.int8": ["quantize"],
    "weft.kernels.packed": ["PackedWeight", "pack"],
    "weft.kernels.weights": ["PreparedWeight"],
    "weft.nn.warmup": ["warmup"],
    "weft.ops.all_gather": ["all_gather_async"],
    "weft.ops.all_reduce": ["all_reduce_async"],
    "weft.ops.all_to_all": ["all_to_all_async"],
    "weft.ops.broadcast": ["broadcast_async"],
    "weft.ops.reduce_scatter": ["reduce_scatter_async"],
    "weft.ops.onesided": ["Transfer", "get", "get_async", "put", "put_async", "put_notify"],
    "weft.ops.signalling": ["notify", "test", "wait"],
    "weft.plan": ["Launch", "Plan"],
    "weft.plan.proof": ["verify"],
    "weft.schedules.device_options": ["DeviceOptions"],
    "weft.world.signals": ["Signals"],
    "weft.world": ["World", "init", "join"],
}


def _modules(package: str) -> set[str]:
    return {module.name for module in iter_modules([f"{path}/{package}" for path in __path__])}


_HOME = {name: home for home, names in _HOMES.items() for name in names}
_HOME |= {name: f"weft.ops.{name}" for name in sorted(_modules("ops") & _modules("schedules"))}
"""The module of each public name; an operator is a function with a planner of the same name."""

_PACKAGES = ("huggingface", "nn")

__all__ = [*_HOME, "__version__", *_PACKAGES]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES or name in _HOME:
        variables.check()
    if name in _PACKAGES:
        return importlib.import_module(f"weft.{name}")
    if name not in _HOME:
        # name and obj let Python add "Did you mean"
        raise AttributeError(
            f"module 'weft' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    home = _HOME[name]
    # first the package, which loads all its modules: two threads of which one loads a package, and
    # the other a module of it, block each other
    importlib.import_module(home.rpartition(".")[0])
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


if os.environ.get("WEFT_LOG") in variables.VALUES["WEFT_LOG"]:
    importlib.import_module("weft.log").configure()

if "torch" in sys.modules:  # otherwise torch registers the backend when it is imported
    importlib.import_module("weft.process_group").register()
