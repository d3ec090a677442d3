"""Programs of collectives and products, compiled by Inductor with weft's pass, compared with eager
runs.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.inductor import QUICK
from support.ranks import group, on_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.fx import Graph

import weft
from weft.compiler import rewrite
from weft.process_group import worlds

# its compiler does not trace torch's own gather of another dimension than the first
if torch.__version__.startswith("2.11."):
    funcol._maybe_view_chunk_cat = torch._dynamo.dont_skip_tracing(funcol._maybe_view_chunk_cat)


class RecordingPass(CustomGraphPass):
    """A pass in place of the installed one: it runs the installed pass, and records the collectives
    of the graph.
    """

    def __init__(self):
        self.other, self.graphs = config.post_grad_custom_post_pass, []
        config.post_grad_custom_post_pass = self

    def __call__(self, graph):
        self.other(graph)
        graph.lint()
        collectives = [
            node
            for node in graph.nodes
            if str(node.target).startswith(("weft.", "_c10d_functional."))
        ]
        self.graphs.append(Counter(str(node.target).split(".")[1] for node in collectives))
        ours = [node for node in collectives if node.target.namespace == "weft"]
        # each operator waits for the one before
        assert [node.args[-1] and node.args[-1].args[0] for node in ours] == [None, *ours][
            : len(ours)
        ]

    def uuid(self):
        return self.other.uuid()

    def new_graphs(self):
        """The collectives of each graph since the last call."""
        graphs, self.graphs = self.graphs, []
        return [dict(found) for found in graphs]


def compare(fn, *inputs, options=QUICK):
    """Compiled and eager runs give equal results."""
    for one, other in zip(
        torch.compile(fn, fullgraph=True, options=options)(*inputs), fn(*inputs), strict=True
    ):
        torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()


def draw(*shape, own=0, dtype=torch.float64):
    """A tensor that is equal on all ranks, or with `own` this rank's own."""
    seed = sum(shape) + own * (100 + dist.get_rank())
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def gathers(x, b, c, bias, whole):
    """Rows gathered along each dimension, multiplied once or more, and used for other things, too."""
    y, world = x * 2, dist.group.WORLD
    first, second, again, last = (
        funcol.all_gather_tensor(rows, dim, world)
        for rows, dim in ((x, 0), (y, 1), (y, 1), (x * 3, 2))
    )
    rows = again.flatten(0, 1)
    adapted = torch.addmm(rows @ b @ (b.t() @ b), rows, c)
    return (
        F.linear(first, c.t(), bias),
        second @ b + bias,
        adapted,
        second.sum(),
        last @ whole,
        (x @ c).relu(),
    )


def sums(a, b, bias, own):
    """Products summed along each dimension, or on all ranks, with biases that differ between ranks."""
    world = dist.group.WORLD
    scattered = [
        funcol.reduce_scatter_tensor(F.linear(a * (dim + 4), b.t(), own), "sum", dim, world)
        for dim in (0, 1)
    ]
    mean = funcol.reduce_scatter_tensor((a * 6) @ b, "avg", 2, world)
    reduced = funcol.all_reduce(F.linear(a, b.t(), own), "sum", world)
    return *scattered, mean, reduced, funcol.all_reduce(torch.addmm(bias, a[0], b), "avg", world)


def waited_again(x, b):
    """A program waits itself for collectives, for which torch's functions wait already."""
    world, wait = dist.group.WORLD, funcol.wait_tensor
    rows, columns = (
        wait(funcol.all_gather_tensor(part, dim, world)) for part, dim in ((x, 0), (x * 3, 1))
    )
    scattered = wait(funcol.reduce_scatter_tensor((x * 2).flatten(0, 1) @ b, "sum", 0, world))
    return (
        rows @ b,
        wait(wait(columns)) @ b,
        wait(scattered),
        wait(funcol.all_reduce(x[0] @ b, "sum", world)),
    )


def others(x, b, a, bias):
    """Collectives and products that cannot be fused."""
    world, ranks = dist.group.WORLD, dist.get_world_size()
    rows = funcol.all_gather_tensor(x, 0, world)
    shuffled = torch.cat(rows.chunk(2 * ranks), 1).flatten(0, 1) @ b  # not divided by rank
    y, z = a @ b, (a + 1) @ b
    summed, most = funcol.all_reduce(y, "sum", world), funcol.all_reduce(z, "max", world)
    # each rank needs a part of all biases
    columns = funcol.reduce_scatter_tensor(torch.addmm(bias, a[0], b), "sum", 1, world)
    square = funcol.all_gather_tensor(x + 1, 0, world)[:, 0]
    line = funcol.all_reduce((a[:1, 0] @ b)[0], "sum", world)
    return (
        shuffled,
        summed,
        y,
        most,
        columns,
        square @ square.t(),
        line,
        funcol.all_reduce(x, "sum", world),
    )


