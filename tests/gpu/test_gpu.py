"""Tests that need a GPU, skipped without one. `benchmarks/gpu/second.sh` runs them."""

from functools import partial

import pytest
import torch
from support.checks import onesided

import weft
from weft_tools.bench import graphs
from weft_tools.bench.gpu.rates import product_rates

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def shard(world, rank, *shape, dtype=torch.bfloat16):
    generator = torch.Generator(device=world.device).manual_seed(rank)
    return torch.randn(*shape, generator=generator, device=world.device).to(dtype)


def close(found, exact):
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-1)


def every_operator(products):
    world = weft.init()
    rank, ranks = world.rank, world.ranks
    shards = [shard(world, r, 256, 128) for r in range(ranks)]
    b, bias = shard(world, 99, 128, 64), shard(world, 98, 64)
    exact = [s.double() @ b.double() for s in shards]
    for algorithm in ("direct", "pull", "push", "ring", "sequential"):
        for weight in (b, b.t().contiguous().t()):
            out = torch.full((256 * ranks, 64), float("nan"), device=world.device, dtype=b.dtype)
            weft.all_gather_matmul(shards[rank], weight, bias=bias, algorithm=algorithm, out=out)
            close(out, torch.cat(exact) + bias.double())
    part = 256 // ranks
    for algorithm in ("direct", "push", "put", "ring", "sequential"):
        y = weft.matmul_reduce_scatter(
            shards[rank], b, algorithm=algorithm, out_dtype=torch.float32
        )
        close(y, sum(exact)[part * rank : part * (rank + 1)])
    for algorithm in ("one_shot", "two_shot", "push", "put", "sequential"):
        close(weft.matmul_all_reduce(shards[rank], b, algorithm=algorithm), sum(exact))
    wide = shards[rank].float()
    close(weft.all_gather_matmul(wide, b.float(), algorithm="push"), torch.cat(exact))
    assert torch.equal(weft.all_gather(shards[rank]), torch.cat(shards))
    assert torch.equal(weft.all_gather_async(shards[rank]).wait(), torch.cat(shards))
    close(weft.all_reduce(shards[rank]), sum(s.double() for s in shards))
    assert ("persistent kernel" in weft.explain(shards[rank], b)) == (products == "triton")


@pytest.mark.parametrize("products", ["torch", "triton"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_operator(ranks, products):
    with weft.local_world(ranks, "cuda", products=products) as local:
        local.run(every_operator, products)


def gradients():
    world = weft.init()
    a = shard(world, world.rank, 64, 32, dtype=torch.float32).requires_grad_()
    b = shard(world, 99, 32, 16, dtype=torch.float32).requires_grad_()
    weft.all_gather_matmul(a, b).square().sum().backward()
    close(
        a.grad,
        world.ranks * 2 * (a.detach().double() @ b.detach().double()) @ b.detach().double().t(),
    )


def on_two_streams():
    """Calls from two streams alternately run in the order in which they were made."""
    world = weft.init()
    a, other = torch.ones(1 << 20, device=world.device), torch.cuda.Stream(world.device)
    for number in range(4):
        with torch.cuda.stream(other if number % 2 else torch.cuda.current_stream()):
            a = weft.all_reduce(a, op="avg") + 1
        torch.cuda.current_stream().wait_stream(other)
        other.wait_stream(torch.cuda.current_stream())
    assert torch.equal(a, torch.full_like(a, 5.0))


@pytest.mark.parametrize("work", [gradients, on_two_streams])
def test_streams_and_threads(work):
    with weft.local_world(2, "cuda") as local:
        local.run(work)


def kernels():
    world = weft.init()
    rank, ranks = world.rank, world.ranks
    shards = [shard(world, r, 512, 128) for r in range(ranks)]
    gathered = world.empty(512 * ranks, 136, dtype=torch.bfloat16)
    symmetric = world.empty(512 * ranks, 128, dtype=torch.bfloat16)
    for gluon in (False, True):
        options = {"algorithm": "kernel", "launch": weft.Launch(comm_sms=8, gluon=gluon)}
        for out in (symmetric, gathered[:, :128], gathered[:, 1:129], None):
            for columns in (128, 3):
                wanted = torch.cat(shards)[:, :columns]
                into = None if out is None or columns == 3 else out
                for _ in range(5):
                    if into is not None:
                        into.fill_(float("nan"))
                    weft.barrier()
                    found = weft.all_gather(shards[rank][:, :columns], out=into, **options)
                    assert torch.equal(found, wanted)
        handle = weft.all_gather_async(shards[rank], **options)
        assert torch.equal(handle.wait(), torch.cat(shards))
    with pytest.raises(ValueError, match="could block the programs that they"):
        weft.all_gather(shards[rank], algorithm="kernel", launch=weft.Launch(comm_sms=1024))


@pytest.mark.parametrize("ranks", [2, 4])
def test_kernels(ranks):
    with weft.local_world(ranks, "cuda") as local:
        local.run(kernels)


def test_the_product_kernel_is_torchs():
    shapes = [(512, 256, 384), (1000, 320, 520)]
    for row in product_rates(shapes, torch.float16, 1, 1, torch.device("cuda")):
        assert row["wrong"] == {"kernel": 0, "torch.mm": 0}


def captured():
    world = weft.init()
    a, b = torch.ones(64, 32, device=world.device), torch.ones(32, 16, device=world.device)
    out = torch.empty(64, 16, device=world.device)
    call = partial(weft.matmul_all_reduce, a, b, out=out)
    call()
    torch.cuda.current_stream().synchronize()
    replay = graphs.captured(world, call)
    for value in range(1, 4):
        a.fill_(float(value))
        weft.barrier()
        replay()
        torch.cuda.current_stream().synchronize()
        assert torch.equal(out, torch.full_like(out, 32.0 * value * world.ranks))


@pytest.mark.parametrize("products", ["torch", "triton"])
def test_a_call_in_a_graph(products):
    with weft.local_world(2, "cuda", products=products) as local:
        local.run(captured)


def one_sided():
    """Copies of rows by each algorithm, and the patterns of docs/memory-model.md."""
    world = weft.init()
    peer = (world.rank + 1) % world.ranks
    ways = [{}, {"algorithm": "copy-engine"}, {"algorithm": "kernel", "comm_sms": 4}]
    rows, columns = (lambda t: t[1:]), (lambda t: t[:, 3:])
    for way, views in zip(ways, ([rows, columns], [rows], [rows, columns]), strict=True):
        for view in views:
            memory = world.empty(512, 96, dtype=torch.bfloat16).fill_(float("nan"))
            got = torch.full_like(memory, float("nan"))
            weft.barrier()
            weft.put(view(memory), view(shard(world, world.rank, 512, 96)), peer, **way)
            weft.barrier()
            source = (world.rank - 1) % world.ranks
            assert torch.equal(view(memory), view(shard(world, source, 512, 96)))
            weft.get_async(view(got), view(memory), peer, **way).wait()
            assert torch.equal(view(got), view(shard(world, world.rank, 512, 96)))
            weft.barrier()
    with torch.device(world.device):
        onesided.examples(world, onesided.SOURCE, onesided.EXAMPLES)
    late = world.signals(1, "late")
    weft.barrier()
    if world.rank == 0:
        weft.wait(late, 0, ">=", 1, timeout=0.1)
        torch.cuda.current_stream().synchronize()
        with pytest.raises(weft.PeerTimeout, match=r"for late\[0\] >= 1: it was 0"):
            weft.notify(late, 0, peer)


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_sided_calls(ranks):
    with weft.local_world(ranks, "cuda") as local:
        local.run(one_sided)
