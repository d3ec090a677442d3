"""Options of devices: tiles, SMs of products and copies, and links, without a GPU: as threads and
processes under Triton's interpreter, and their rejections.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.interpreter import interpreted, triton_world
from support.ranks import on_ranks

import weft
from weft import DeviceOptions
from weft.engines.recording import record
from weft.gpu import options as devices
from weft.ops.operator import find
from weft.ops.options import Operands
from weft.world import World, current

OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
ROWS = (0, 20, 70)


def whole(seed: int, *shape: int) -> torch.Tensor:
    """Small whole numbers, whose products and sums are exact."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


def exact(operator: str, algorithm: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """A call over pieces of uneven shards has the exact result."""
    world = current()
    rank, total = world.rank, sum(ROWS)
    rows = ROWS if operator == "all_gather_matmul" else [total] * world.ranks
    a = [whole(r, n, 16).to(dtype) for r, n in enumerate(rows)]
    b = [whole(8 + r, 16, 80).to(dtype) for r in range(world.ranks)]
    products = [x.double() @ w.double() for x, w in zip(a, b, strict=True)]
    options = {} if operator == "matmul_all_reduce" else {"shard_rows": ROWS}
    y = getattr(weft, operator)(
        a[rank], b[rank], out_dtype=torch.float32, algorithm=algorithm, chunk_rows=48, **options
    ).double()
    match operator:
        case "all_gather_matmul":
            assert torch.equal(y, torch.cat(a).double() @ b[rank].double())
        case "matmul_reduce_scatter":
            own = slice(sum(ROWS[:rank]), sum(ROWS[: rank + 1]))
            assert torch.equal(y, sum(products)[own])
        case _:
            assert torch.equal(y, sum(products))


def algorithms(operator: str) -> list[str]:
    """The algorithms of an operator that honour the options of this world."""
    world = current()
    total = sum(ROWS)
    a = torch.ones(total, 16)
    operands = Operands(a, [torch.ones(16, 8)], [None], [None])
    found = find(operator)
    call = found.check(world, operands, found.options())
    return [name for name in call.operator.algorithms if call.honours(name)]


def every_algorithm(options: DeviceOptions, expected: dict[str, list[str]]) -> None:
    """The algorithms that honour these options are those expected, and exact; auto is one of them,
    and others are rejected before anything is sent.
    """
    world = current()
    world.configure(options)
    for operator in OPERATORS:
        found = algorithms(operator)
        assert found == expected[operator]
        for name in [*found, *(["auto"] if found else [])]:
            exact(operator, name)
        for name in {*find(operator).schedule.algorithms} - {*found}:
            with pytest.raises(ValueError, match=r"cannot honour the world's options \("):
                exact(operator, name)


EVERY = {
    name: [*find(name).schedule.algorithms]
    for name in OPERATORS
}  # fmt: skip
COPYING = {
    "all_gather_matmul": ["push", "pull", "ring", "sequential"],
    "matmul_reduce_scatter": ["push", "ring"],
    "matmul_all_reduce": ["two_shot", "push", "put", "ring"],
}
LINKED = {
    "all_gather_matmul": ["push", "sequential"],
    "matmul_reduce_scatter": ["push"],
    "matmul_all_reduce": ["push"],
}


OF_OWN_ROWS = {
    "all_gather_matmul": ["direct", "push", "pull", "ring"],
    "matmul_reduce_scatter": [],
    "matmul_all_reduce": [],
}


def own_tiles() -> None:
    """Own rows have tiles of their own, smaller and larger ones than gathered rows have."""
    for tile, own in (((64, 64), (128, 128)), ((128, 64), (64, 64))):
        every_algorithm(DeviceOptions(tile=tile, own_tile=own), OF_OWN_ROWS)


def sweep() -> None:
    """One world executes calls with one options after another."""
    every_algorithm(DeviceOptions(tile=(64, 64), compute_sms=2), EVERY)
    every_algorithm(DeviceOptions(tile=(128, 64), comm_sms=2), COPYING)
    every_algorithm(DeviceOptions(compute_sms=1, comm_sms=3, links=2), LINKED)


def programs_and_tiles() -> None:
    """The kernels are launched with the programs and the tiles that the options ask for."""
    from weft.gpu.kernels import copy_rows as copies
    from weft.gpu.kernels.all_gather_matmul import ProductKernel

    world, grids, copied, own = current(), [], [], copies.copy_rows
    world.configure(DeviceOptions(tile=(64, 128), compute_sms=2, comm_sms=5))
    call = ProductKernel.__call__

    def spy(product: ProductKernel, *args: object) -> None:
        grids.append((product.grid, product.blocks[:2]))
        call(product, *args)  # type: ignore[arg-type]

    def copy(*args: Any) -> None:
        copied.append(args[-1])
        own(*args)

    if world.rank == 0:
        ProductKernel.__call__, copies.copy_rows = spy, copy  # type: ignore[method-assign, assignment]
    weft.barrier()
    exact("all_gather_matmul", "auto")
    exact("matmul_all_reduce", "auto")
    weft.barrier()
    if world.rank == 0:
        ProductKernel.__call__, copies.copy_rows = call, own  # type: ignore[method-assign]
        assert {*grids} == {((2,), (64, 128))}
        assert {*copied} == {5}
    weft.barrier()


def tiles_of_own_rows() -> None:
    """Of a push, this rank's rows are cut into one kind of tiles, and what arrives into another."""
    from weft.gpu.kernels.all_gather_matmul import ProductKernel

    world, made = current(), []
    world.configure(DeviceOptions(tile=(64, 64), own_tile=(128, 128)))
    call = ProductKernel.__call__

    def spy(product: ProductKernel, *args: object) -> None:
        if product.rank == 2:
            first = product.sizes[0]
            cut = [(last - row, column) for row, last, column, *_ in product.launch.tiles]
            made.append((cut[:first], {column for _, column in cut[first:]}))
        call(product, *args)  # type: ignore[arg-type]

    if world.rank == 2:  # of 70 rows
        ProductKernel.__call__ = spy  # type: ignore[method-assign]
    weft.barrier()
    exact("all_gather_matmul", "push")
    weft.barrier()
    if world.rank == 2:
        ProductKernel.__call__ = call  # type: ignore[method-assign]
        assert made
        assert all(each == ([(70, 0)], {0, 1}) for each in made)  # of 80 columns
    weft.barrier()


def lanes_of_links() -> None:
    """Two links are two lanes of the execution, each to its share of the peers, and the plan is
    proved.
    """
    world = current()
    world.configure(DeviceOptions(links=2))
    with record(world) as recording:
        exact("all_gather_matmul", "push")
    ((plan, _, spans),) = recording.executions
    assert {lane for lane, *_ in spans} >= {"compute", "comm", "comm1"}
    own = plan.lanes[world.rank]
    sent = [
        {i.dst.rank for i in own[lane] if isinstance(i, weft.plan.Copy)}
        for lane in own
        if lane != "compute"
    ]
    assert not set.intersection(*sent)
    weft.verify(plan)
    text = weft.explain(torch.ones(70, 16), torch.ones(16, 8))
    assert "the world's options ask for 2 links" in text


def different() -> None:
    """Ranks whose options differ do not make the same call, which the next one reports at the
    latest.
    """
    world = current()
    world.configure(DeviceOptions(compute_sms=1 + world.rank))
    a, b = torch.ones(2, 16), torch.ones(16, 8)
    with pytest.raises(weft.MismatchError, match=r"products on [123] SMs"):
        for _ in range(3):
            weft.all_gather_matmul(a, b, algorithm="push", timeout=0.05)


def in_local_worlds(_: World, *checks: Callable[[], None]) -> None:
    interpreted()
    with weft.local_world(3, products="triton", timeout=20) as local:
        for check in checks:
            local.run(check)


def test_threads():
    on_ranks(in_local_worlds, 1, programs_and_tiles, tiles_of_own_rows, lanes_of_links, different)


@pytest.mark.slow
def test_every_algorithm():
    on_ranks(in_local_worlds, 1, sweep, own_tiles, limit=300)


def links_by_torch() -> None:
    """Links need no kernels: with products of torch they are honoured, tiles are not."""
    world = current()
    world.configure(DeviceOptions(links=2))
    for name in ("push", "sequential", "auto"):
        exact("all_gather_matmul", name, torch.float32)
    exact("matmul_reduce_scatter", "push", torch.float32)
    for options in (DeviceOptions(tile=(64, 64)), DeviceOptions(compute_sms=1)):
        with pytest.raises(ValueError, match=r"are of weft's product kernel"):
            world.configure(options)
    with pytest.raises(ValueError, match="comm_sms is of a kernel"):
        world.configure(DeviceOptions(comm_sms=1))
    with pytest.raises(ValueError, match="a rank of 3 has at most 2; got 3 links"):
        world.configure(DeviceOptions(links=3))
    a = torch.ones(2, 3, 4)
    y = weft.all_gather_matmul(a, torch.ones(12, 5), dim=2)  # a split of K, over links too
    assert torch.equal(y, torch.full((2, 3, 5), 12.0))


def test_links_of_streams():
    with weft.local_world(3, streams=True, device_options=DeviceOptions(links=2)) as local:
        local.run(links_by_torch)


def between_processes(world: World) -> None:
    global ROWS
    ROWS = (70, 130)
    exact("all_gather_matmul", "push")
    exact("matmul_reduce_scatter", "auto")
    assert weft.all_gather(torch.arange(3)[world.rank :][:1]).tolist() == [0, 1]
    text = weft.explain(torch.ones(4, 16), torch.ones(16, 8))
    assert "the world's options ask for tiles of 64x64, copies on 2 SMs" in text


def test_processes():
    options = DeviceOptions(tile=(64, 64), comm_sms=2)
    on_ranks(between_processes, 2, context=partial(triton_world, device_options=options))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tile": (64, 65)}, "tile must be one of 64x64, 64x128, .*; got"),
        ({"own_tile": (64, 65)}, "own_tile must be one of 64x64, 64x128, .*; got"),
        ({"compute_sms": 0}, "compute_sms must be an integer of at least 1; got 0"),
        ({"comm_sms": -1}, "comm_sms must be an integer of at least 0; got -1"),
        ({"links": 1.5}, "links must be an integer of at least 1; got 1.5"),
    ],
)
def test_options_that_cannot_be(fields, why):
    with pytest.raises(ValueError, match=why):
        DeviceOptions(**fields)


