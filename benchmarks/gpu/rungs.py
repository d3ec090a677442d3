"""The rungs of `ladder.py`: calls of weft by ranks that share a device, from the simplest on, each
checked against a result that torch computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import weft
from weft.schedules.operators import OPERATORS
from weft.world import World
from weft_tools.bench.graphs import captured

DTYPE = torch.bfloat16


class Size(NamedTuple):
    """Rows of a rank, K and N; and the SMs, the bytes of a tile and the warps of kernels that
    copy.
    """

    m: int
    k: int
    n: int
    sms: int
    tile: int
    warps: int

    @property
    def launch(self) -> dict[str, Any]:
        """The arguments of an all-gather by a kernel."""
        return {"algorithm": "kernel", "launch": weft.Launch(self.sms, self.tile, self.warps)}


GPU, CPU = Size(1024, 1024, 1024, 8, 16384, 8), Size(32, 16, 16, 2, 1024, 1)


class Rung(NamedTuple):
    """A call of `work` with the world of each of `ranks` ranks, which multiply by `products`."""

    name: str
    work: Callable[[World], None]
    ranks: int = 2
    products: str = "torch"
    options: weft.DeviceOptions = weft.DeviceOptions()


def rungs(on_gpu: bool) -> list[Rung]:
    """All rungs of a GPU, or those that a CPU can climb, where kernels are interpreted."""
    size = GPU if on_gpu else CPU
    kernels = "torch" if on_gpu else "triton"  # a CPU has kernels in such worlds only
    launch = size.launch
    copied = {"algorithm": "kernel", "comm_sms": 4}
    found = [
        Rung("one-sided, copy engine", partial(one_sided, algorithm="copy-engine")),
        Rung("one-sided, auto", one_sided),
        Rung("signals", signals),
        Rung("barriers", barriers),
        Rung("one-sided, kernel", partial(one_sided, **copied), products=kernels),
        *(
            Rung(f"all_gather {each}", partial(gathers, size, algorithm=each))
            for each in ("pull", "push", "ring")
        ),
        Rung("reductions", partial(reductions, size)),
        Rung("all_gather kernel", partial(gathers, size, **launch), products=kernels),
        Rung("all_gather kernel, odd rows", partial(odd_rows, size, **launch), products=kernels),
        Rung("all_gather beside a product", partial(beside, size)),
        Rung(
            "all_gather kernel beside a product", partial(beside, size, **launch), products=kernels
        ),
    ]
    if on_gpu:
        gluon = {**launch, "launch": launch["launch"]._replace(gluon=True)}
        found.append(Rung("all_gather gluon", partial(gathers, size, **gluon)))
    for products in ("torch", "triton"):
        found += fused(size, products)
    pushed, by_sms = partial(gather_matmul, size, "push"), weft.DeviceOptions(comm_sms=size.sms)
    found += [
        Rung("copies by SMs, triton", pushed, 2, "triton", by_sms),
        Rung("gradients", gradients),
        Rung("4 ranks, torch", pushed, 4),
        Rung("4 ranks, triton", pushed, 4, "triton"),
        Rung("4 ranks, put, triton", partial(matmul_scatter, size, "put"), 4, "triton"),
    ]
    if on_gpu:
        found += [
            Rung("time-out", late),
            *(
                Rung(f"graph, {each}", partial(graph, size), 2, each)
                for each in ("torch", "triton")
            ),
        ]
    return found


def fused(size: Size, products: str) -> list[Rung]:
    """Every algorithm of the fused operators, with products by `products`."""
    operators: dict[str, Callable[..., None]] = {
        "all_gather_matmul": gather_matmul,
        "matmul_reduce_scatter": matmul_scatter,
        "matmul_all_reduce": matmul_reduce,
    }
    works: dict[str, Callable[[World], None]] = {
        f"{name} {algorithm}": partial(work, size, algorithm)
        for name, work in operators.items()
        for algorithm in OPERATORS[name].algorithms
    }
    works |= {
        "all_gather_matmul with bias": partial(gather_matmul, size, "push", biased=True),
        "other layouts": partial(other_layouts, size),
    }
    return [Rung(f"{name}, {products}", work, 2, products) for name, work in works.items()]


def equal(found: Tensor, wanted: Tensor, what: str) -> None:
    """Raise `AssertionError` unless both are equal."""
    if not torch.equal(found, wanted):
        wrong = int((found != wanted).sum())
        raise AssertionError(f"{what}: {wrong} of {found.numel()} elements are wrong")


def close(found: Tensor, exact: Tensor, what: str) -> None:
    """Raise `AssertionError` unless the error is one of rounding."""
    error = (found.double() - exact).abs().max().item()
    bound = 2e-2 * exact.abs().max().item() + 1e-6
    if not error <= bound:  # nor a NaN
        raise AssertionError(f"{what}: the error is {error:.3g}, the bound {bound:.3g}")


def random(world: World, seed: int, *shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """The same random tensor on every rank."""
    generator = torch.Generator(device=world.device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=world.device).to(dtype)


def shards(world: World, size: Size) -> list[Tensor]:
    """The rows of every rank."""
    return [random(world, rank, size.m, size.k) for rank in range(world.ranks)]


def one_sided(world: World, **way: Any) -> None:
    peer, before = (world.rank + 1) % world.ranks, (world.rank - 1) % world.ranks
    memory = world.empty(512, 96, dtype=DTYPE).fill_(-1.0)
    weft.barrier()
    for run in range(3):
        own = random(world, 10 * run + world.rank, 512, 96)
        weft.put(memory, own, peer, **way)
        weft.barrier()
        equal(memory, random(world, 10 * run + before, 512, 96), f"put, run {run}")
        got = torch.zeros_like(memory)
        weft.get_async(got, memory, peer, **way).wait()
        equal(got, own, f"get, run {run}")
        weft.barrier()


def signals(world: World) -> None:
    peer, before = (world.rank + 1) % world.ranks, (world.rank - 1) % world.ranks
    memory, came = world.empty(1 << 16, dtype=torch.int32).zero_(), world.signals(2)
    weft.barrier()
    for run in range(1, 20):
        own = torch.full_like(memory, run * 100 + world.rank)
        weft.put_notify(memory, own, came, 0, peer)
        weft.wait(came, 0, ">=", run)
        found = memory.clone()
        weft.notify(came, 1, before)
        weft.wait(came, 1, ">=", run)
        equal(found, torch.full_like(found, run * 100 + before), f"run {run}")


def barriers(world: World) -> None:
    for _ in range(100):
        weft.barrier()


def gathers(size: Size, world: World, **way: Any) -> None:
    rows = shards(world, size)
    symmetric = world.empty(size.m * world.ranks, size.k, dtype=DTYPE)
    for out in (None, symmetric):
        for run in range(3):
            if out is not None:
                out.fill_(float("nan"))
            weft.barrier()
            found = weft.all_gather(rows[world.rank], out=out, **way)
            equal(found, torch.cat(rows), f"run {run}, out {'new' if out is None else 'symmetric'}")


def odd_rows(size: Size, world: World, **way: Any) -> None:
    """Rows at addresses and distances that are no multiples of 16 bytes."""
    rows = shards(world, size)
    for first, last in ((0, 3), (1, 1 + size.k // 2), (3, size.k)):
        part = slice(first, last)
        found = weft.all_gather(rows[world.rank][:, part], **way)
        equal(found, torch.cat(rows)[:, part], f"columns {first}:{last}")


def reductions(size: Size, world: World) -> None:
    rows = shards(world, size)
    total, part = sum(each.double() for each in rows), size.m // world.ranks
    for run in range(3):
        close(weft.all_reduce(rows[world.rank]), total, f"all_reduce, run {run}")
        found = weft.reduce_scatter(rows[world.rank])
        own = slice(part * world.rank, part * (world.rank + 1))
        close(found, total[own], f"reduce_scatter, run {run}")


def beside(size: Size, world: World, **way: Any) -> None:
    rows, b = shards(world, size), random(world, 99, size.k, size.n)
    own = rows[world.rank]
    for run in range(3):
        handle = weft.all_gather_async(own, **way)
        product = own @ b
        equal(handle.wait(), torch.cat(rows), f"gather, run {run}")
        close(product, own.double() @ b.double(), f"product, run {run}")


def operands(world: World, size: Size) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The rows and the weight of every rank, and their exact products."""
    rows = shards(world, size)
    weights = [random(world, 90 + rank, size.k, size.n) for rank in range(world.ranks)]
    return rows, weights, [a.double() @ b.double() for a, b in zip(rows, weights, strict=True)]