def compiled_programs(_):
    ranks = dist.get_world_size()
    torch.compiler.config.force_disable_caches = True
    for _ in range(2):
        weft.enable_async_tp()
    seen = RecordingPass()
    n = 4 * ranks
    compare(
        gathers,
        draw(ranks, 5, 8, own=1),
        draw(8, n, own=1),
        draw(8, n + 1, own=1)[:, 1:],
        draw(n, own=1),
        draw(8 * ranks, 3),
    )
    assert seen.new_graphs() == [{"all_gather_matmul": 3}]
    a, b = draw(2 * ranks, 3 * ranks, 6, own=1), draw(6, n, own=1)
    compare(sums, a, b, draw(n, own=1), draw(n, own=2))
    assert seen.new_graphs() == [{"matmul_reduce_scatter": 3, "matmul_all_reduce": 2}]
    compare(waited_again, draw(ranks, 4, 6, own=1), b)
    assert seen.new_graphs() == [
        {"all_gather_matmul": 2, "matmul_reduce_scatter": 1, "matmul_all_reduce": 1}
    ]
    compare(others, draw(2 * ranks, 2, 6, own=1), b, a, draw(n, own=1))
    assert seen.new_graphs() == [
        {"all_gather_into_tensor": 2, "all_reduce": 4, "reduce_scatter_tensor": 1, "wait_tensor": 7}
    ]

    grown = torch.compile(gathers, fullgraph=True, dynamic=True, options=QUICK)
    weights = [
        nn.Parameter(draw(*shape), requires_grad=False)
        for shape in ((8, n), (8, n), (n,), (8 * ranks, 3))
    ]
    for rows in (3, 4, 7):
        x = draw(5, rows, 8, own=1)
        for one, other in zip(grown(x, *weights), gathers(x, *weights), strict=True):
            torch.testing.assert_close(one, other)
    assert seen.new_graphs() == [{"all_gather_matmul": 3}]


@pytest.mark.data
@pytest.mark.slow
def test_fused_operators_replace_collectives_and_products():
    on_ranks(compiled_programs, 2, limit=110, context=group)


def test_only_waits_that_wait_for_something_are_kept():
    """Those for a collective, and for what was computed from one that was not waited for."""
    graph, aten, c10d = Graph(), torch.ops.aten, torch.ops._c10d_functional

    def call(target, *args):
        return graph.call_function(target, args)

    x = graph.placeholder("x")
    gathered = call(c10d.all_gather_into_tensor.default, x, 2, "0")
    once = call(c10d.wait_tensor.default, gathered)
    twice = call(c10d.wait_tensor.default, once)
    joined = call(aten.cat.default, call(aten.split.Tensor, twice, 3), 1)
    last = call(c10d.wait_tensor.default, call(aten.view.default, joined, [-1, 4]))
    reduced = call(c10d.all_reduce.default, last, "sum", "0")
    outstanding = call(aten.view.default, reduced, [4, -1])
    view = call(c10d.wait_tensor.default, outstanding)
    graph.output((last, view, call(c10d.wait_tensor.default, x)))
    rewrite.drop_waits(graph)
    graph.lint()
    kept = [node.args[0] for node in graph.nodes if node.target is c10d.wait_tensor.default]
    assert kept == [gathered, outstanding, x]


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each with a norm before it."""

    def __init__(self, dim, heads):
        super().__init__()
        self.size = dim // heads
        self.attention_norm, self.norm = nn.LayerNorm(dim), nn.RMSNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=name != "k") for name in "qkvo")
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        y = self.attention_norm(x)
        q, k, v = (
            layer(y).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        x = x + self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(self.up(self.norm(x)).relu())


def parallel(sequence):
    """A block parallelized by torch's own styles, with or without sequence parallelism."""
    torch.manual_seed(5)
    mesh, block = init_device_mesh("cpu", (dist.get_world_size(),)), Block(24, 6)
    column = ColwiseParallel(input_layouts=Shard(1)) if sequence else ColwiseParallel()
    row = (
        RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        if sequence
        else RowwiseParallel()
    )
    plan = dict.fromkeys(("q", "k", "v", "up"), column) | {"o": row, "down": row}
    if not sequence:
        return parallelize_module(block, mesh, plan), block
    parallelize_module(
        block, mesh, plan | dict.fromkeys(("attention_norm", "norm"), SequenceParallel())
    )
    return block, lambda x: block(DTensor.from_local(x, mesh, [Shard(1)])).to_local()


