"""Operators of device worlds that multiply by weft's persistent kernel, under Triton's interpreter."""

import itertools
from itertools import product
from typing import Any

import pytest
import torch
from support.interpreter import interpreted, triton_world
from support.ranks import on_ranks

import weft
from weft.engines.recording import record
from weft.kernels import products
from weft.kernels.weights import Weight
from weft.plan import Compute
from weft.plan.trace import of_program
from weft.world import World, current

pytest.importorskip("triton", "3.6")

GATHERS = ("direct", "pull", "push", "ring", "sequential")
SCATTERS = ("direct", "push", "put", "ring", "sequential")
REDUCES = ("one_shot", "two_shot", "push", "put", "sequential")


def whole(seed: int, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Small whole numbers, whose products and sums every dtype here holds exactly."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def forbid_other_products() -> None:
    """Let no product be made without the kernel from here on."""
    right = products.prepare

    def forbidden(x: torch.Tensor, weight: Weight, *rest: Any) -> Any:
        assert 0 in (*x.shape, *weight.shape), "a product was made without the kernel"
        return right(x, weight, *rest)

    products.prepare = forbidden


def gathers(rows: tuple[int, ...], algorithm: str, dtype: torch.dtype, call: int) -> None:
    world = current()
    shards = [whole(call + r, n, 32, dtype=dtype) for r, n in enumerate(rows)]
    flat, tall = whole(call + 8, 32, 24, dtype=dtype), whole(call + 9, 37, 32, dtype=dtype).t()
    a, bias = shards[world.rank], whole(7, 24, dtype=dtype)
    exact = torch.cat(shards).double()
    options: dict[str, Any] = {"shard_rows": rows, "algorithm": algorithm, "chunk_rows": 7}
    out = torch.full((sum(rows), 24), float("nan"), dtype=dtype)
    assert weft.all_gather_matmul(a, flat, bias=bias, out=out, **options) is out
    assert torch.equal(out.double(), exact @ flat.double() + bias.double())
    if call % 2:
        return
    (one, two), gathered = weft.all_gather_matmul(
        a, [flat, tall], return_gathered=True, out_dtype=torch.float32, **options
    )
    assert torch.equal(one.double(), exact @ flat.double())
    assert torch.equal(two.double(), exact @ tall.double())
    assert torch.equal(gathered.double(), exact)


def sums(
    rows: tuple[int, ...], algorithm: str, reduced: bool, dtype: torch.dtype, call: int
) -> None:
    world = current()
    total, rank = sum(rows), world.rank
    a = [whole(call + r, total, 16, dtype=dtype) for r in range(world.ranks)]
    columns = (24, 21)[call % 3 == 0]  # rows of 21 are stored element by element
    b = [whole(call + 8 + r, columns, 16, dtype=dtype).t() for r in range(world.ranks)]
    bias = whole(7, columns, dtype=dtype)
    exact = sum(x.double() @ w.double() for x, w in zip(a, b, strict=True)) + bias.double()
    if reduced:
        y = weft.matmul_all_reduce(a[rank], b[rank], bias=bias, algorithm=algorithm)
        assert torch.equal(y.double(), exact)
        return
    options: dict[str, Any] = {"shard_rows": rows, "algorithm": algorithm, "chunk_rows": 7}
    y = weft.matmul_reduce_scatter(a[rank], b[rank], bias=bias, **options)
    own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    assert torch.equal(y.double(), exact[own]), (
        algorithm,
        dtype,
        rank,
        (y.double() - exact[own]).abs().max(dim=1).values.tolist(),
    )
    mean = weft.matmul_reduce_scatter(
        a[rank], b[rank], op="avg", out_dtype=torch.float32, **options
    )
    assert torch.equal(mean, ((exact - bias.double())[own].float() / world.ranks))


def every_operator(rows: tuple[int, ...]) -> None:
    for call, (algorithm, dtype) in enumerate(
        zip(GATHERS, (torch.float16, torch.float32) * 3, strict=False)
    ):
        gathers(rows, algorithm, dtype, call)
    for call, (algorithm, reduced) in enumerate(
        [*product(SCATTERS, [False]), *product(REDUCES, [True])]
    ):
        sums(rows, algorithm, reduced, (torch.bfloat16, torch.float32)[call % 2], call)


def rejected() -> None:
    """Operands that the kernel cannot multiply are rejected before anything is sent: the world stays
    usable.
    """
    a, b = torch.ones(4, 16), torch.ones(16, 8)
    for x, w in ((a.double(), b.double()), (a[:, :15], b[:15]), (a, b[:, :7].contiguous())):
        with pytest.raises(
            ValueError,
            match=r"weft's product kernel takes float16, bfloat16, float32, and rows .* products=\"torch\"",
        ):
            weft.all_gather_matmul(x, w, algorithm="push")
        with pytest.raises(ValueError, match="weft's product kernel takes"):
            weft.explain(x, w)
    assert "products by one persistent kernel, which waits per tile" in weft.explain(a, b)
    assert weft.all_gather_matmul(a, torch.ones(16, 0)).shape == (8, 0)
    assert torch.equal(weft.all_gather_matmul(a, b), torch.full((8, 8), 16.0))


def recorded() -> None:
    """Every instruction has a span; those of one launch are those of its tiles, which each program
    of the kernel has recorded.
    """
    world = current()
    with record(world) as recording:
        weft.all_gather_matmul(torch.ones(6, 16), torch.ones(16, 8), algorithm="push", chunk_rows=2)
    ((plan, _, spans),) = recording.executions
    lanes = plan.lanes[world.rank]
    assert sorted((lane, at) for lane, at, _, _ in spans if lane in lanes) == sorted(
        (lane, at) for lane in lanes for at in range(len(lanes[lane]))
    )
    programs = [span for span in spans if span[0] not in lanes]
    tiles = [span for span in programs if isinstance(lanes["compute"][span[1]], Compute)]
    products = [at for at, i in enumerate(lanes["compute"]) if isinstance(i, Compute)]
    assert sorted(at for _, at, _, _ in tiles) == products, "a tile for each product here"
    assert {lane for lane, *_ in programs} == {of_program("compute", number) for number in range(3)}
    for lane in {lane for lane, *_ in programs}:
        times = [span[2:] for span in programs if span[0] == lane]
        assert all(0 < start <= stop for start, stop in times)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(times))
    whole = {at: times for lane, at, *times in spans if lane == "compute"}
    assert all(whole[at] == [start, stop] for _, at, start, stop in tiles)


def late() -> None:
    """A kernel whose wait for a peer times out ends, and reports the wait."""
    world = current()
    a, b = torch.ones(2, 16), torch.ones(16, 8)
    weft.all_gather_matmul(a, b, algorithm="push")
    if world.rank == 0:
        with pytest.raises(
            weft.PeerTimeout,
            match=r'rank 0 waited too long for signal "\w+" from rank 1 in all_gather_matmul or before: \d of \d',
        ):
            weft.all_gather_matmul(a, b, algorithm="push", timeout=0.05)


def in_local_worlds(_: World) -> None:
    interpreted()
    forbid_other_products()
    with weft.local_world(3, products="triton", timeout=10) as local:
        local.run(every_operator, (0, 9, 18))
    with weft.local_world(2, products="triton", timeout=10) as local:
        for check in (rejected, recorded, late):
            local.run(check)


@pytest.mark.slow
def test_local_worlds():
    on_ranks(in_local_worlds, 1)


def between_processes(world: World) -> None:
    forbid_other_products()
    for call in range(3):
        gathers((20, 33), ("push", "pull", "direct")[call], torch.float16, call)
        sums((24, 8), "put", bool(call % 2), torch.float16, call)


def test_processes():
    on_ranks(between_processes, 2, context=triton_world)
