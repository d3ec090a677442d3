"""Collectives of torch.distributed on weft: every rank's result equals that of one process with all
ranks' data.
"""

from __future__ import annotations

import functools
import itertools
import time
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support.ranks import group, on_ranks
from torch import nn
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed.device_mesh import init_device_mesh

from weft.process_group.worlds import operations_of

WHOLE = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
MOVED = [
    *WHOLE,
    *REAL,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
REDUCTIONS = {
    "SUM": lambda rows: rows.sum(0),
    "AVG": lambda rows: rows.sum(0) // len(rows) if not rows.is_floating_point() else rows.mean(0),
    "PRODUCT": lambda rows: rows.prod(0),
    "MIN": lambda rows: rows.amin(0),
    "MAX": lambda rows: rows.amax(0),
    "BAND": lambda rows: functools.reduce(torch.bitwise_and, rows),
    "BOR": lambda rows: functools.reduce(torch.bitwise_or, rows),
    "BXOR": lambda rows: functools.reduce(torch.bitwise_xor, rows),
}


def data(rank, *shape, dtype=torch.float32, call=0):
    """Small whole numbers that differ between ranks and calls, so that all reductions are exact."""
    made = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(1000 * call + rank))
    return (made % 2).bool() if dtype == torch.bool else made.to(dtype)


def same(one, other):
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[
        one.itemsize
    ]
    assert torch.equal(one.contiguous().view(bits), other.contiguous().view(bits)), (one, other)


def reduces(world, shape):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for call, dtype in enumerate([*WHOLE, *REAL, torch.bool, torch.complex64]):
        rows = [data(r, *shape, dtype=dtype, call=call) for r in range(ranks)]
        every = torch.stack(rows)
        for op, reduced in REDUCTIONS.items():
            if (
                (dtype in REAL and op[0] == "B")
                or (dtype == torch.bool and op == "AVG")
                or (dtype.is_complex and op != "SUM")
            ):
                continue
            if dtype == torch.bool:
                expected = {"SUM": every.any(0), "PRODUCT": every.all(0)}.get(op)
                expected = reduced(every) if expected is None else expected
            else:
                expected = reduced(every.double() if dtype in REAL else every).to(dtype)
            how = getattr(dist.ReduceOp, op)
            x = rows[rank].clone()
            dist.all_reduce(x, how)
            same(x, expected)
            x = rows[rank].clone()
            dist.reduce(x, ranks - 1, how)
            same(x, expected if rank == ranks - 1 else rows[rank])
            if not shape:
                continue
            out = torch.full_like(x, 1)
            dist.reduce_scatter(out, [rows[rank]] * ranks, how)
            same(out, expected)
            out = torch.full_like(x, 1)
            world.reduce_scatter_single(out, torch.cat([rows[rank]] * ranks), _scatter(how)).wait()
            same(out, expected)


def _scatter(op):
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    return options


@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (70, 1000)])
def test_reductions_of_every_dtype(shape):
    on_ranks(reduces, 2, shape, context=group)


def moves(world):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for call, dtype in enumerate(MOVED):
        of = functools.partial(data, dtype=dtype, call=call)
        rows = [of(r, 3, 4) for r in range(ranks)]
        for root in range(ranks):
            x = rows[rank].clone()
            dist.broadcast(x, root)
            same(x, rows[root])
            x = rows[rank].t().clone().t()  # in column-major layout
            dist.broadcast(x, root)
            same(x, rows[root])
            outs = [torch.zeros_like(x) for _ in range(ranks)] if rank == root else None
            dist.gather(rows[rank], outs, root)
            for out, row in zip(outs or [], rows, strict=False):
                same(out, row)
            out = torch.zeros_like(x)
            dist.scatter(
                out, [of(10 + r, 3, 4) for r in range(ranks)] if rank == root else None, root
            )
            same(out, of(10 + rank, 3, 4))
        outs = [torch.zeros_like(rows[0].t()).t() for _ in range(ranks)]
        dist.all_gather(outs, rows[rank])
        for out, row in zip(outs, rows, strict=True):
            same(out, row)
        for whole in (
            torch.zeros(ranks * 3, 4, dtype=dtype),
            torch.zeros(ranks, 3, 4, dtype=dtype),
        ):
            world.all_gather_single(whole, rows[rank]).wait()
            same(whole, torch.cat(rows).view(whole.shape))
        uneven = [of(r, 2 * r, 3) for r in range(ranks)]
        outs = [torch.zeros_like(part) for part in uneven]
        dist.all_gather(outs, uneven[rank])
        for out, row in zip(outs, uneven, strict=True):
            same(out, row)
        even = [of(20 + r, 2 * ranks, 3) for r in range(ranks)]
        out = torch.zeros_like(even[rank])
        dist.all_to_all_single(out, even[rank])
        same(out, torch.cat([part[2 * rank : 2 * rank + 2] for part in even]))
        sizes = [[(giver + 2 * taker) % 4 for taker in range(ranks)] for giver in range(ranks)]
        inputs = [of(30 + r, sum(sizes[r]), 2) for r in range(ranks)]
        taken = [sizes[giver][rank] for giver in range(ranks)]
        expected = [inputs[giver].split(sizes[giver])[rank] for giver in range(ranks)]
        out = torch.zeros(sum(taken), 2, dtype=dtype)
        dist.all_to_all_single(out, inputs[rank], taken, sizes[rank])
        same(out, torch.cat(expected))
        outs = [torch.zeros(n, 2, dtype=dtype) for n in taken]
        dist.all_to_all(outs, [*inputs[rank].split(sizes[rank])])
        for out, part in zip(outs, expected, strict=True):
            same(out, part)


