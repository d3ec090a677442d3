"""Tensor parallelism of Hugging Face transformers on weft's layers.

After `enable`, ``from_pretrained(folder, tp_plan="auto")`` loads a model whose layers are weft's;
`weft.nn.explain` shows the operators of each, or why transformers runs it.
"""

from __future__ import annotations

import importlib
from typing import Any

from weft.huggingface import experts
from weft.huggingface.styles import Style

__all__ = ["enable"]

_OLDEST = (5, 23)


def enable() -> None:
    """Let models that transformers shards by a `tp_plan` after this call run weft's layers.

    A row-parallel linear layer becomes a `weft.nn.RowParallelLinear`, whose product overlaps its
    sum over the ranks; a column-parallel one a `weft.nn.ColumnParallelLinear`; an embedding with a
    sharded vocabulary is looked up and summed without DTensors; the experts of a mixture become
    `weft.nn.ParallelExperts`, whether each is divided (`tp_plan`) or each rank has some
    (``DistributedConfig(tp_size=2, ep_size=2)``, with the `ep_implementation` ``weft`` or
    ``auto``). Parameters, their gradients and the state dict are the same, and so are results but
    for the order of sums. What weft cannot run remains transformers' own: `weft.nn.explain` shows
    the reason.

    A model in one process has weft's experts with ``experts_implementation="weft"``.

    If transformers makes the process group, for CPUs, its backend is weft; a group that the program
    makes before, of any backend, is used as it is. Call this on all ranks before
    ``from_pretrained``. A second call changes nothing.

    Raises `ImportError` if transformers is missing or older than 5.23, or keeps its styles
    elsewhere than 5.23 and 5.24 do.
    """
    styles, backends = _registries()
    experts.register()  # first, since it loads styles
    for name, style in [*styles.items()]:
        if not isinstance(style, Style):
            styles.register(name, Style(style))
    backends["cpu"] = "weft"


def _registries() -> tuple[Any, dict[str, str]]:
    """transformers' parallel styles by name, and its backends by type of device."""
    needs = "weft.huggingface needs transformers {}.{} or newer".format(*_OLDEST)
    try:
        version = importlib.import_module("transformers").__version__
    except ModuleNotFoundError as error:
        raise ImportError(f"{needs} (pip install transformers accelerate): {error}") from error
    if tuple(map(int, version.split(".")[:2])) < _OLDEST:
        raise ImportError(f"{needs}; got {version}")
    try:
        styles = importlib.import_module("transformers.distributed.tensor_parallel")
        utils = importlib.import_module("transformers.distributed.utils")
        return styles.ALL_PARALLEL_STYLES, utils.DISTRIBUTED_BACKEND_MAP
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"transformers {version} keeps its parallel styles elsewhere than 5.23 and 5.24 do, "
            f"for which weft.huggingface is written: {error}"
        ) from error
