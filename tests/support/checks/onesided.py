"""Checks of one-sided calls that all worlds pass: on a CPU, on lanes, and by kernels."""

import re
from pathlib import Path

import torch

import weft

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex128,
)
VIEWS = {
    "contiguous": lambda t: t,
    "rows": lambda t: t[1:-1],
    "columns": lambda t: t[:, 2:5],
    "every other": lambda t: t[::2, ::3],
    "transposed": lambda t: t.t()[3:],
    "one row": lambda t: t[2],
    "one element": lambda t: t[3, 4],
    "four dimensions": lambda t: t.view(3, 2, 2, 4).permute(2, 0, 3, 1)[:, 1:],
    "nothing": lambda t: t[:, 8:],
}


def random_bytes(shape, dtype, generator):
    size = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    return (
        torch.randint(high, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)
    )


def same(one, other):
    """Whether tensors are equal bit by bit, so that NaNs count."""
    return torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def every_view_to_every_peer(world, dtype):
    generator = torch.Generator().manual_seed(5)
    memory = world.empty(6, 8, dtype=dtype)
    for peer in range(world.ranks):
        for name, view in VIEWS.items():
            before, after = (random_bytes((6, 8), dtype, generator) for _ in range(2))
            memory.copy_(before)
            weft.barrier()
            expected = before.clone()
            view(expected).copy_(view(after))
            strided = view(after.t().clone().t())  # the same elements with other strides
            if world.rank == 0:
                weft.put(view(memory), strided, peer)
            weft.barrier()
            assert same(memory, expected if world.rank == peer else before), (name, peer)
            if world.rank == world.ranks - 1:
                got = random_bytes((8, 6), dtype, generator).t()
                kept = got.clone()
                weft.get(view(got), view(memory), peer)
                view(kept).copy_(view(expected))
                assert same(got, kept), (name, peer)
            generator = torch.Generator().manual_seed(6)
            weft.barrier()


def unaligned(world):
    memory = world.empty(4096, dtype=torch.uint8)
    for offset in range(1, 9):
        memory.zero_()
        weft.barrier()
        numbers = torch.randn(400, dtype=torch.float64)
        local = bytearray(8 * 400 + offset)
        source = torch.frombuffer(local, dtype=torch.float64, offset=offset, count=400)
        source.copy_(numbers)
        peer = 1 - world.rank
        weft.put(memory[offset : offset + 3200], source.view(torch.uint8), peer)
        back = torch.zeros(3200, dtype=torch.uint8)
        weft.get(back, memory[offset : offset + 3200], peer)
        assert same(back.view(torch.float64), numbers)
        weft.barrier()
        assert memory[:offset].sum() + memory[offset + 3200 :].sum() == 0


def overlap(world):
    memory = world.empty(100, dtype=torch.int64)
    memory.copy_(torch.arange(100))
    weft.put(memory[10:60], memory[:50], 0)
    expected = torch.cat([torch.arange(10), torch.arange(50), torch.arange(60, 100)])
    assert torch.equal(memory, expected)
    weft.get_async(memory[:50].view(5, 10).t(), memory[5:55].view(10, 5), 0).wait()
    expected[:50] = expected[5:55].view(10, 5).clone().t().reshape(-1)
    assert torch.equal(memory, expected)


def examples(world, source, names):
    namespace = {}
    exec(source, namespace)
    for name in names:
        namespace[name](world)


PAGE = (Path(__file__).parents[3] / "docs/memory-model.md").read_text()
SOURCE = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
EXAMPLES = re.findall(r"^def (\w+)\(world\)", SOURCE, re.MULTILINE)
