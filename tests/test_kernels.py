"""Triton's kernels under its interpreter, between real processes: the memory and the counters of peers are real.

What runs on a rank imports the kernels only after it has said that they are to be interpreted.
"""

import os
import threading

import pytest
import torch
from ranks import on_ranks

import weft
from weft.errors import PeerTimeout
from weft.world import World

pytest.importorskip("triton")


def interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float32, call: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * call + rank), dtype=torch.float32).to(dtype)


def gathers(world: World) -> None:
    interpret()
    from weft.kernels.all_gather import AllGather, Traffic

    rank, ranks = world.rank, world.ranks
    for dtype, words in ((torch.float32, 1300), (torch.bfloat16, 2048)):
        gathered = world.empty(ranks, words, dtype=dtype)
        gather = AllGather(world, gathered, Traffic(sms=2 + rank, tile=1024, warps=1))
        for call in range(3):
            gathered.fill_(float("nan"))
            gather(data(rank, words, dtype=dtype, call=call))
            gather.check()
            expected = torch.stack([data(r, words, dtype=dtype, call=call) for r in range(ranks)])
            assert torch.equal(gathered, expected), (dtype, call)
            weft.barrier(world=world)  # peers poison theirs only now
        with pytest.raises(ValueError, match="a shard is contiguous"):
            gather(data(rank, words + 1, dtype=dtype))
    in_place = world.empty(ranks, 256)
    in_place.fill_(float("nan"))[rank] = data(rank, 256)
    AllGather(world, in_place, Traffic(sms=1, tile=1024, warps=1))(in_place[rank])
    assert torch.equal(in_place, torch.stack([data(r, 256) for r in range(ranks)]))


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_gather_between_processes(ranks: int) -> None:
    on_ranks(gathers, ranks)


def primitives(world: World) -> None:
    interpret()
    import primitive_kernels as kernels

    from weft.kernels import symmetric

    rank, ranks = world.rank, world.ranks
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    box = world.empty(3, 100).fill_(float("nan"))
    counters = symmetric.zeroed(world, 4)
    ledger = symmetric.ledger(box.device)
    tables = symmetric.bases(world, box), symmetric.bases(world, counters)
    box[0] = data(rank, 100)
    # Row 0 goes to the next rank's row 1; when it has come the previous rank's row 0 is fetched to row 2.
    kernels.put_and_get[(1,)](box, counters, ledger, *tables, rank, following, previous, 1 << 20, BLOCK=32)
    symmetric.check(ledger, "a test")
    assert torch.equal(box[1], data(previous, 100))
    assert torch.equal(box[2], data(previous, 100))

    with pytest.raises(ValueError, match="not a symmetric tensor"):
        symmetric.bases(world, torch.zeros(3))
    weft.barrier(world=world)
    if rank == 0:
        late(world, kernels, symmetric)
        never(world, kernels, symmetric)


def late(world: World, kernels, symmetric) -> None:
    """Four producers, released one by one in an order that is not that of the waits, after the consumer has begun to wait."""
    counters = torch.zeros(5, symmetric.COUNTER, dtype=torch.int64)
    source, result = torch.full((4, 64), float("nan")), torch.full((4, 64), float("nan"))
    ledger = symmetric.ledger(source.device)

    def produce() -> None:
        while not counters[4, 0]:  # raised by the kernel
            pass
        for index in (3, 1, 0, 2):
            source[index] = data(index, 64)
            counters[index, 0] += 2

    producer = threading.Thread(target=produce)
    producer.start()
    kernels.consume[(1,)](source, result, counters, ledger, 2, 1 << 30, ROWS=4, COLUMNS=64)
    producer.join()
    symmetric.check(ledger, "a test")
    assert torch.equal(result, torch.stack([data(index, 64) for index in range(4)]))


def never(world: World, kernels, symmetric) -> None:
    """Nobody raises counter 1: the kernel ends, and says what it waited for; a later wait does not hold it up again."""
    counters = torch.zeros(5, symmetric.COUNTER, dtype=torch.int64)
    counters[0, 0], counters[1, 0] = 2, 1
    source, ledger = torch.zeros(4, 64), symmetric.ledger(torch.device("cpu"))
    kernels.consume[(1,)](source, torch.empty(4, 64), counters, ledger, 2, 50, ROWS=4, COLUMNS=64)
    with pytest.raises(PeerTimeout, match=r"a test waited too long for counter 1: 1 of 2"):
        symmetric.check(ledger, "a test")


def test_primitives_between_processes() -> None:
    on_ranks(primitives, 3)


