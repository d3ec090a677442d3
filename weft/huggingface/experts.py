"""Experts of transformers' models on weft."""

from __future__ import annotations

import importlib
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.experts.sums import expert_sums
from weft.experts.weights import Experts
from weft.nn.expert_parallel import activation, convert, obstacle, unlike
from weft.nn.layers import note


def register() -> None:
    """Add weft's experts to transformers' registries, as far as this version has them."""
    moe = importlib.import_module("transformers.integrations.moe")
    moe.ALL_EXPERTS_FUNCTIONS.register("weft", forward)
    try:
        parallel = importlib.import_module("transformers.distributed.expert_parallel")
    except ImportError:
        return
    # for modules that weft cannot run: others are converted before it is asked
    parallel.EPImplementationInterface.register("weft", parallel.AutoEP)


def forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward of transformers' experts with ``experts_implementation="weft"``: those that the
    module has; a number beyond them counts as none, as transformers marks those of other ranks.
    """
    kind = activation(module)
    if kind is None or unlike(module):
        moe = importlib.import_module("transformers.integrations.moe")
        theirs: Tensor = moe.grouped_mm_experts_forward(
            module, hidden_states, top_k_index, top_k_weights
        )
        return theirs
    own = Experts(module.gate_up_proj, module.down_proj, activation=kind)
    return expert_sums(hidden_states, top_k_index, top_k_weights, own)


def install_forward(
    style: Any,
    module: nn.Module,
    *,
    ep_mesh: DeviceMesh,
    tp_mesh: DeviceMesh,
    ep_implementation: str = "auto",
) -> nn.Module:
    """Make experts that a style of transformers has divided among all ranks weft's, if all ranks
    have the same tokens, or each has its own.
    """
    ranks = dist.get_world_size()
    reason = obstacle(module, ep_mesh)
    if ep_implementation not in ("auto", "weft"):
        reason = f"ep_implementation={ep_implementation!r} is asked for"
    elif ep_mesh.size() != ranks or tp_mesh.size() not in (1, ranks):
        reason = (
            f"tp_size={tp_mesh.size()} and ep_size={ep_mesh.size()} of {ranks} ranks, and weft's "
            "experts are divided among all, which have the same tokens, or each its own"
        )
    if reason is None:
        return convert(module, ep_mesh, own_tokens=tp_mesh.size() < ranks)
    installed: nn.Module = style.install_forward(
        module, ep_mesh=ep_mesh, tp_mesh=tp_mesh, ep_implementation=ep_implementation
    )
    return note(installed, f"transformers: {reason}")
