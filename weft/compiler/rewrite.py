"""Changes to a graph: one operator of weft replaces a collective and the products next to it."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from weft.compiler import operators, patterns
from weft.compiler.patterns import GatherPattern, SumPattern, value, waits
from weft.schedules.operators import OPERATORS

_aten = torch.ops.aten
_reshape, _cat = _aten.reshape.default, _aten.cat.default


def drop_waits(graph: Graph) -> None:
    """Remove waits for what was waited for already: torch's functions wait for their collectives,
    and a program may wait again for the result.
    """
    waited: set[Node] = set()
    for node in list(graph.nodes):
        if waited.issuperset(sources := patterns.tensors_of(node)) and sources:
            if node.target is patterns.WAIT:
                node.replace_all_uses_with(sources[0])
                graph.erase_node(node)
            elif node.target in patterns.MOVES or node.target in patterns.RESHAPES:
                waited.add(node)
        elif node.target is patterns.WAIT:
            waited.add(node)


def share_gathers(graph: Graph, groups: Callable[[str], bool]) -> None:
    """Replace several all-gathers of the same rows, on groups for which `groups` is true, by one:
    in a graph without gradients each layer has its own all-gather.
    """
    unique: dict[str, Node] = {}
    gathered: set[Node] = set()
    for node in list(graph.nodes):
        name = patterns.group_of(node) if patterns.is_gather(node) else None
        moved = node.target in patterns.MOVES and gathered.issuperset(patterns.tensors_of(node))
        if moved or (name is not None and groups(name)):
            first = unique.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
            gathered.add(first)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def insert_gather(graph: Graph, found: GatherPattern) -> None:
    """Insert one operator that gathers and multiplies before the first of the products, and remove
    the nodes that it replaces.
    """
    positions = {node: position for position, node in enumerate(graph.nodes)}
    products = sorted(found.products, key=lambda product: positions[product.node])
    weights, biases = [product.b for product in products], [product.bias for product in products]
    options = "sum", found.dim, found.kept, found.ranks, found.group, None
    overload = operators.OVERLOADS[found.operator]
    with graph.inserting_before(products[0].node):
        made = _call(graph, overload, found.shard, weights, biases, *options)
        results = [_call(graph, operator.getitem, made, index) for index in range(len(products))]
        for size in found.sizes:
            size.replace_input_with(found.gathered, results[0])
        if value(results[0]).dim() != 2:
            results = [
                _call(graph, _reshape, result, [-1, value(result).shape[-1]]) for result in results
            ]
        gathered = _call(graph, operator.getitem, made, len(products)) if found.kept else None
        for index, product in enumerate(products):
            if product.added is not None:
                results[index] = _call(graph, _aten.add.Tensor, results[index], product.added)
    for product, result in zip(products, results, strict=True):
        product.node.replace_all_uses_with(result)
    collective = found.nodes[0]
    if gathered is not None:
        (wait,) = waits(collective)
        collective.replace_all_uses_with(gathered, delete_user_cb=lambda user: user is not wait)
        found.gathered.replace_all_uses_with(gathered)
    _erase(graph, {*found.nodes, *(product.node for product in products)})


def insert_sum(graph: Graph, found: SumPattern) -> None:
    """Insert one operator that multiplies and sums before the collective, and remove the nodes that
    it replaces.
    """
    product, a, b, bias, _ = found.product
    collective = found.nodes[-1]
    (wait,) = waits(collective)
    with graph.inserting_before(collective):
        if value(found.summed).dim() != 2:
            shape: Any = found.summed.args[1]
            a = _call(graph, _reshape, a, [*shape[:-1], value(b).shape[0]])
        options = found.op, found.dim, False, found.ranks, found.group, None
        made = _call(graph, operators.OVERLOADS[found.operator], a, [b], [bias], *options)
        result = _call(graph, operator.getitem, made, 0)
    wait.replace_all_uses_with(result)
    collective.replace_all_uses_with(result, delete_user_cb=lambda user: user is not wait)
    _erase(graph, {product, *found.nodes, wait})


def join_sums(graph: Graph) -> None:
    """Replace two operators whose sums are added by one operator, on the columns of both.

    In backward the gradient of an input that several layers take is a sum of one such operator for
    each layer.
    """
    for node in list(graph.nodes):
        added = node.all_input_nodes if node.target is _aten.add.Tensor and not node.kwargs else []
        made = [_sum_of(result) for result in added]
        if len(made) != 2 or made[0] is None or made[1] is None or not _addable(made[0], made[1]):
            continue
        (a, b), (c, d) = _factors(made[0]), _factors(made[1])
        with graph.inserting_before(node):
            joined_a = _call(graph, _cat, [*_parts(a, -1), *_parts(c, -1)], -1)
            joined_b = _call(graph, _cat, [*_parts(b, 0), *_parts(d, 0)], 0)
            both = _call(graph, made[0].target, joined_a, [joined_b], *made[0].args[2:])
            result = _call(graph, operator.getitem, both, 0)
        node.replace_all_uses_with(result)
        _erase(graph, {node, *added, *made, a, b, c, d})


def _factors(made: Any) -> tuple[Node, Node]:
    """The two matrices that an operator with one weight multiplies."""
    a, (b,), *_ = made.args
    return a, b


def chain(graph: Graph) -> Counter[str]:
    """Sort the nodes topologically, and make each operator of weft depend on the one before;
    returns the number of each operator.
    """
    stable_topological_sort(graph)
    made = [node for node in graph.nodes if node.target in operators.NAMES]
    for before, node in pairwise(made):
        with graph.inserting_after(before):
            done = _call(graph, operator.getitem, before, len(before.meta["val"]) - 1)
        node.args = (*node.args[:-1], done)
    return Counter(operators.NAMES[node.target] for node in made)


def _sum_of(result: Node) -> Any:
    """The operator that returns `result` as the sum of its only product, if that is its only
    use.
    """
    made: Any = result.args[0] if result.target is operator.getitem else None
    fused = None if made is None else OPERATORS.get(operators.NAMES.get(made.target, ""))
    is_sum = fused is not None and fused.exchanges == "out" and made.args[3] in ("sum", "avg")
    return made if is_sum and made.args[2] == [None] and len(result.users) == 1 else None


def _addable(one: Any, other: Any) -> bool:
    """Whether two operators have sums of the same kind, shape and dtype."""
    a, b = _factors(one)
    c, d = _factors(other)
    rest = one.args[2:]
    others = other.args[2:]
    shape, another = ((*value(x).shape[:-1], value(y).shape[1]) for x, y in ((a, b), (c, d)))
    same_kind = (one.target, rest, value(a).dtype, len(shape)) == (
        other.target,
        others,
        value(c).dtype,
        len(another),
    )
    return same_kind and all(
        statically_known_true(size == other) for size, other in zip(shape, another, strict=True)
    )


def _parts(factor: Any, dim: int) -> list[Node]:
    """The parts of a factor that is a concatenation along `dim`, else the factor itself."""
    return [*factor.args[0]] if factor.target is _cat and factor.args[1:] == (dim,) else [factor]


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*map_arg(args, lambda arg: arg.meta["val"]))
    return node


def _erase(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erase the nodes that have no users left."""
    for node in reversed(graph.nodes):
        if node in nodes and not node.users:
            graph.erase_node(node)