@pytest.mark.data
def test_every_dtype_is_moved():
    on_ranks(moves, 3, context=group)


def repeated(rank, dtype, shape):
    """A sparse tensor with so many elements, of which some are at the same place."""
    places = torch.arange(2 * rank).reshape(2, rank) % shape[0]
    values = torch.ones(rank, *shape[2:]).to(dtype) * 3
    return torch.sparse_coo_tensor(places, values, shape, check_invariants=True)


def others(world):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = nn.Parameter(data(rank, 4))
    dist.all_reduce(x, _make_nccl_premul_sum(3.0))
    same(x.detach(), 3 * sum(data(r, 4) for r in range(ranks)))
    for dtype in (torch.int32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64):
        scaled = torch.tensor([2, 4]).to(dtype)
        dist.all_reduce(scaled, _make_nccl_premul_sum(0.5))
        same(scaled, (ranks * torch.tensor([1.0, 2.0])).to(dtype))
    pieces = [data(rank, r + 1, call=1) for r in range(ranks)]
    out = torch.zeros(rank + 1)
    dist.reduce_scatter(out, pieces, dist.ReduceOp.MAX)
    same(out, torch.stack([data(r, rank + 1, call=1) for r in range(ranks)]).amax(0))
    for dtype, dense in itertools.product((torch.float32, torch.bfloat16, torch.int64), ((), (3,))):
        tensors = [repeated(r, dtype, (ranks, ranks, *dense)) for r in range(ranks)]
        total = sum(tensor.to_dense() for tensor in tensors)
        dist.all_reduce(tensors[rank])
        same(tensors[rank].to_dense(), total)
    with pytest.raises(ValueError, match="all_reduce of sparse tensors can only add; got max"):
        dist.all_reduce(tensors[rank], dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match=f"that of rank {rank} has 1 sparse dimensions of"):
        dist.all_reduce(torch.ones(rank + 1).to_sparse())
    small = torch.tensor([1.5, 0.25]).to(torch.float8_e4m3fn)
    dist.all_reduce(small)
    same(small, (ranks * torch.tensor([1.5, 0.25])).to(torch.float8_e4m3fn))

    with dist._coalescing_manager() as manager:
        tensors = [data(rank, 3), data(rank, 5), data(rank, 2, 2, call=2)]
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert not manager.works
    for tensor, call in zip(tensors, (0, 0, 2), strict=True):
        same(tensor, sum(data(r, *tensor.shape, call=call) for r in range(ranks)))

    objects = [{"rank": rank}] if rank == 1 else [None]
    dist.broadcast_object_list(objects, 1)
    assert objects == [{"rank": 1}]
    found = [None] * ranks
    dist.all_gather_object(found, "x" * rank)
    assert found == ["x" * r for r in range(ranks)]
    dist.barrier()
    dist.monitored_barrier()

    mesh = init_device_mesh("cpu", (ranks,))
    mine = data(rank, 2, 3)
    every = [data(r, 2, 3) for r in range(ranks)]
    same(functional.all_reduce(mine, "sum", mesh).clone(), sum(every))
    same(functional.all_gather_tensor(mine, 0, mesh).clone(), torch.cat(every))
    whole = data(rank, 2 * ranks, 3, call=3)
    summed = sum(data(r, 2 * ranks, 3, call=3) for r in range(ranks))
    same(
        functional.reduce_scatter_tensor(whole, "sum", 0, mesh).clone(),
        summed[2 * rank : 2 * rank + 2],
    )
    same(functional.broadcast(mine, 0, mesh).clone(), every[0])
    first, second = functional.all_reduce_coalesced([mine, mine.long()], "sum", mesh)
    same(first.clone(), sum(every))
    same(second.clone(), sum(every).long())


