"""Checks of weft's communicator of vLLM, run on each rank in the environment of `make vllm`."""

import sys
from functools import partial

import torch
import torch.distributed as dist

from weft.vllm.communicator import Communicator


def made(rank, name, shape, dtype):
    """A tensor of whole numbers that `rank` has, small enough that sums are exact."""
    generator = torch.Generator().manual_seed(100 * rank + sum(map(ord, name)))
    return torch.randint(-8, 8, shape, generator=generator).to(dtype)


def communicator(ranks, name):
    """The communicator of a group of these ranks, None on others, as vLLM makes it."""
    group = dist.new_group(ranks, backend="weft")
    cpu_group = dist.new_group(ranks, backend="gloo")
    if dist.get_rank() not in ranks:
        return None
    return Communicator(cpu_group, torch.device("cpu"), group, name)


def check_collectives(group, dtype):
    of = partial(made, name=str(dtype), shape=(6 * group.world_size, 5), dtype=dtype)
    mine, everyone = of(group.ranks[group.rank]), [of(rank) for rank in group.ranks]
    summed = sum(tensor.double() for tensor in everyone).to(dtype)
    sizes = [2 * rank for rank in range(group.world_size)]  # rank 0 has none
    part = slice(sum(sizes[: group.rank]), sum(sizes[: group.rank + 1]))

    reduced = mine.clone()
    assert group.all_reduce(reduced) is reduced
    assert torch.equal(reduced, summed)
    strided = mine.repeat(1, 2)[:, ::2]
    assert torch.equal(
        group.all_reduce(strided), sum(t.repeat(1, 2)[:, ::2].double() for t in everyone).to(dtype)
    )
    for dim in 0, 1, -1:
        assert torch.equal(group.all_gather(mine, dim), torch.cat(everyone, dim))
    rows = [tensor[:size] for tensor, size in zip(everyone, sizes, strict=True)]
    pair = [rows[group.rank], rows[group.rank][:, 0].contiguous()]
    gathered = group.all_gatherv(pair, 0, sizes)
    assert torch.equal(gathered[0], torch.cat(rows))
    assert torch.equal(gathered[1], torch.cat([tensor[:, 0] for tensor in rows]))
    equal = 6 * group.rank
    assert torch.equal(group.reduce_scatter(mine, 0), summed[equal : equal + 6])
    added = group.reduce_scatterv(mine[: sum(sizes)], 0, sizes)
    assert torch.equal(added, summed[: sum(sizes)][part])
    out = torch.empty_like(added)
    group.reduce_scatterv_into_output(mine[: sum(sizes)], out, 0, sizes)
    assert torch.equal(out, added)
    for root in range(group.world_size):
        joined = group.gather(mine, root, 1)
        assert torch.equal(joined, torch.cat(everyone, 1)) if group.rank == root else joined is None
        assert torch.equal(group.broadcast(mine.clone(), root), everyone[root])
    rows_to = [rank + 1 for rank in range(group.world_size)]
    sent = mine[: sum(rows_to)]
    received = group.all_to_all(sent, [group.rank + 1] * group.world_size, rows_to)
    start = sum(rows_to[: group.rank])
    assert torch.equal(received, torch.cat([t[start : start + group.rank + 1] for t in everyone]))


def check_bytes(group):
    """Dtypes that weft moves as bytes."""
    own = torch.full((3, 4), 1.0 + group.rank).to(torch.float8_e4m3fn)
    gathered = group.all_gather(own, 0)
    assert gathered.dtype == own.dtype
    assert gathered[::3, 0].tolist() == [1.0 + rank for rank in range(group.world_size)]


def check_messages(group):
    here, ranks = group.rank, group.world_size
    to, source = (here + 1) % ranks, (here - 1) % ranks
    named = {"x": made(here, "x", (70, 3), torch.bfloat16), "none": torch.empty(0, 4)}
    if here % 2 == 0:
        group.send_tensor_dict(named, to)
        group.send(named["x"])
        found, again = group.recv_tensor_dict(source), group.recv((70, 3), torch.bfloat16)
    else:
        found, again = group.recv_tensor_dict(source), group.recv((70, 3), torch.bfloat16)
        group.send_tensor_dict(named, to)
        group.send(named["x"])
    expected = made(source, "x", (70, 3), torch.bfloat16)
    assert [*found] == ["x", "none"]
    assert torch.equal(found["x"], expected)
    assert torch.equal(again, expected)
    assert found["none"].shape == (0, 4)
    message = rejection(lambda: group.send_tensor_dict({"number": 3}, to))
    assert "'number' is a int" in message


def check_compiled(group):
    """Graphs of vLLM's kind: the whole model at once, of any number of rows."""

    @partial(torch.compile, fullgraph=True, dynamic=True)
    def model(x):
        y = group.all_reduce(x * 2)
        return group.all_gather(y + 1, 0), group.reduce_scatter(y.repeat(group.world_size, 1), 0)

    for rows in 4, 7:
        everyone = [made(rank, "c", (rows, 8), torch.float32) for rank in group.ranks]
        gathered, scattered = model(everyone[group.rank])
        total = 2 * sum(everyone)
        assert torch.equal(gathered, (total + 1).repeat(group.world_size, 1))
        assert torch.equal(scattered, total * group.world_size)


def rejection(call):
    """The words with which a call is rejected."""
    try:
        call()
    except (TypeError, ValueError) as error:
        return str(error)
    raise AssertionError("not rejected")


def check_refusals(group):
    uneven = torch.zeros(group.world_size + 1, 2)
    assert "evenly" in rejection(lambda: group.reduce_scatter(uneven, 0))
    other = group.cpu_group
    assert "backend weft" in rejection(lambda: Communicator(other, None, other, "tp:9"))


def main():
    dist.init_process_group("weft")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everyone = communicator([*range(ranks)], "tp:0")
    overlapping = communicator([0, ranks - 1], "ep:0")
    for group in filter(None, (everyone, overlapping)):
        for dtype in torch.float32, torch.bfloat16, torch.int32:
            check_collectives(group, dtype)
        check_bytes(group)
        if group.world_size % 2 == 0:
            check_messages(group)
        check_refusals(group)
    check_compiled(everyone)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print("all checks passed")


if __name__ == "__main__":
    sys.exit(main())
