"""What `weft.explain` says of a layer of experts: the variant it would select, and the reason."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.experts.dispatch import check_sizes
from weft.experts.dispatched_tokens import rows_of
from weft.experts.layer import Layer
from weft.experts.moe import moe
from weft.experts.options import LayerOptions
from weft.experts.strategies import LAYER, alike
from weft.ops.explain import of_operator, text
from weft.ops.options import check_types
from weft.world import World


def of_layer(x: Tensor, experts: Any, given: Mapping[str, Any], world: World) -> str:
    """The text on `moe` with these arguments. With `experts_of_ranks` it assumes that all ranks
    have as many rows for each other as this one.
    """
    arguments = inspect.signature(moe).bind(x, experts=experts, **given).arguments
    layer = Layer(x, arguments.pop("chosen"), arguments.pop("scores"), experts)
    layer.check()
    sizes = arguments.pop("experts_of_ranks", None)
    others = {name: arguments[name] for name in arguments if name not in ("x", "experts")}
    with torch.no_grad():
        if sizes is None:
            by, (x, *routing, experts) = "matmul_all_reduce", layer.ready()
            title = f"{LAYER}, by {by},"
            return of_operator(by, x, experts.routed, others, world, title, routing)
        options = LayerOptions(experts_of_ranks=check_sizes(sizes, experts, world), **others)
        check_types(options)
        choice = alike(layer.chosen, rows_of(layer), options, world)
        title = f"{LAYER}, if all ranks have as many rows as this one,"
        return text(title, choice, [choice.call(strategy) for strategy in choice.strategies])
