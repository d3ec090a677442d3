"""One table: arguments that are no tensors, of a wrong kind, and the message that refuses each.

Rank 0 makes the bad calls by itself: nothing may be sent, the world stays open, and both ranks then
make a collective call.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import weft

A, B = torch.ones(4, 8), torch.ones(8, 6)
LAYER = nn.Linear(8, 6)
COUNTS = "must be a list of integers, one per rank; got"
TRANSPOSED = "if b is (N, K), as nn.Linear.weight is"
# as torch records it for a gradient
RECORDED = partial(weft.all_gather_matmul, A.clone().requires_grad_(), B)


CALLS = {
    f"shard_rows {COUNTS} 8": partial(weft.all_gather, A, shard_rows=8),
    f"shard_rows {COUNTS} ('4', '4')": partial(weft.all_gather, A, shard_rows="44"),
    f"shard_rows {COUNTS} (4.0, 4.0)": partial(weft.all_gather_matmul, A, B, shard_rows=[4.0, 4.0]),
    f"shard_rows {COUNTS} (2.0, 2.0)": partial(weft.reduce_scatter, A, shard_rows=[2.0, 2.0]),
    f"shard_rows {COUNTS} [2.0, 2.0]": partial(weft.explain, A, B, shard_rows=[2.0, 2.0]),
    f"shard_rows {COUNTS} ('2', '2')": partial(weft.matmul_reduce_scatter, A, B, shard_rows="22"),
    f"shard_rows {COUNTS} (3.0, 3.0)": partial(RECORDED, shard_rows=[3.0, 3.0]),
    f"input_split_sizes {COUNTS} 2": partial(weft.all_to_all, A, input_split_sizes=2),
    f"output_split_sizes {COUNTS} 3": partial(
        weft.all_to_all, A, input_split_sizes=[2, 2], output_split_sizes=3
    ),
    "source must be the number of a rank; got NoneType": partial(weft.broadcast, A, None),
    "source must be the number of a rank; got float": partial(weft.broadcast, A, 1.0),
    "dim must be an integer; got float": partial(weft.all_gather, A, dim=1.0),
    "dim must be an integer; got str": partial(weft.all_gather_matmul, A, B, dim="x"),
    "dim must be an integer; got list": partial(RECORDED, dim=[0]),
    "chunk_rows must be an integer; got float": partial(weft.all_gather, A, chunk_rows=2.5),
    "chunk_rows must be an integer; got str": partial(weft.matmul_all_reduce, A, B, chunk_rows="2"),
    "world must be a weft.World, as weft.init(group) makes it; got str": partial(
        weft.all_reduce, A, world="world"
    ),
    "out_dtype must be a torch.dtype, such as torch.float32; got 'bfloat16'": partial(
        weft.all_gather_matmul, A, B, out_dtype="bfloat16"
    ),
    "out_dtype must be a torch.dtype, such as torch.float32; got 'float16'": partial(
        RECORDED, out_dtype="float16"
    ),
    "out_dtype must be float32; got torch.float16": partial(
        weft.all_gather_matmul, A, B, out_dtype=torch.float16
    ),
    f"inner dimensions must be equal: pass b.t() {TRANSPOSED}": partial(
        weft.all_gather_matmul, A, LAYER.weight.detach()
    ),
    f"inner dimensions must be equal: pass weft.pack(b.t()) {TRANSPOSED}": partial(
        weft.matmul_all_reduce, A, weft.pack(LAYER.weight.detach())
    ),
    "b must be a tensor; got Linear: pass b.weight.t()": partial(weft.all_gather_matmul, A, LAYER),
    "b must be a tensor; got list: make one call for each tensor, or pass torch.stack(b)": partial(
        weft.pack, [B, B]
    ),
    "a must be a tensor; got list: make one call for each tensor, or pass torch.stack(a)": partial(
        weft.all_reduce, [A, A]
    ),
    "a must be a tensor; got list: pass torch.as_tensor(a)": partial(weft.all_reduce, [1.0]),
    "they must have one dtype: pass b.to(a.dtype)": partial(weft.all_gather_matmul, A, B.double()),
    "they must have one dtype: pass a.to(torch.float64)": partial(
        weft.matmul_all_reduce, A, weft.pack(B.double())
    ),
    "pass a.view(1, -1) for one row": partial(weft.all_gather_matmul, A[0], B),
    "there is no algorithm None; choose auto or one of pull, push, ring": partial(
        weft.all_gather, A, algorithm=None
    ),
}


def messages(world):
    """The messages of the bad calls of rank 0, by the expected ones."""
    symmetric, found = world.empty(4, 8), {}
    order = "is symmetric: the order is"
    swapped = {
        f"src {order} put(dst, src, peer)": lambda: weft.put(A, symmetric, 1),
        f"dst {order} get(dst, src, peer)": lambda: weft.get(symmetric, A, 1),
        "world must be a weft.World": lambda: weft.put(symmetric, A, 1, world=5),
        "dtype: pass src.to(torch.float32)": lambda: weft.put(symmetric, A.double(), 1),
        "dtype: pass a dst of torch.float32": lambda: weft.get(A.double(), symmetric, 1),
    }
    if world.rank == 0:
        made = world.executor.calls
        for message, call in {**CALLS, **swapped}.items():
            with pytest.raises((TypeError, ValueError)) as refused:
                call()
            found[message] = str(refused.value)
        assert world.closed is None
        assert world.executor.calls == made
    handle = weft.all_gather_async(torch.tensor([world.rank]))
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds; got 'x'"):
        handle.wait("x")
    assert handle.wait().tolist() == [0, 1]
    return found


def test_a_bad_option_is_refused_by_name():
    with weft.local_world(2) as local:
        found, _ = local.run(lambda: messages(weft.init()))
    assert len(found) > len(CALLS)
    for message, actual in found.items():
        assert message in actual