def products(world: World) -> None:
    """Rows come from a thread that carries out the comm lane of the plan; the kernel follows the compute lane."""
    interpret()
    from weft.kernels import symmetric
    from weft.kernels.all_gather_matmul import Blocks, Product, check
    from weft.plan import Copy, Matmul, Notify, Wait
    from weft.schedules.all_gather_matmul import all_gather_matmul
    from weft.schedules.common import offsets

    rank, shards, k, n = world.rank, [40, 56], 80, 48
    starts, names = offsets(shards), ("arrived", "free")
    inbox = world.empty(sum(shards), k, dtype=torch.float16)
    counters, ledger = symmetric.zeroed(world, len(names) * world.ranks), symmetric.ledger(inbox.device)
    base = torch.zeros(len(counters), dtype=torch.int64)
    bias = data(7, n, dtype=torch.float16)

    def index(signal) -> int:
        return names.index(signal.name) * world.ranks + signal.source

    plan = all_gather_matmul(shards, "push", chunk_rows=16)
    lane = plan.lanes[rank]["compute"]
    kernel_lane = [i for i in lane if isinstance(i, Wait) or (isinstance(i, Matmul) and i.src.buffer == "inbox")]
    for call, transposed in enumerate((False, True)):
        a = [data(r, rows, k, dtype=torch.float16, call=call) for r, rows in enumerate(shards)]
        weight = data(9, k, n, dtype=torch.float16)
        weight = weight.t().contiguous().t() if transposed else weight
        out = torch.full((sum(shards), n), float("nan"))
        inbox.fill_(float("nan"))
        weft.barrier(world=world)

        def transfers(a=a[rank]) -> None:
            for i in plan.lanes[rank]["comm"]:
                if isinstance(i, Copy):
                    world.peer(inbox, i.dst.rank)[i.dst.start : i.dst.stop] = a[i.src.start : i.src.stop]
                elif isinstance(i, Notify):
                    world.peer(counters, i.rank)[index(i.signal), 0] += 1

        comm = threading.Thread(target=transfers)
        comm.start()
        product = Product(kernel_lane, inbox, weight, out, index, 3, Blocks(16, 32, 16, 4, 1))
        product(bias, counters, base, ledger, 1 << 22)
        comm.join()
        symmetric.check(ledger, "a test")
        for signal, count in plan.promised(rank).items():
            base[index(signal)] += count
        peer = 1 - rank
        there = slice(starts[peer], starts[peer] + shards[peer])
        expected = a[peer].double() @ weight.double() + bias.double()
        torch.testing.assert_close(out[there].double(), expected, rtol=0, atol=1e-5 * k)
        assert out[starts[rank] : starts[rank] + shards[rank]].isnan().all()  # no row but those of its lane
        weft.barrier(world=world)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        check(inbox[:, 1:], weight, out)


def test_product_follows_the_compute_lane() -> None:
    on_ranks(products, 2)


def sums(world: World) -> None:
    interpret()
    from weft.kernels.all_gather_matmul import Blocks
    from weft.kernels.matmul_sums import MatmulSums

    rank, ranks, k, n = world.rank, world.ranks, 32, 24
    rows = [24, 0, 40][:ranks] if ranks == 3 else [32, 32]
    total = sum(rows)
    weight = [data(50 + r, k, n, dtype=torch.float16) for r in range(ranks)]
    x = torch.empty(total, k, dtype=torch.float16)
    bias = data(99, n)
    scattered, reduced = torch.empty(rows[rank], n), torch.empty(total, n)
    blocks = Blocks(16, 16, 16, 4, 1)
    scatter = MatmulSums(world, x, weight[rank], scattered, rows, programs=2, blocks=blocks, polls=1 << 16)
    reduce = MatmulSums(world, x, weight[rank], reduced, average=True, programs=3, blocks=blocks, polls=1 << 16)
    for call in range(2):
        parts = [data(r, total, k, dtype=torch.float16, call=call) for r in range(ranks)]
        x.copy_(parts[rank])
        wanted = [part.float() @ w.float() for part, w in zip(parts, weight, strict=True)]
        start = sum(rows[:rank])
        scattered.fill_(float("nan"))
        scatter(bias)
        scatter.check()
        torch.testing.assert_close(scattered, (sum(wanted) + bias)[start : start + rows[rank]], rtol=0, atol=1e-5 * k)
        reduced.fill_(float("nan"))
        reduce()
        reduce.check()
        torch.testing.assert_close(reduced, sum(wanted) / ranks, rtol=0, atol=1e-5 * k)
        everywhere = [torch.empty_like(reduced) for _ in range(ranks)]
        torch.distributed.all_gather(everywhere, reduced)
        assert all(torch.equal(reduced, other) for other in everywhere)
        with pytest.raises(ValueError, match="rows"):
            MatmulSums(world, x, weight[rank], scattered, [total, 1])


@pytest.mark.parametrize("ranks", [2, 3])
def test_products_are_put_to_their_owners_and_added_in_rank_order(ranks: int) -> None:
    on_ranks(sums, ranks)