def gather_matmul(size: Size, algorithm: str, world: World, biased: bool = False) -> None:
    rows, weights, _ = operands(world, size)
    b = weights[world.rank]
    bias = random(world, 77, size.n) if biased else None
    exact = torch.cat(rows).double() @ b.double()
    if bias is not None:
        exact = exact + bias.double()
    for run in range(3):
        out = torch.full_like(exact, float("nan"), dtype=DTYPE)
        weft.all_gather_matmul(rows[world.rank], b, algorithm=algorithm, out=out, bias=bias)
        close(out, exact, f"run {run}")


def matmul_scatter(size: Size, algorithm: str, world: World) -> None:
    rows, weights, exact = operands(world, size)
    part = size.m // world.ranks
    own = slice(part * world.rank, part * (world.rank + 1))
    for run in range(3):
        found = weft.matmul_reduce_scatter(
            rows[world.rank], weights[world.rank], algorithm=algorithm
        )
        close(found, total(exact)[own], f"run {run}")


def matmul_reduce(size: Size, algorithm: str, world: World) -> None:
    rows, weights, exact = operands(world, size)
    for run in range(3):
        found = weft.matmul_all_reduce(rows[world.rank], weights[world.rank], algorithm=algorithm)
        close(found, total(exact), f"run {run}")


