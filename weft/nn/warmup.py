"""Calls of a model's layers before its first request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import Shard

from weft.checks import check_module
from weft.nn.experts import ParallelExperts
from weft.nn.layers import ColumnParallelLinear, ShardedLinear, without_layer
from weft.nn.layout import chunk_sizes, local, normal


def warmup(model: nn.Module, tokens: int | Sequence[int]) -> None:
    """Call each layer of `weft.nn` in `model` once for each of these numbers of tokens,
    collectively, so that the first requests find what first calls make: kernels, plans, a workspace
    of the size of the largest call, and the forms of frozen weights (`weft.nn.freeze`, before).

    A layer gets zeros (1, tokens, features), this rank's part of them where its inputs are sharded;
    a sharded sequence is rounded up to a multiple of the ranks. Experts get as many tokens, which
    choose all of them in turn. Results are dropped, hooks do not run. Other layers and other
    collectives of the model are not called: the rest of a first request is torch's. Variants that
    ``algorithm="auto"`` measures may still be tried in later calls.

    Args:
        model: in eval mode, the same on all ranks.
        tokens: the numbers of tokens of a step, at least 1; the same on all ranks. For a server
            that decodes up to 32 sequences and reads prompts 256 tokens at a time
            ``[*range(1, 33), 256]``.

    Raises `ValueError` if the model is in training mode, has no layer of `weft.nn`, or a number is
    below 1, before anything is sent; and the errors of the layers' operators.

    Examples:
        >>> def model():
        ...     layer = weft.nn.ColumnParallelLinear(8, 4).eval()
        ...     weft.warmup(layer, [1, 16])
        ...     return layer(torch.ones(16, 8)).shape
        >>> with torch.no_grad(), weft.local_world(2) as local:
        ...     local.run(model)
        [torch.Size([16, 2]), torch.Size([16, 2])]
    """
    check_module(model, "model")
    counts = [tokens] if isinstance(tokens, int) else [*tokens]
    if not counts or min(counts) < 1:
        raise ValueError(f"tokens must be one or more numbers, each at least 1; got {tokens}")
    experts = dict(_experts(model))
    layers = [layer for layer in model.modules() if isinstance(layer, ShardedLinear)]
    if not (layers or experts):
        raise ValueError(without_layer(model))
    if any(layer.training for layer in (*layers, *experts)):
        raise ValueError("model is in training mode: call model.eval() first")
    with torch.no_grad():
        # the largest first: a workspace that grows lets the calls before be forgotten
        for count in sorted({*counts}, reverse=True):
            inputs = {}  # layers that share a gather must get one tensor
            for layer in layers:
                weight = local(layer.weight)
                key = _shape(layer, count), weight.dtype
                if key not in inputs:
                    inputs[key] = weight.new_zeros(key[0])
                layer.forward(inputs[key])
            for each, top in experts.items():
                weight = local(each.gate_up_proj)
                chosen = torch.arange(count * top, device="cpu").view(count, top) % each.number
                x = weight.new_zeros(count, weight.shape[2])
                each.forward(x, chosen, torch.ones(count, top, device="cpu"))


def _experts(model: nn.Module) -> Iterator[tuple[ParallelExperts, int]]:
    """The layers of experts in a model, each with the number of experts that a token chooses, as
    the module around it says, or a router beside it; 1 if none does.
    """
    for module in (nn.ModuleList([model]), *model.modules()):
        beside = [module, *module.children()]
        tops = [getattr(each, name, 0) for each in beside for name in ("top", "top_k")]
        for child in beside[1:]:
            if isinstance(child, ParallelExperts):
                yield child, next(filter(None, tops), 1)


def _shape(layer: ShardedLinear, tokens: int) -> tuple[int, ...]:
    """The shape of this rank's input of a layer, with `tokens` tokens in its sequence: the
    dimension that is sharded there, the second by default.
    """
    input, output = (normal(each, 3) for each in (layer.layout.input, layer.layout.output))
    sequence = input if isinstance(layer, ColumnParallelLinear) else output
    shape = [1, 1, layer.in_features]
    shape[0 if sequence == Shard(0) else 1] = tokens
    if isinstance(input, Shard):
        shape[input.dim] = chunk_sizes(shape[input.dim], layer.world.ranks)[
            layer.world.rank if input.dim == 2 else 0
        ]
    return tuple(shape)
