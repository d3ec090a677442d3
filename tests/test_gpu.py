"""What only a GPU can show; skipped where there is none. `scripts/gpu_check.sh` runs it."""

import pytest
import torch

import weft

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def shard(world, rank, *shape, dtype=torch.bfloat16):
    generator = torch.Generator(device=world.device).manual_seed(rank)
    return torch.randn(*shape, generator=generator, device=world.device).to(dtype)


def close(found, exact):
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-1)


def every_operator():
    world = weft.init()
    rank, ranks = world.rank, world.ranks
    shards = [shard(world, r, 256, 128) for r in range(ranks)]
    b = shard(world, 99, 128, 64)
    exact = [s.double() @ b.double() for s in shards]
    for algorithm in ("direct", "pull", "push", "ring", "sequential"):
        for _ in range(3):
            out = torch.full((256 * ranks, 64), float("nan"), device=world.device, dtype=b.dtype)
            weft.all_gather_matmul(shards[rank], b, algorithm=algorithm, out=out)
            close(out, torch.cat(exact))
    part = 256 // ranks
    for algorithm in ("direct", "push", "ring", "sequential"):
        close(weft.matmul_reduce_scatter(shards[rank], b, algorithm=algorithm), sum(exact)[part * rank : part * (rank + 1)])
    close(weft.matmul_all_reduce(shards[rank], b), sum(exact))
    assert torch.equal(weft.all_gather(shards[rank]), torch.cat(shards))
    assert torch.equal(weft.all_gather_async(shards[rank]).wait(), torch.cat(shards))
    close(weft.all_reduce(shards[rank]), sum(s.double() for s in shards))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_operator(ranks):
    with weft.local_world(ranks, "cuda") as local:
        local.run(every_operator)


def kernels():
    from weft.kernels.all_gather import AllGather, Traffic
    from weft.kernels.matmul_sums import MatmulSums

    world = weft.init()
    rank, ranks = world.rank, world.ranks
    shards = [shard(world, r, 512, 128) for r in range(ranks)]
    gathered = world.empty(512 * ranks, 128, dtype=torch.bfloat16)
    for gluon in (False, True):
        gather = AllGather(world, gathered, Traffic(sms=8), gluon=gluon)
        for _ in range(5):
            gathered.fill_(float("nan"))
            weft.barrier()
            gather(shards[rank])
            assert torch.equal(gathered, torch.cat(shards))
            gather.check()
            weft.barrier()
    b = shard(world, 99, 128, 256)
    exact = sum(s.double() @ b.double() for s in shards)
    out = torch.full((512, 256), float("nan"), device=world.device, dtype=torch.bfloat16)
    sums = MatmulSums(world, shards[rank], b, out, programs=16)
    for _ in range(3):
        sums()
        close(out, exact)
        sums.check()
    with pytest.raises(ValueError, match="could keep those out that they"):
        AllGather(world, gathered, Traffic(sms=1024))


@pytest.mark.parametrize("ranks", [2, 4])
def test_kernels(ranks):
    with weft.local_world(ranks, "cuda") as local:
        local.run(kernels)


def test_the_product_kernel_is_torchs():
    from weft.bench.gpu_products import product_rates

    for row in product_rates([(512, 256, 384), (1000, 320, 520)], torch.float16, 1, 1):
        assert row["wrong"] == 0


def captured():
    world = weft.init()
    a, out = torch.ones(64, 8, device=world.device), torch.empty(64, 8, device=world.device)
    weft.all_reduce(a, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        weft.all_reduce(a, out=out)
    for turn in range(1, 4):
        a.fill_(float(turn))
        weft.barrier()
        graph.replay()
        torch.cuda.current_stream().synchronize()
        assert torch.equal(out, torch.full_like(out, float(turn * world.ranks)))


def test_a_call_in_a_graph():
    with weft.local_world(2, "cuda") as local:
        local.run(captured)
