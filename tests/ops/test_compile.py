"""The fused operators under torch.compile, forward and backward, and torch's checks of custom
operators.
"""

from __future__ import annotations

import itertools
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from support.inductor import QUICK
from support.ranks import beside_gloo, on_ranks, start

import weft
from weft.ops.records import AllGatherMatmul, MatmulAllReduce, MatmulReduceScatter


def check_operators(world):
    gather, scatter, reduce = (
        getattr(torch.ops.weft, name).default
        for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    )
    for grad, dims in ((False, (0,)), (True, (0, 1))):
        a, b = torch.randn(4, 2, 6, requires_grad=grad), torch.randn(6, 8, requires_grad=grad)
        bias = torch.randn(8, requires_grad=grad)
        for dim in dims:
            torch.library.opcheck(
                gather,
                (
                    a,
                    [b, b.detach().clone()],
                    [bias, bias.new_empty(0)],
                    *AllGatherMatmul(dim=dim, keep=True),
                    None,
                    world.name,
                ),
            )
            torch.library.opcheck(
                scatter, (a, [b], [bias], *MatmulReduceScatter(dim=dim, op="avg"), None, world.name)
            )
        torch.library.opcheck(reduce, (a, [b], [bias], *MatmulAllReduce(), None, world.name))
        torch.library.opcheck(torch.ops.weft.product.default, (a[0], b))
    half = torch.ones(4, 6, dtype=torch.bfloat16), [torch.ones(6, 8, dtype=torch.bfloat16)]
    torch.library.opcheck(
        gather, (*half, [], *AllGatherMatmul(out_dtype=torch.float32), None, world.name)
    )


@pytest.mark.slow
def test_torch_accepts_the_operators():
    on_ranks(check_operators, 2, limit=110)


def block(x, up, gate, down, bias, world):
    """A gated layer of a transformer, sharded over ranks, with its sequence too."""
    u, g = weft.all_gather_matmul(x, [up, gate], dim=1, world=world)
    h = torch.nn.functional.silu(g) * u
    y = weft.matmul_reduce_scatter(h, down, dim=1, bias=bias, world=world)
    return y + weft.matmul_all_reduce(x.flatten(0, 1), up, world=world).mean()


def compiled(world, default):
    """Forward and backward, with the default world or with an argument."""
    world_argument = None if default else world
    tensors = [
        torch.randn(2, 3, 8),
        torch.randn(8, 10),
        torch.randn(8, 10),
        torch.randn(10, 8),
        torch.ones(8),
    ]

    def run(fn, record):
        leaves = [t.clone().requires_grad_(record) for t in tensors]
        with torch.set_grad_enabled(record):
            y = fn(*leaves, world_argument)
        if record:
            y.sin().sum().backward()
        return [y.detach(), *(leaf.grad for leaf in leaves if record)]

    fast = torch.compile(block, fullgraph=True, backend="aot_eager")
    for record in (True, False):
        for one, other in zip(run(fast, record), run(block, record), strict=True):
            torch.testing.assert_close(one, other)


