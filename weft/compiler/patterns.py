"""Patterns that operators can replace: all-gathers whose rows are multiplied, and products that are
reduce-scattered or all-reduced.

Graphs are Inductor's after autograd: functional collectives, products lowered to `aten.mm` and
`aten.addmm`, and views between them. Nothing here changes a graph.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from weft.compiler.operators import COLLECTIVES
from weft.kernels.weights import DTYPES
from weft.ops.operator import Exchange, Pattern
from weft.schedules.operators import OPERATORS

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional

RESHAPES = (_aten.reshape.default, _aten.view.default, _aten._unsafe_view.default)
_SIZE = _aten.sym_size.int
_SPLITS = (_aten.split.Tensor, _aten.split_with_sizes.default)
WAIT = _c10d.wait_tensor.default
MOVES = (WAIT, *_SPLITS, operator.getitem, _aten.slice.Tensor, _aten.cat.default)
"""Nodes between an all-gather and its result, concatenated along any dimension."""


class ProductPattern(NamedTuple):
    """``a @ b (+ bias) (+ added)`` of matrices, with a bias for each column, or a summand `added`
    of any other shape.
    """

    node: Node
    a: Node
    b: Node
    bias: Node | None
    added: Node | None


class GatherPattern(NamedTuple):
    """An all-gather of `shard` along `dim`, whose result is `gathered`, and the `products` of its
    rows.

    `nodes`: from the collective, which is the first, to its result and views of it. `sizes`: nodes
    that read symbolic sizes of the result. `kept`: whether the result has other uses.
    """

    operator: str
    shard: Node
    dim: int
    ranks: int
    group: str
    nodes: Sequence[Node]
    gathered: Node
    products: Sequence[ProductPattern]
    sizes: Sequence[Node]
    kept: bool


class SumPattern(NamedTuple):
    """A product, in the shape of `summed`, whose sum over ranks every rank keeps, all of it or a
    part along `dim`.

    `nodes`: from the product to the collective, which is the last.
    """

    operator: str
    product: ProductPattern
    summed: Node
    op: str
    dim: int
    ranks: int | None
    group: str
    nodes: Sequence[Node]


def found(node: Node) -> GatherPattern | SumPattern | None:
    """The pattern of this collective and its products, if a fused operator can replace them."""
    operators = COLLECTIVES.get(node.target, ())
    if not operators or group_of(node) is None or len(waits(node)) != 1:
        return None
    for name, pattern in operators:
        exchange = pattern.exchange(*_args(node))
        find = _gather if pattern.product == "after" else _sum
        fused = None if exchange is None else find(node, name, exchange)
        if fused is not None and _supports(pattern, fused):
            return fused
    return None


def _supports(pattern: Pattern, fused: GatherPattern | SumPattern) -> bool:
    """Whether an operator has the options that a pattern needs."""
    if fused.dim and not pattern.any_dim:
        return False
    if isinstance(fused, SumPattern):
        return True
    several = OPERATORS[fused.operator].several_weights
    return (pattern.keeps or not fused.kept) and (several or len(fused.products) == 1)


def is_gather(node: Node) -> bool:
    """Whether a node is a collective whose result a fused operator multiplies."""
    return any(pattern.product == "after" for _, pattern in COLLECTIVES.get(node.target, ()))


def _gather(node: Node, name: str, exchange: Exchange) -> GatherPattern | None:
    """The pattern of this all-gather, if its result is multiplied."""
    shard, group, ranks, _ = exchange
    if value(shard).dim() < 2:
        return None
    (wait,) = waits(node)
    nodes = [node, wait]
    gathered = wait
    dim = 0
    if ranks and len(node.users) == 1 and (joined := _joined(wait, ranks)) is not None:
        nodes = [*nodes, *_between(wait, joined), joined]
        gathered = joined
        dim = _dim(joined)
    sizes = [
        user
        for user in gathered.users
        if user.target is _SIZE and _args(user)[1] != value(gathered).dim() - 1
    ]
    views, products, others = _uses(gathered, {*sizes}, _descendants(node))
    kept = others or len(node.users) > 1
    return (
        GatherPattern(
            name, shard, dim, ranks, group, [*nodes, *views], gathered, products, sizes, kept
        )
        if products
        else None
    )


def _sum(node: Node, name: str, exchange: Exchange) -> SumPattern | None:
    """The pattern of this reduce-scatter or all-reduce, if it sums a product that has no other
    use.
    """
    source, group, ranks, op = exchange
    nodes = [node]
    dim = 0
    scatters = ranks is not None
    if scatters and (parts := _parts(source, ranks)) is not None and _dim(source) == 0:
        nodes = [*_between(parts[0], source), source, node]
        source, dim = parts
    summed = source
    while source.target in RESHAPES and _keeps_rows(source):
        nodes = [source, *nodes]
        source = source.args[0]
    product = _product(source)
    between = {product.node, *nodes[:-1]} if product else set()
    if product is None or not all({*each.users} <= {*nodes} for each in between):
        return None
    if product.added is not None or value(summed).dim() < 2:
        return None
    if product.bias is not None and scatters and dim == value(summed).dim() - 1:
        return None  # each rank would need its part of all ranks' biases
    return SumPattern(name, product, summed, op, dim, ranks, group, nodes)


def group_of(collective: Node) -> str | None:
    """The name of a collective's process group, if all arguments are positional."""
    group = None if collective.kwargs else _args(collective)[-1]
    return group if isinstance(group, str) else None


