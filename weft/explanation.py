"""The text on the variant of a call, of an operator or of a layer of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from weft.experts.explain import of_layer
from weft.experts.strategies import LAYER
from weft.experts.weights import Experts
from weft.kernels.weights import Weight
from weft.ops.explain import of_operator
from weft.schedules.operators import COLLECTIVES, OPERATORS
from weft.world import World, current


def explain(
    a: Tensor,
    b: Weight | Sequence[Weight] | Experts | None = None,
    *,
    operator: str = "all_gather_matmul",
    world: World | None = None,
    **options: Any,
) -> str:
    """A text that names the variant that `operator` would select for these arguments, the reason,
    and the measured times of other variants.

    Not collective; nothing is sent. If the ranks have not selected yet, it is the variant that this
    rank would propose.

    `operator` is the name of a fused operator, such as ``matmul_all_reduce``, or of a collective,
    such as ``all_gather``, which has no `b`; `options` are the operator's, without `out` and
    `timeout`. Of ``moe`` a are the tokens and b the experts, and `chosen` and `scores` are options;
    if the ranks have different tokens, the text is on a call in which all ranks have as many rows
    for each other as this one. Other calls whose sizes ranks exchange, by split sizes, are a
    `ValueError`. Raises the `ValueError` or `TypeError` that the operator would raise.

    Examples:
        >>> a, b = torch.randn(64, 32), weft.pack(torch.randn(32, 16))
        >>> with weft.local_world(2) as local:
        ...     print(local.run(lambda: weft.explain(a, b, algorithm="ring"))[0])
        all_gather_matmul over 2 ranks: ring, at most 64 rows per transfer: as asked for; ...
        >>> with weft.local_world(2) as local:
        ...     print(local.run(lambda: weft.explain(a, operator="all_reduce"))[0])
        all_reduce over 2 ranks: eager, 1 piece per shard: the rule for its size and memory
    """
    world = current(world)
    names = (LAYER, *OPERATORS, *(name for name in COLLECTIVES if name != "barrier"))
    if operator not in names:
        raise ValueError(f"there is no operator {operator!r}; choose one of {', '.join(names)}")
    if operator == LAYER:
        return of_layer(a, b, options, world)
    return of_operator(operator, a, b, options, world)