def total(terms: Sequence[Tensor]) -> Tensor:
    """The sum of the terms of all ranks."""
    return torch.stack([*terms]).sum(0)


def other_layouts(size: Size, world: World) -> None:
    """Calls of one kind with a transposed weight, and with results at odd addresses: their kernels
    are others than those that the first call has loaded.
    """
    rows, weights, every = operands(world, size)
    own, b = rows[world.rank], weights[world.rank]
    exact = torch.cat(rows).double() @ b.double()
    part = size.m // world.ranks
    mine = slice(part * world.rank, part * (world.rank + 1))
    for weight in (b, b.t().contiguous().t()):
        close(weft.all_gather_matmul(own, weight, algorithm="push"), exact, "all_gather_matmul")
        for algorithm in ("put", "push"):  # in a push the comm lane waits for the product
            found = weft.matmul_reduce_scatter(own, weight, algorithm=algorithm)
            close(found, total(every)[mine], f"matmul_reduce_scatter by {algorithm}")
    memory = torch.empty(exact.numel() + 8, device=world.device, dtype=DTYPE)
    for first in (0, 1):
        out = memory[first : first + exact.numel()].view_as(exact)
        weft.all_gather_matmul(own, b, algorithm="push", out=out)
        close(out, exact, f"out {2 * first} bytes behind an aligned address")


def gradients(world: World) -> None:
    a = random(world, world.rank, 64, 32, dtype=torch.float32).requires_grad_()
    b = random(world, 99, 32, 16, dtype=torch.float32).requires_grad_()
    weft.all_gather_matmul(a, b).square().sum().backward()
    product = a.detach().double() @ b.detach().double()
    assert a.grad is not None
    close(a.grad, world.ranks * 2 * product @ b.detach().double().t(), "gradient")


def late(world: World) -> None:
    """A wait that times out: its record, and the error of the next call."""
    counter = world.signals(1, "late")
    weft.barrier()
    if world.rank:
        return
    begun = time.perf_counter()
    weft.wait(counter, 0, ">=", 1, timeout=0.5)
    torch.cuda.current_stream().synchronize()
    print(f"   a wait of 0.5 s took {time.perf_counter() - begun:.3f} s", flush=True)
    try:
        weft.notify(counter, 0, 1)
    except weft.PeerTimeout as error:
        if "late[0] >= 1: it was 0" not in str(error):
            raise
    else:
        raise AssertionError("the wait for a notify that never comes was no PeerTimeout")


def graph(size: Size, world: World) -> None:
    """A call in a CUDA graph, replayed on other operands."""
    a = torch.ones(size.m, size.k, device=world.device)
    b = torch.ones(size.k, size.n, device=world.device)
    out = torch.empty(size.m, size.n, device=world.device)
    call = partial(weft.matmul_all_reduce, a, b, out=out)
    call()
    stream = torch.cuda.current_stream()
    stream.synchronize()
    replay = captured(world, call)
    for value in range(1, 4):
        a.fill_(float(value))
        weft.barrier()
        replay()
        stream.synchronize()
        wanted = torch.full_like(out, size.k * value * world.ranks)
        equal(out, wanted, f"replay on {value}")