def test_other_collectives_of_torch():
    on_ranks(others, 2, context=group)


def of_functional_results(world):
    """Results of functional collectives, which may not be there yet, are arguments of others."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def pending(*shape, call=0):
        return functional.all_reduce(data(rank, *shape, call=call), "sum", world)

    def there(*shape, call=0):
        return sum(data(r, *shape, call=call) for r in range(ranks))

    for asynchronous in (False, True):
        x = pending(4)
        assert type(x) is functional.AsyncCollectiveTensor
        work = dist.all_reduce(x, async_op=asynchronous)
        if asynchronous:
            work.wait()
        same(x.clone(), ranks * there(4))
        x, root = pending(4) + rank, pending(4)
        dist.broadcast(x, 1)
        dist.reduce(root, 0)
        same(x, there(4) + 1)
        same(root.clone(), (ranks if rank == 0 else 1) * there(4))
    outs = [pending(4, call=1) for _ in range(ranks)]
    dist.all_gather(outs, pending(4))
    for out in outs:
        same(out.clone(), there(4))
    out = pending(2, 4)
    world.all_gather_single(out, pending(4)).wait()
    same(out.clone(), there(4).expand(2, 4))
    out = pending(2)
    world.reduce_scatter_single(out, pending(4)).wait()
    same(out.clone(), 2 * there(4)[2 * rank : 2 * rank + 2])
    out = pending(4)
    dist.all_to_all_single(out, pending(4, call=1))
    same(out.clone(), there(4, call=1)[2 * rank : 2 * rank + 2].repeat(2))
    x, peer = pending(4), 1 - rank
    work = dist.isend(pending(4, call=2), peer)
    dist.recv(x, peer)
    work.wait()
    same(x.clone(), there(4, call=2))
    with dist._coalescing_manager():
        dist.all_reduce(x)
    same(x.clone(), ranks * there(4, call=2))
    same(functional.all_gather_tensor(pending(4), 0, world).clone(), there(4).repeat(2))


def integers(world):
    """Averages of integers are exact and rounded toward zero, where sums have more digits."""
    random = torch.Generator().manual_seed(3)
    for dtype in WHOLE:
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        numbers = torch.tensor([least, least + 1, -1 if least else 1, 0, most - 1, most]).to(dtype)
        rows = [numbers[torch.randint(6, (50,), generator=random)] for _ in range(2)]
        sums = [sum(column) for column in zip(*(row.tolist() for row in rows), strict=True)]
        expected = torch.tensor([abs(each) // 2 * (1 if each > 0 else -1) for each in sums])
        for inference in (False, True):
            with torch.inference_mode(inference):
                x, y, z = (rows[dist.get_rank()].clone() for _ in range(3))
            dist.all_reduce(x, dist.ReduceOp.AVG)
            dist.all_reduce(y, dist.ReduceOp.AVG, async_op=True).wait()
            dist.reduce(z, 1, dist.ReduceOp.AVG)
            for found in (x, y, z)[: 2 + dist.get_rank()]:
                same(found, expected.to(dtype))


def test_functional_results_and_integer_averages():
    on_ranks(_both, 2, context=group)


def _both(world):
    of_functional_results(world)
    integers(world)


def layouts(world):
    """Ranks may pass tensors of other strides, shapes and types than each other, if they have as
    many elements.
    """
    rank, before = dist.get_rank(), operations_of(world).world.executor.calls
    x, kinds = data(rank, 4, 6), range(6)
    every = [data(r, 4, 6) for r in range(2)]

    def as_kind(tensor, kind):
        if kind == 1:
            return tensor.t().contiguous().t()
        if kind == 2:
            return nn.Parameter(tensor, requires_grad=rank == 1)
        if kind == 3:
            return tensor.view(-1)
        if kind == 4:
            return tensor.view(2, len(tensor) // 2, -1)
        return tensor.new_zeros(len(tensor), 9)[:, :6].copy_(tensor) if kind == 5 else tensor

    for mine in ((kind, 0) if rank else (0, kind) for kind in kinds):
        for of_input, of_output in (mine, mine[::-1], (mine[rank], mine[rank])):
            out = as_kind(torch.zeros(8, 6), of_output)
            world.all_gather_single(out, as_kind(x, of_input)).wait()
            same(out.detach().reshape(8, 6), torch.cat(every))
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT):
                out = as_kind(torch.zeros(2, 6), of_output)
                world.reduce_scatter_single(out, as_kind(x, of_input), _scatter(op)).wait()
                whole = sum(every) if op == dist.ReduceOp.SUM else every[0] * every[1]
                same(out.detach().reshape(2, 6), whole[2 * rank : 2 * rank + 2])
            out = as_kind(torch.zeros(4, 6), of_output)
            dist.all_to_all_single(out, as_kind(x, of_input))
            same(
                out.detach().reshape(4, 6),
                torch.cat([each[2 * rank : 2 * rank + 2] for each in every]),
            )
    sent, received = [[1, 3], [2, 2]][rank], [[1, 2], [3, 2]][rank]
    parts = [every[0].split([1, 3])[rank], every[1].split([2, 2])[rank]]
    out = torch.zeros(sum(received), 6)
    if rank:  # in parts of elements
        x, out, sent, received = x.view(-1), out.view(-1), [12, 12], [18, 12]
    dist.all_to_all_single(out, x, received, sent)
    same(out.view(-1, 6), torch.cat(parts))
    with pytest.raises(ValueError, match="sends rank 0 2 elements, but rank 0 expects 1"):
        dist.all_to_all_single(
            torch.zeros(2 + rank), torch.zeros(3), [1, 1 + rank], [2 - rank, 1 + rank]
        )
    assert operations_of(world).world.executor.calls > before


def overlapping(world):
    """An output may be any part of the input."""
    rank = dist.get_rank()
    rows, every = data(rank, 6, 40), [data(r, 6, 40) for r in range(2)]
    for start in (0, 1, 3):
        x = rows.clone()
        world.reduce_scatter_single(x[start : start + 3], x, _scatter(dist.ReduceOp.SUM)).wait()
        same(x[start : start + 3], sum(every)[3 * rank : 3 * rank + 3])
        y = torch.cat([rows, rows])
        world.all_gather_single(y, y[start : start + 6]).wait()
        same(y, torch.cat([torch.cat([each, each])[start : start + 6] for each in every]))
        z = torch.cat([rows, rows])
        dist.all_to_all_single(z[start : start + 6], z[:6])
        same(z[start : start + 6], torch.cat([each[3 * rank : 3 * rank + 3] for each in every]))


def test_layouts_of_ranks_that_differ():
    on_ranks(_layouts, 2, context=group)


def _layouts(world):
    layouts(world)
    overlapping(world)
    one_element(world)


def one_element(world):
    """A single element has any stride."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    x = data(rank, 1, 5)[:, 2]
    y = torch.zeros(1, 5, dtype=x.dtype)[:, 2]
    work = dist.isend(x, peer)
    dist.recv(y, peer)
    work.wait()
    same(y, data(peer, 1, 5)[:, 2])
    dist.all_reduce(x)
    same(x, sum(data(r, 1, 5)[:, 2] for r in range(2)))
    for side in ("input", "output"):
        scalar, pair = torch.tensor(1.0), torch.zeros(2)
        with pytest.raises(ValueError, match=f"the {side} must have at least one dimension"):
            dist.all_to_all_single(*((pair, scalar) if side == "input" else (scalar, pair)))


