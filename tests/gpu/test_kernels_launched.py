"""Kernels compiled for an absent GPU exactly as they are launched: by their users, with the
arguments of real ranks.

These tests cover the parts that ahead-of-time compilation leaves open: the specialization of each
argument by Triton (a rank of 1 is a constant unless Triton is informed otherwise), descriptors, and
the number of compilations. Nothing runs, so the results of operators are undefined.
"""

import itertools

import pytest
import torch

import weft

pytest.importorskip("triton", "3.6")
from weft.engines import engine
from weft.gpu.kernels import copy_rows, stream_signals
from weft.gpu.kernels import signals as one_sided_signals
from weft.gpu.kernels.all_gather import KERNELS
from weft.gpu.kernels.all_gather_matmul import all_gather_matmul_kernel
from weft.gpu.kernels.copy_rows import copy_vectors_kernel, copy_words_kernel
from weft.gpu.kernels.sum_in_rank_order import sum_in_rank_order_kernel
from weft.gpu.lanes import LaneOperands
from weft.gpu.program import DeviceProgram
from weft_tools.bench.gpu.compile_only import compile_only


@pytest.fixture(autouse=True)
def compiles(monkeypatch, tmp_path):
    """Launches compile the kernel, and do nothing else."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with compile_only():
        yield


def variants(kernel) -> int:
    return len(kernel.device_caches[0][0])


TILES = (8 << 10, 16 << 10, 32 << 10)


def operators():
    world = weft.init()
    a, b = torch.ones(32, 64, dtype=torch.float16), torch.ones(64, 32, dtype=torch.float16)
    for timeout in (1, 1000):  # limits of 32 bits, and of 64
        weft.all_gather_matmul(a, b, algorithm="push", timeout=timeout)
    weft.matmul_reduce_scatter(a, b, algorithm="put")
    every = (a, torch.ones(33, 64)[world.rank : world.rank + 32], torch.ones(32, 8).bfloat16())
    out = {each: world.empty(64, each.shape[1], dtype=each.dtype) for each in every}
    for gluon, tile, each in itertools.product((False, True), TILES, every):
        launch = weft.Launch(gluon=gluon, tile_bytes=tile)
        for timeout in (1, 1000):
            weft.all_gather(each, out=out[each], algorithm="kernel", launch=launch, timeout=timeout)


def test_every_kernel_compiles_once_for_all_ranks():
    with weft.local_world(2, products="triton") as local:
        local.run(operators)
    signals = stream_signals.notify_kernel, stream_signals.wait_kernel
    assert [variants(kernel) for kernel in (*signals, sum_in_rank_order_kernel)] == [1] * 3
    # one for each tile
    gathers = KERNELS[False, True], KERNELS[True, True]
    assert [variants(kernel) for kernel in gathers] == [len(TILES)] * 2
    # rows from two tensors into this rank's own; from one into peers'
    assert variants(all_gather_matmul_kernel) == 2


def gathers_of_any_alignment(compiled):
    """The first gather loads all kernels that others of its sizes may need, on both ranks."""
    world = weft.init()
    memory, out = torch.zeros(4096, dtype=torch.bfloat16), world.empty(16, 8, dtype=torch.bfloat16)
    weft.all_gather(memory[:64].view(8, 8), out=out, algorithm="kernel")
    program = [*engine(world).programs.values()][-1]
    operands = LaneOperands({"a": memory[:64].view(8, 8), "gathered": out}, {}, {}, 1.0)
    for launches in program.launches.values():
        for launch in launches:
            launch.step(operands, idle=True)()
    compiled.append([variants(KERNELS[False, wide]) for wide in (False, True)])
    for begin, stride in ((0, 8), (0, 24), (1, 8), (3, 9), (4, 16)):
        shard = memory[begin:].as_strided((8, 8), (stride, 1))
        weft.all_gather(shard, out=out, algorithm="kernel")
    compiled.append([variants(KERNELS[False, wide]) for wide in (False, True)])


def test_a_shard_of_any_alignment_needs_no_further_kernel():
    compiled = []
    for wide in (False, True):  # of other tests
        KERNELS[False, wide].device_caches.clear()
    with weft.local_world(2, products="triton") as local:
        local.run(gathers_of_any_alignment, compiled)
    assert compiled[-1] == compiled[0] == [1, 2]


def with_options(compiled):
    """Calls of a world with options load the copies' kernel in all its variants, and a product
    kernel for each tile and dtype, on both ranks.
    """
    world, kernels = weft.init(), (copy_vectors_kernel, copy_words_kernel, all_gather_matmul_kernel)
    a, b = torch.ones(64, 64, dtype=torch.float16), torch.ones(64, 32, dtype=torch.float16)
    copy_rows.load(world.device)
    for tile, dtype in (
        ((64, 64), torch.float16),
        ((64, 64), torch.float32),
        ((128, 256), a.dtype),
    ):
        world.configure(weft.DeviceOptions(tile=tile, compute_sms=2, comm_sms=2))
        for columns in (48, 56):  # rows of other strides, and copies of other widths
            x, weight = a[:, :columns].to(dtype), b[:columns].to(dtype)
            weft.all_gather_matmul(x, weight, algorithm="push")
        compiled.append([variants(kernel) for kernel in kernels])


@pytest.mark.slow
def test_tiles_and_copies_of_options_compile_once_for_all_ranks():
    before = variants(all_gather_matmul_kernel)
    compiled = []
    with weft.local_world(2, products="triton") as local:
        local.run(with_options, compiled)
    copies = [each[:2] for each in compiled]
    assert copies == [[1, 4]] * len(copies)
    # K is a constant of the product: one for each tile, dtype and K
    assert compiled[-1][2] - before == 3 * 2


def to_any_rows(compiled):
    """Products to rows that begin and end at multiples of 16 bytes, then to others, with a bias."""
    weft.init().configure(weft.DeviceOptions(tile=(64, 64)))
    memory, biases = torch.zeros(8192, dtype=torch.float16), torch.zeros(1024, dtype=torch.float16)
    begin = -memory.data_ptr() // 2 % 8
    a = torch.ones(8, 32, dtype=torch.float16)
    wide = [(0, 64), (8, 40), (16, 520)]  # where they begin, and columns
    for rows in (wide, [(1, 64), (0, 33), (8, 1), (3, 41)]):
        for at, (begins, columns) in enumerate(rows):
            out = memory[begin + begins :][: 8 * columns].view(8, columns)
            weight = torch.ones(columns, 32, dtype=torch.float16).t()
            bias = biases[at : at + columns]
            weft.all_gather_matmul(a, weight, bias=bias, out=out, algorithm="push")
        compiled.append(variants(all_gather_matmul_kernel))


def test_a_product_has_one_kernel_for_aligned_rows_and_one_for_others():
    compiled = [variants(all_gather_matmul_kernel)]
    with weft.local_world(1, products="triton") as local:
        local.run(to_any_rows, compiled)
    assert [after - before for before, after in itertools.pairwise(compiled)] == [1, 1]


def one_sided():
    world = weft.init()
    peer, memory, signals = 1 - world.rank, world.empty(4, 96), world.signals(3)
    engine(world).one_sided.load()  # before anything waits: it has to leave nothing to compile
    made = [variants(kernel) for kernel in ONE_SIDED]
    for view in (memory, memory[:, 1:], memory[:2, ::3], memory.view(torch.int16)[:, 1:]):
        weft.put(view, view.clone(), peer, algorithm="kernel", comm_sms=1 + world.rank)
    for value in (1, 2**40, 2**64 - 1):
        weft.notify(signals, world.rank, peer, value=value)
        weft.notify(signals, slice(None), peer, "set", value)
        weft.wait(signals, peer, ">=", value)
        weft.wait(signals, slice(1, 3), "!=", value, timeout=1000 * world.rank + 1)
    assert made == [variants(kernel) for kernel in ONE_SIDED]


ONE_SIDED = (
    copy_vectors_kernel,
    copy_words_kernel,
    one_sided_signals.raise_kernel,
    one_sided_signals.compare_kernel,
)


def test_kernels_of_one_sided_calls_are_all_loaded_before_the_first():
    with weft.local_world(2, products="triton") as local:
        local.run(one_sided)
    assert [variants(kernel) for kernel in ONE_SIDED] == [1, 4, 1, 1]


PLANS = (
    stream_signals.notify_kernel,
    stream_signals.wait_kernel,
    all_gather_matmul_kernel,
    sum_in_rank_order_kernel,
)


def layouts_of_operands(compiled):
    """Calls of one program with operands of other layouts."""
    a, b = torch.ones(32, 64, dtype=torch.float16), torch.ones(64, 32, dtype=torch.float16)
    memory, bias = torch.empty(64 * 32 + 1, dtype=a.dtype), torch.ones(33, dtype=a.dtype)
    for other in (
        {},
        {"b": b.t().contiguous().t()},
        {"bias": bias[:32]},
        {"bias": bias[1:]},
        {"out": memory[1:].view(64, 32)},
    ):
        weft.all_gather_matmul(**{"a": a, "b": b, "algorithm": "push"} | other)
        compiled.append(sum(map(variants, PLANS)))


def test_nothing_is_compiled_after_a_call_is_loaded(monkeypatch):
    """On any rank, whatever the layouts of its operands: else a kernel might wait meanwhile."""
    begin, compiled = DeviceProgram._begin, []

    def begun(self, *args):
        compiled.append(sum(map(variants, PLANS)))
        begin(self, *args)

    with weft.local_world(2, products="triton") as local:
        for world in local.worlds:
            world.backend.loads_kernels = True
        local.run(lambda: engine(weft.init()).load())
        monkeypatch.setattr(DeviceProgram, "_begin", begun)
        local.run(layouts_of_operands, compiled)
    # on both ranks, at the begin and at the end of each call
    calls = [{*compiled[at : at + 4]} for at in range(0, len(compiled), 4)]
    assert len(compiled) == 5 * 4
    assert all(len(kernels) == 1 for kernels in calls)
    assert min(calls[0]) < min(calls[1])  # a transposed weight is another kernel
