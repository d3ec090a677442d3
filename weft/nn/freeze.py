"""The promise that the weights of a model will not change."""

from __future__ import annotations

from torch import nn

from weft.checks import check_module
from weft.nn.experts import ParallelExperts
from weft.nn.frozen import FrozenWeight
from weft.nn.layers import ShardedLinear, without_layer


def freeze(model: nn.Module) -> None:
    """Promise that the weights of all layers of `weft.nn` in `model` do not change from now on, so
    that calls without gradients may use a form of them that is laid out once (`weft.pack`,
    `weft.pack_experts`).

    Products of few rows, as of a decoding step, then take down to half the time. A rank's form of a
    weight takes as much memory as its part of the weight, beside it, where it is faster. Layers
    that are not frozen multiply by what their weights hold at the time of a call, whatever has
    changed it.

    **The promise** ends with ``model.train()``; `freeze` called again, as after an update of the
    weights, is a new one for the weights as they then are. A layer that is called without gradients
    after its weight was changed raises `ValueError` if the change is one that torch counts
    (optimizers, ``weight.mul_()`` under ``no_grad``, ``load_state_dict``), another parameter, or
    other memory (``weight.data = …``, `Module.to`). Torch counts no writes through ``weight.data``,
    NumPy arrays or DLPack views that share the memory, nor rows that are received into it: of these
    it is an error only if one of 64 elements spread over the weight has changed, and after others
    products may be by the old weight. So call `freeze` again after every change.

    Calls that record gradients, under autocast or in a compiled program multiply by the weights as
    they are. Layers whose weight is no parameter, such as those with a parametrization of torch's,
    are not frozen; biases are never. `weft.nn.explain` shows which layers are. A copy of a model is
    not frozen.

    Args:
        model: in eval mode; frozen on all ranks or on none.

    Raises `ValueError` if the model is in training mode or has no layer of `weft.nn`, `TypeError`
    if it is no module. Nothing is sent.

    Examples:
        >>> def frozen():
        ...     layer = weft.nn.ColumnParallelLinear(8, 4).eval()
        ...     weft.nn.freeze(layer)
        ...     return weft.nn.explain(layer)
        >>> with weft.local_world(1) as local:
        ...     local.run(frozen)
        ['ColumnParallelLinear  weft: product without communication; frozen']
    """
    check_module(model, "model")
    layers = [
        layer for layer in model.modules() if isinstance(layer, (ShardedLinear, ParallelExperts))
    ]
    if not layers:
        raise ValueError(without_layer(model))
    if any(layer.training for layer in layers):
        raise ValueError(
            "model is in training mode, which changes weights: call model.eval() first"
        )
    for layer in layers:
        if isinstance(layer, ParallelExperts):
            layer.freeze()
            continue
        weight = layer._parameters.get("weight")
        layer.frozen = None if weight is None else FrozenWeight(weight)
