"""The variants of serving a model that are compared, and what selects each in vLLM."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from weft_tools.bench.vllm.models import POSITIONS

ONE, GLOO, SHARED = "one-process", "gloo", "shared-memory"
COMMUNICATOR, WEFT = "weft-communicator", "weft"
RANKS = 2
_CACHE = 256 << 20  # bytes of keys and values: enough for 32 sequences, and 2048 tokens of one


class Variant(NamedTuple):
    """The number of ranks, the variables of the environment, and the class of vLLM's workers."""

    ranks: int
    variables: dict[str, str]
    worker: str = "auto"


_PLAIN = {"VLLM_PLUGINS": ""}
VARIANTS = {
    ONE: Variant(1, _PLAIN),
    GLOO: Variant(RANKS, _PLAIN, "weft_tools.bench.vllm.gloo.Worker"),
    SHARED: Variant(RANKS, _PLAIN),
    COMMUNICATOR: Variant(RANKS, {"VLLM_PLUGINS": "weft", "WEFT_VLLM": "communicator"}),
    WEFT: Variant(RANKS, {"VLLM_PLUGINS": "weft"}),
}


def cores() -> list[int]:
    """The cores of all ranks together, a multiple of their number."""
    found = sorted(os.sched_getaffinity(0))
    return found[: len(found) // RANKS * RANKS]


def plugged_in() -> bool:
    """Whether vLLM finds weft's plug-in in this environment."""
    return bool(entry_points(group="vllm.general_plugins", name="weft"))


def arguments(model: Path, variant: Variant, *, eager: bool) -> dict[str, Any]:
    """The arguments of `vllm.LLM`."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "tensor_parallel_size": variant.ranks,
        "worker_cls": variant.worker,
        "enforce_eager": eager,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": POSITIONS,
        "max_model_len": POSITIONS,
        "kv_cache_memory_bytes": _CACHE,
    }


def variables(variant: Variant) -> dict[str, str]:
    """The environment of an engine: an equal share of the cores for each rank, no network."""
    each = len(all_cores := [str(core) for core in cores()]) // variant.ranks
    shares = (all_cores[rank * each : (rank + 1) * each] for rank in range(variant.ranks))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(",".join, shares)),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **variant.variables,
    }