def test_the_host_engine_refuses_options():
    options = DeviceOptions(comm_sms=2, links=2)
    what = r"device options \(copies on 2 SMs, 2 links\) are of worlds whose lanes are streams"
    with pytest.raises(ValueError, match=what):
        weft.local_world(3, device_options=options)
    with pytest.raises(ValueError, match=what):
        weft.init(device_options=options)
    with weft.local_world(1) as local, pytest.raises(ValueError, match=what):
        local.run(lambda: current().configure(options))


@pytest.fixture
def a_gpu(monkeypatch):
    """A world of two ranks on a GPU that is not there."""
    found = SimpleNamespace(multi_processor_count=132, name="H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    device = torch.device("cuda", 0)
    backend = SimpleNamespace(ranks_per_device=2, products="triton")
    return SimpleNamespace(device=device, backend=backend)


def test_sms_of_products_and_copies(a_gpu):
    pytest.importorskip("triton", "3.6")
    for options, programs in (
        (DeviceOptions(), 62),
        (DeviceOptions(comm_sms=8), 54),
        (DeviceOptions(comm_sms=8, links=2), 46),
        (DeviceOptions(comm_sms=8, compute_sms=57), 57),
    ):
        assert devices.programs(a_gpu, options) == programs
    with pytest.raises(
        ValueError,
        match="58 programs of products on each of 2 ranks that share a GPU leave no SM for 8 "
        "programs of copies and for signals: use at most 57",
    ):
        devices.check_options(a_gpu, DeviceOptions(comm_sms=8, compute_sms=58))
    with pytest.raises(ValueError, match="have 66 each, but kernels that wait need more than 68"):
        devices.check_options(a_gpu, DeviceOptions(comm_sms=64))
    devices.check_options(a_gpu, DeviceOptions(links=5))
    with pytest.raises(ValueError, match="2 ranks need 18 concurrent streams, and there are 16"):
        devices.check_options(a_gpu, DeviceOptions(links=6))
    assert "H100 with 132 SMs, 2 ranks on each, products by triton" in devices.hardware(a_gpu)


def test_tiles_of_dtypes_and_vendors(monkeypatch):
    pytest.importorskip("triton", "3.6")
    from weft.gpu.kernels.all_gather_matmul import blocks

    gpu = torch.device("cuda", 0)
    assert blocks((128, 256), gpu)[:2] == (128, 256)
    assert blocks((128, 64), gpu, torch.float32)[:2] == (128, 64)
    with pytest.raises(ValueError, match="a tile of 128x256 does not fit in the registers"):
        blocks((128, 256), gpu, torch.float32)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ValueError, match="at most 16384 elements, as 128x128"):
        blocks((256, 128), gpu)
