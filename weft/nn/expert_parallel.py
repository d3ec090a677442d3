"""The style by which experts are divided among ranks."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel.style import ParallelStyle

from weft.checks import name
from weft.kernels.weights import DTYPES
from weft.nn.experts import ParallelExperts
from weft.nn.layout import chunk_sizes
from weft.process_group import worlds

_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "ReLU": "relu",
}
"""The activations by the classes of torch and of transformers."""


class ExpertParallel(ParallelStyle):
    """Experts, each of them on one rank of the mesh; tokens are on all of them.

        parallelize_module(model, mesh, {"layers.*.mlp.experts": weft.nn.ExpertParallel()})

    It takes modules with the parameters of Mixtral's and Qwen-MoE's experts in transformers,
    ``gate_up_proj`` (experts, 2 I, K) and ``down_proj`` (experts, K, I), an activation ``act_fn``,
    and a forward of tokens (T, K), chosen experts (T, top) and their factors (T, top). The
    parameters become DTensors that are sharded along the experts, into the parts of `torch.chunk`,
    and the module a `ParallelExperts`; its name, its class and its state dict remain.

    Raises `ValueError` for a module that has other parameters, biases, or an activation that
    `weft.Experts` does not have.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if reason := obstacle(module, device_mesh):
            raise ValueError(f"ExpertParallel cannot divide {type(module).__name__}: {reason}")
        for each in ("gate_up_proj", "down_proj"):
            whole = module.get_parameter(each)
            divided = distribute_tensor(whole, device_mesh, [Shard(0)])
            module.register_parameter(each, nn.Parameter(divided, whole.requires_grad))
        return convert(module, device_mesh)


def obstacle(module: nn.Module, mesh: DeviceMesh) -> str | None:
    """The reason why `module` cannot become `ParallelExperts`, or None."""
    found = dict(module.named_parameters(recurse=False))
    if {*found} != {"gate_up_proj", "down_proj"}:
        names = ", ".join(found) or "none"
        return f"its parameters must be gate_up_proj and down_proj; it has {names}"
    gate_up, down = found["gate_up_proj"], found["down_proj"]
    if gate_up.dim() != 3 or (gate_up.shape[0], gate_up.shape[2], gate_up.shape[1] // 2) != (
        *down.shape,
    ):
        return (
            "gate_up_proj must be (experts, 2 I, K) and down_proj (experts, K, I); got "
            f"{tuple(gate_up.shape)} and {tuple(down.shape)}"
        )
    if reason := unlike(module):
        return reason
    if mesh.device_type != "cpu" or gate_up.dtype not in DTYPES:
        return f"{name(gate_up.dtype)} on {mesh.device_type} is not supported"
    return None


def unlike(module: nn.Module) -> str | None:
    """The reason why the experts of `module` do not compute what those of weft do, or None."""
    if activation(module) is None:
        return f"weft has no activation {type(getattr(module, 'act_fn', None)).__name__}"
    # what transformers' experts may have besides
    if getattr(module, "has_bias", False) or not getattr(module, "has_gate", True):
        return "its experts have biases, or no gate"
    if not getattr(module, "is_concatenated", True) or getattr(module, "is_transposed", False):
        return "the rows of its gate and up are not one after the other"
    if getattr(module, "has_post_expert_norm", False):
        return "its experts have a norm"
    gate = getattr(type(module), "_apply_gate", None)
    if gate is not None and gate.__name__ != "_default_apply_gate":
        return "it has its own gate"
    return None


def activation(module: nn.Module) -> str | None:
    """The activation of a module of experts, as `weft.Experts` names it; None if it has none."""
    function = getattr(module, "act_fn", None)
    if isinstance(function, nn.GELU) and function.approximate == "tanh":
        return "gelu_tanh"
    return _ACTIVATIONS.get(type(function).__name__)


def convert(module: nn.Module, mesh: DeviceMesh, own_tokens: bool = False) -> nn.Module:
    """Make a module of experts whose parameters are DTensors `ParallelExperts`: divided along the
    experts, or between the products of each. Collective, as `worlds.make`.
    """
    found = activation(module)
    assert found is not None
    kind: Any = type(module)
    module.__class__ = _parallel(kind)
    assert isinstance(module, ParallelExperts)
    world, gate_up = worlds.make(mesh.get_group()), module.gate_up_proj
    assert isinstance(gate_up, DTensor)
    count, first = gate_up.shape[0], 0
    if gate_up.placements[0] == Shard(0):
        first = sum(chunk_sizes(count, world.ranks)[: world.rank])
    module._connect(world, first, found, count, own_tokens)
    return module


@functools.cache
def _parallel(kind: Any) -> type[nn.Module]:
    """A class of experts with the forward of `ParallelExperts`, of which both are bases."""
    return type(kind.__name__, (ParallelExperts, kind), {"__module__": kind.__module__})
