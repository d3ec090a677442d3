"""The parts of vLLM that the plug-in relies on: whether the installed version has them."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter

from weft.vllm.package import installed
from weft.vllm.settings import OFF, VARIABLE

VERSIONS = "0.32"
"""The versions of vLLM for which the plug-in is made and tested."""

_PARTS = "communicator", "experts", "hosts", "layers", "norms"
"""The modules of the plug-in that import vLLM's."""

_REPLACED = {
    "vllm.platforms.cpu": ("CpuPlatform.dist_backend", "CpuPlatform.get_device_communicator_cls"),
    "vllm.model_executor.custom_op": ("PluggableLayer.register_oot", "CustomOp.register_oot"),
    "vllm.model_executor.layers.linear": (
        "RowParallelLinear.forward",
        "ColumnParallelLinear.forward",
        "MergedColumnParallelLinear",
        "QKVParallelLinear",
    ),
    "vllm.v1.executor.multiproc_executor": ("WorkerProc._init_message_queues",),
    "vllm.model_executor.layers.layernorm": ("RMSNorm.forward_native",),
    "vllm.model_executor.layers.fused_moe.runner.moe_runner": ("MoERunner._select_forward",),
}
"""Attributes that the plug-in sets, calls or overrides, by the module that has them."""


def lacking() -> str:
    """The first part that this vLLM lacks, as an error's text, or ""; raises what an import raises
    for another reason.
    """
    try:
        for part in _PARTS:
            import_module(f"weft.vllm.{part}")
        for module, names in _REPLACED.items():
            for name in names:
                attrgetter(name)(import_module(module))
    except (ImportError, AttributeError) as error:
        return str(error)
    return ""


def check() -> None:
    """Raise an error, with what would do, if this vLLM lacks a part."""
    if lacks := lacking():
        package = installed()
        version = package.version if package else "of an unknown version"
        raise RuntimeError(
            f"weft's plug-in is made for vLLM {VERSIONS} and does not fit vLLM {version}: {lacks}. "
            f"Install the other version of vLLM or of weft, or run vLLM without weft: "
            f"{VARIABLE}={OFF}"
        )