def reshaped(world):
    """One compiled function for tensors of several sizes, and one with a weight that was packed."""
    call = torch.compile(
        lambda a, b: weft.all_gather_matmul(a, b), fullgraph=True, backend="aot_eager", dynamic=True
    )
    generator = torch.Generator().manual_seed(3)
    b = torch.randn(6, 5)
    for rows in (4, 7, 9):
        everyone = torch.randn(world.ranks, rows, 6, generator=generator)
        torch.testing.assert_close(call(everyone[world.rank], b), everyone.flatten(0, 1) @ b)
    packed = weft.pack(b)
    fixed = torch.compile(
        lambda a: weft.all_gather_matmul(a, packed), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(fixed(everyone[world.rank]), everyone.flatten(0, 1) @ b)
    trained, own = b.clone().requires_grad_(), b.clone().requires_grad_()
    of_trained = weft.pack(trained)
    torch.compile(
        lambda a: weft.all_gather_matmul(a, of_trained), fullgraph=True, backend="aot_eager"
    )(everyone[0]).sum().backward()
    weft.all_gather_matmul(everyone[0], own).sum().backward()
    torch.testing.assert_close(trained.grad, own.grad)


def inductor(world):
    a, b = torch.randn(4, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)

    def layer(a, b):
        return weft.matmul_reduce_scatter(
            weft.all_gather_matmul(a, b).relu(), b.t(), op="avg"
        ).square()

    results = []
    for call in (torch.compile(layer, fullgraph=True), layer):
        a.grad = b.grad = None
        y = call(a, b)
        y.sum().backward()
        results.append([y.detach(), a.grad, b.grad])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def one_after_another(world):
    for check, *arguments in ((compiled, True), (compiled, False), (reshaped,), (inductor,)):
        torch.compiler.reset()
        check(world, *arguments)


@pytest.mark.data
@pytest.mark.slow
def test_layers_compile_without_graph_breaks():
    on_ranks(one_after_another, 2, limit=110)


def same(a, b, c, parts, world):
    """Tensors and options that are equal in worlds of all sizes."""
    return weft.matmul_reduce_scatter(
        weft.all_gather_matmul(a, b, world=world), c, op="avg", world=world
    )


def average(a, b, c, parts, world):
    """A program without a shape that depends on the number of ranks."""
    return weft.matmul_all_reduce(a, b, op="avg", world=world)


def uneven(a, b, c, parts, world):
    """Tensors and options that are equal on all ranks, and a result that differs."""
    return weft.matmul_reduce_scatter(a, b, shard_rows=parts, world=world)


def compiled_and_eager(world):
    """Compiled functions, new or cached, give the results of eager ones."""
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in ((12, 4), (4, 5), (5, 2))]
    parts = [13 - world.ranks, *[1] * (world.ranks - 1)]
    for layer in (same, average, uneven):
        results = []
        for call in (torch.compile(layer, fullgraph=True, options=QUICK), layer):
            leaves = [tensor.clone().requires_grad_() for tensor in tensors]
            y = call(*leaves, parts, world)
            y.sum().backward()
            results.append([y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)


def one_cache(world, folder):
    """Worlds of different sizes compile the same functions, as if each had processes of its own."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    found = torch._dynamo.utils.counters["aot_autograd"]
    hits = []
    for ranks in (3, 2, 1, 2):
        group, before = dist.new_group([*range(ranks)]), found["autograd_cache_hit"]
        if world.rank < ranks:
            torch.compiler.reset()
            weft.world.world._numbers = itertools.count(1000)
            with weft.init(group) as part:
                compiled_and_eager(part)
            hits.append(found["autograd_cache_hit"] - before)
    return hits


@pytest.mark.data
@pytest.mark.slow
def test_cached_graphs_of_other_worlds_are_not_used(tmp_path):
    """The last two ranks find their own graphs of before, and no others."""
    found = on_ranks(one_cache, 3, tmp_path, limit=110, context=beside_gloo)
    assert found == [[0, 0, 0, 3], [0, 0, 3], [0]]


PLAIN = {
    "all_reduce": lambda x: weft.all_reduce(x),
    "all_gather": lambda x: weft.all_gather(x),
    "broadcast": lambda x: weft.broadcast(x, 0),
    "all_reduce_async": lambda x: weft.all_reduce_async(x).wait(),
    "barrier": lambda x: weft.barrier() or x,
}


def breaking(_):
    """What compiled functions with plain collectives warn and raise; their results are right."""

    def function(x):
        for collective in PLAIN.values():
            x = collective(x * 2) + 1
        return x

    x, refused = torch.arange(4.0), {}
    for name, collective in PLAIN.items():
        with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
            torch.compile(collective, backend="eager", fullgraph=True)(x)
        refused[name] = str(raised.value)
    torch.compiler.reset()
    expected = function(x)
    compiled = torch.compile(function, backend="eager")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            assert torch.equal(compiled(x), expected)
    return [str(each.message) for each in warned], refused


def test_plain_collectives_break_the_graph_without_noise():
    for outcome in start(breaking, 2):
        assert outcome.error is None, outcome.trace
        assert "torch._dynamo" not in outcome.printed
        warned, refused = outcome.result
        assert warned == []
        assert len(refused) == len(PLAIN)
        for name, message in refused.items():
            assert f"weft.{name} is not traced: call it outside of compiled code" in message
            assert "torch's functional collectives on a group of weft's" in message