def trained(sequence, options=None):
    """The loss of a step and all gradients, compiled or eager."""
    block, fn = parallel(sequence)
    if options is not None:
        fn = torch.compile(fn, fullgraph=True, options=options)
    x = draw(2, 6, 24, own=sequence, dtype=torch.float32).requires_grad_()
    loss = fn(x).sin().sum()
    loss.backward()
    grads = [parameter.grad for parameter in block.parameters()]
    return [
        loss.detach(),
        x.grad,
        *(grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads),
    ]


def models(_):
    torch.compiler.config.force_disable_caches = True
    weft.enable_async_tp()
    seen = RecordingPass()
    for sequence in (True, False):
        for one, other in zip(trained(sequence, QUICK), trained(sequence), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        graph = (
            {"all_gather_matmul": 2, "matmul_reduce_scatter": 2}
            if sequence
            else {"matmul_all_reduce": 2}
        )
        # forward and backward; in the latter one operator sums the products of several layers
        assert seen.new_graphs() == [
            graph,
            graph,
        ]


@pytest.mark.slow
def test_models_of_dtensors_train_without_a_changed_line():
    on_ranks(models, 2, limit=110, context=group)


def layers(x, b, c):
    """Rows gathered, multiplied, and multiplied again and scattered."""
    hidden = (funcol.all_gather_tensor(x, 0, dist.group.WORLD) @ b).relu()
    return (funcol.reduce_scatter_tensor(hidden @ c, "avg", 0, dist.group.WORLD) * 2,)


class ForeignPass(CustomGraphPass):
    """A pass of other software, with an identifier under which compiled graphs can be cached."""

    def __call__(self, graph):
        graph.passed = self

    def uuid(self):
        return "known"


def unknown(graph):
    graph.passed = unknown


def switched(_):
    """A group of another backend gets a world on demand; passes of other software stay installed."""
    torch.compiler.config.force_disable_caches = True
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("weft").addHandler(handler)

    def found(options):
        torch.compiler.reset()
        counters.clear()
        compare(layers, draw(4, 6, own=1), draw(6, 8), draw(8, 6), options=options)
        return dict(counters["weft"])

    weft.enable_async_tp()
    assert [found(QUICK), found(QUICK)] == [{}, {}]
    assert ["not replaced" in text for text in messages] == [True] * (dist.get_rank() == 0)
    weft.enable_async_tp(dist.group.WORLD)
    assert found({}) == {"all_gather_matmul": 1, "matmul_reduce_scatter": 1}
    weft.enable_async_tp(enable=False)
    assert config.post_grad_custom_post_pass is None

    for other in (ForeignPass(), unknown):
        config.post_grad_custom_post_pass, graph = other, torch.fx.Graph()
        weft.enable_async_tp()
        config.post_grad_custom_post_pass(graph)
        assert graph.passed is other
        assert (config.post_grad_custom_post_pass.uuid() is None) == (other is unknown)
        weft.enable_async_tp(enable=False)
        assert config.post_grad_custom_post_pass is other


@pytest.mark.slow
def test_async_tp_is_enabled_and_disabled():
    on_ranks(switched, 2, limit=110, context=functools.partial(group, "gloo"))


def mean(x, b):
    """A program without a size that depends on the number of ranks."""
    return (funcol.all_reduce(x @ b, "avg", dist.group.WORLD),)


def one_cache(world, folder):
    """For groups of one name and several sizes, with the pass and without: the graphs, and the
    calls of operators.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    found, ran, run_in_order = [], [], worlds.run_in_order
    worlds.run_in_order = lambda group, call: ran.append(call) or run_in_order(group, call)
    for trial, (ranks, enable) in enumerate(
        [(2, False), (2, True), (3, True), (3, False), (2, True)]
    ):
        if world.rank < ranks:
            dist.init_process_group(
                "weft", f"file://{folder}/{trial}", rank=world.rank, world_size=ranks
            )
            weft.enable_async_tp(enable=enable)
            torch.compiler.reset()
            counters.clear()
            ran.clear()
            compare(mean, draw(4, 3, own=1), draw(3, 2, own=1))
            found.append((counters["aot_autograd"]["autograd_cache_hit"], len(ran)))
            dist.destroy_process_group()
    return found


@pytest.mark.data
@pytest.mark.slow
def test_a_cache_serves_groups_of_all_sizes_and_gives_each_program_its_own(tmp_path):
    one, other, last = on_ranks(one_cache, 3, tmp_path, limit=110)
    assert [ran for _, ran in one] == [ran for _, ran in other] == [0, 1, 1, 0, 1]
    assert [
        min(hits) for hits in zip(*([hit for hit, _ in each] for each in (one, other)), strict=True)
    ] == [0, 0, 1, 1, 1]
    assert last == [(1, 1), (1, 0)]