def tensors_of(node: Node) -> list[Node]:
    """The inputs of a node without symbolic sizes."""
    return [
        each for each in node.all_input_nodes if not isinstance(each.meta.get("val"), torch.SymInt)
    ]


def waits(collective: Node) -> list[Node]:
    """The nodes that wait for a collective."""
    return [user for user in collective.users if user.target is WAIT]


def value(node: Node) -> Tensor:
    """The fake tensor of a node: shape, strides and dtype, without data."""
    fake: Tensor = node.meta["val"]
    return fake


def _args(node: Node) -> Any:
    return node.args


def _same(one: Any, other: Any) -> bool:
    return bool(statically_known_true(one == other))


# Products


def _product(node: Node) -> ProductPattern | None:
    """The operands of a product, None if the node is not a product that weft can compute."""
    if node.target not in (_aten.mm.default, _aten.addmm.default) or node.kwargs:
        return None
    *added, a, b = _args(node)
    factors = [value(each) for each in (a, b, *added)]
    if any(
        tensor.device.type != "cpu"
        or tensor.dtype not in DTYPES
        or tensor.dtype != factors[0].dtype
        for tensor in factors
    ):
        return None
    if not all(isinstance(size, int) for size in factors[1].shape):
        return None
    if not added:
        return ProductPattern(node, a, b, None, None)
    is_bias = factors[2].dim() == 1 and _same(factors[2].shape[0], factors[1].shape[1])
    return ProductPattern(node, a, b, added[0] if is_bias else None, None if is_bias else added[0])


def _keeps_rows(reshape: Node) -> bool:
    """Whether a reshape keeps the last dimension, and so the rows along it."""
    shape = value(reshape).shape
    before = value(_args(reshape)[0]).shape
    return bool(shape) and bool(before) and _same(shape[-1], before[-1])


def _uses(
    gathered: Node, sizes: set[Node], descendants: set[Node]
) -> tuple[list[Node], list[ProductPattern], bool]:
    """Views of a tensor that keep its rows, products of the tensor or a view with operands that are
    not among the descendants, and whether there are other uses.
    """
    views = [gathered]
    products = []
    others = False
    for view in views:
        for user in view.users:
            product = _product(user)
            if user.target in RESHAPES and _keeps_rows(user):
                views.append(user)
            elif user in sizes:
                pass
            elif (
                product is not None
                and product.a is view
                and not {product.b, product.bias} & descendants
            ):
                products.append(product)
            else:
                others = True
    return views[1:], products, others


def _descendants(node: Node) -> set[Node]:
    """The node and all nodes that depend on it."""
    found = {node}
    left = [node]
    while left:
        for user in left.pop().users:
            if user not in found:
                found.add(user)
                left.append(user)
    return found


# Collectives along another dimension than the first: equal parts along one dimension are
# concatenated along another


def _joined(wait: Node, ranks: int) -> Node | None:
    """The concatenation of the ranks' parts of a tensor, if that is the tensor's only use."""
    parts = [
        part for user in wait.users for part in (user.users if user.target in _SPLITS else [user])
    ]
    ends = {user for part in parts for user in part.users}
    cat = ends.pop() if len(ends) == 1 else None
    return cat if cat is not None and _parts(cat, ranks) == (wait, 0) else None


def _dim(cat: Node) -> int:
    """The dimension of a concatenation, not negative."""
    dim: int = (*_args(cat), cat.kwargs.get("dim", 0))[1]
    return dim % value(cat).dim()


def _parts(cat: Node, ranks: int) -> tuple[Node, int] | None:
    """The tensor, and the dimension along which it is split into an equal part for each rank, if
    `cat` concatenates all parts in their order.
    """
    if cat.target is not _aten.cat.default:
        return None
    pieces = list(_args(cat)[0])
    cuts = [cut for piece in pieces if (cut := _cut(piece)) is not None]
    if (
        not len(cuts) == len(pieces) == ranks
        or len({(source, dim) for source, dim, _ in cuts}) != 1
    ):
        return None
    source, dim, _ = cuts[0]
    size = value(pieces[0]).shape[dim]
    begins = all(_same(begin, index * size) for index, (_, _, begin) in enumerate(cuts))
    equal = all(_same(value(piece).shape[dim], size) for piece in pieces)
    return (
        (source, dim)
        if begins and equal and _same(value(source).shape[dim], ranks * size)
        else None
    )


def _cut(piece: Node) -> tuple[Node, int, Any] | None:
    """The tensor that a node is a piece of, the dimension of the cut, and the start of the
    piece.
    """
    if piece.target is operator.getitem and _args(piece)[0].target in _SPLITS:
        split, index = _args(piece)
        source, _, dim = (*split.args, split.kwargs.get("dim", 0))[:3]
        dim %= value(source).dim()
        return source, dim, sum(part.shape[dim] for part in split.meta["val"][:index])
    if piece.target is _aten.slice.Tensor and len(piece.args) == 4 and not piece.kwargs:
        source, dim, begin, _ = _args(piece)
        return (
            source,
            dim % value(source).dim(),
            begin.meta["val"] if isinstance(begin, Node) else begin,
        )
    return None


def _between(source: Node, cat: Node) -> list[Node]:
    """The nodes that split `source` into the pieces that `cat` concatenates."""
    pieces = cat.all_input_nodes
    return [
        *dict.fromkeys(_args(piece)[0] for piece in pieces if _args(piece)[0] is not source),
        *pieces,
    ]