def expanded(world):
    """A tensor with several elements in one place, such as an expanded one, is reduced in that
    place.
    """
    for repeated in (lambda x: x.expand(4, 3), lambda x: x.view(3, 1, 1).expand(3, 2, 5)):
        for op, result in ((dist.ReduceOp.SUM, 3.0), (dist.ReduceOp.PRODUCT, 2.0)):
            x = torch.full((3,), dist.get_rank() + 1.0)
            dist.all_reduce(repeated(x), op)
            assert x.tolist() == [result] * 3


def test_expanded_tensors_are_reduced():
    on_ranks(expanded, 2, context=group)


def warnings_of(backward):
    """The warnings of torch in a backward pass."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        backward()
    return [str(each.message) for each in found if "autograd kernel" in str(each.message)]


def unrecorded(world):
    """A backward pass through a tensor that was overwritten without a gradient warns, as on gloo;
    through other tensors it does not.
    """
    for call in (
        dist.all_reduce,
        lambda x: dist.all_reduce(x, async_op=True).wait(),
        lambda x: dist.broadcast(x, 0),
    ):
        for make in (lambda x: x * 2, lambda x: x):
            x = make(torch.ones(3, requires_grad=True))
            call(x)
            assert len(warnings_of(x.sum().backward)) == 1
            x = make(torch.ones(3, requires_grad=True))
            with torch.no_grad():
                call(x)
            assert not warnings_of(x.sum().backward)
    x = torch.ones(2, 3, requires_grad=True)
    assert not warnings_of(functional.all_reduce(x * 2, "sum", world).sum().backward)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    assert not warnings_of(lambda: model(x).sum().backward())


def test_overwriting_a_graph_warns_in_its_backward_pass():
    on_ranks(unrecorded, 2, context=group)


def refuses(world):
    backend = world._get_backend(torch.device("cpu"))
    wrong = {
        "the input has 1 elements, but its output on rank": lambda: dist.all_gather(
            [torch.zeros(2)] * 2, torch.zeros(1)
        ),
        "must have 2 times the 3 elements": lambda: world.all_gather_single(
            torch.zeros(5), torch.zeros(3)
        ).wait(),
        "5 rows, which cannot be split evenly": lambda: dist.all_to_all_single(
            torch.zeros(5), torch.zeros(5)
        ),
        "got an empty list": [
            lambda: backend.allreduce([]),
            lambda: backend.broadcast([]),
            lambda: backend.send([], 1 - dist.get_rank(), 0),
        ],
        "there is no rank 7 in a group of 2": [
            lambda: dist.reduce(torch.zeros(1), 7),
            lambda: dist.broadcast(torch.zeros(1), 7),
            lambda: dist.gather(torch.zeros(1), None, 7),
            lambda: dist.scatter(torch.zeros(1), None, 7),
        ],
        "the tag of a message must be from 0": [
            lambda: dist.isend(torch.zeros(1), 1 - dist.get_rank(), tag=-1),
            lambda: dist.irecv(torch.zeros(1), tag=-1),
        ],
    }
    for words, calls in wrong.items():
        for call in calls if isinstance(calls, list) else [calls]:
            with pytest.raises(ValueError, match=words):
                call()
    for dtype, op, words in [
        (
            torch.float32,
            dist.ReduceOp.BXOR,
            "no bxor of float32: bitwise reductions need integers",
        ),
        (torch.bool, dist.ReduceOp.AVG, "no avg of bool: choose another"),
        (torch.float16, dist.ReduceOp.BAND, "no band of float16"),
    ]:
        for call in (lambda x, op: dist.all_reduce(x, op), lambda x, op: dist.reduce(x, 0, op)):
            with pytest.raises(TypeError, match=words):
                call(torch.zeros(2, dtype=dtype), op)
    x = torch.ones(2)
    dist.all_reduce(x)  # the group stays usable
    same(x, torch.full((2,), 2.0))
    peer = 1 - dist.get_rank()
    work = dist.isend(x, peer, tag=(1 << 31) - 1)
    dist.recv(torch.zeros(2), peer, tag=(1 << 31) - 1)
    work.wait()


def test_wrong_arguments_leave_the_group_usable():
    on_ranks(refuses, 2, context=group)


def requires_a_gradient_meanwhile(world):
    """As a result of an autograd function does, while its work is under way."""
    store, own = world.get_group_store(), operations_of(world).world
    out, rank = torch.zeros(4), dist.get_rank()
    if rank:
        store.wait(["requires a gradient"])
        dist.all_to_all_single(out, torch.ones(4), [1, 3], [1, 3])
        return
    before = own.executor.calls
    work = dist.all_to_all_single(out, torch.ones(4), [3, 1], [3, 1], async_op=True)
    while own.executor.calls == before:  # until it waits for the sizes of rank 1
        time.sleep(0)
    out.requires_grad_()
    store.set("requires a gradient", "")
    work.wait()
    assert out.tolist() == [1.0] * 4


def test_a_result_that_requires_a_gradient_before_it_is_there():
    on_ranks(requires_a_gradient_meanwhile, 2, context=group)
