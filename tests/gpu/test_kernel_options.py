"""Refusals of kernels and local worlds before anything runs, and the order of tiles."""

import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", "3.6")
import weft
from weft.gpu import backend, options
from weft.gpu.kernels import all_gather, symmetric
from weft.gpu.kernels.all_gather import Distances
from weft.gpu.kernels.all_gather_matmul import ProductKernel, smaller, vector
from weft.gpu.kernels.tiles import launch_tables, launches, runs, tiles
from weft.kernels.matmul import matmul
from weft.plan import Copy, Launch, Notify, Region, Signal, Wait

GPU = torch.device("cuda", 0)


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(
            multi_processor_count=132, warp_size=32 * (device.index + 1)
        ),
    )


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"comm_sms": 0}, "comm_sms must be at least 1"),
        (
            {"comm_sms": 67},
            "67 waiting programs on each of 2 ranks that share a GPU .* use at most 66",
        ),
        ({"warps": 3}, "warps must be 1, 2, 4, 8, 16 or 32"),
        ({"warps": 32}, "with at most 1024 threads; got 32 of 64 threads"),
        ({"tile_bytes": 3 << 12}, "tile_bytes must be a power of two"),
        (
            {"tile_bytes": 4096},
            "from 8192 to 65536, 16 to 256 for each of 512 threads and 65536 in all; got 4096",
        ),
        ({"tile_bytes": 1 << 18}, "from 8192 to 65536"),
        ({"tile_bytes": "16K"}, "tile_bytes must be an integer; got '16K'"),
    ],
)
def test_invalid_launches_are_refused(a_gpu, options, why):
    with_64_lanes = torch.device("cuda", 1)
    for device in (GPU, with_64_lanes):
        all_gather.check(Launch(), 2, device)
        all_gather.check(Launch(66, 1 << 16, 8, True), 2, with_64_lanes)
    with pytest.raises(ValueError, match=why):
        all_gather.check(Launch(**options), 2, with_64_lanes)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # rows, bytes of a row, from row to row in the shard and in the gathered rows, place
        (Distances(8, 32, 32, 32, 256), [(16, False), (16, True), (2, True)]),
        (Distances(8, 6, 6, 6, 48), [(16, False), (2, True)]),
        (Distances(8, 8, 8, 8, 64), [(16, False), (8, True), (2, True)]),
        (Distances(7, 6, 6, 6, 42), [(2, False), (2, True)]),
        (Distances(8, 32, 32, 48, 256), [(16, True), (2, True)]),
        (Distances(8, 32, 32, 36, 256), [(4, True), (2, True)]),
        (Distances(1, 32, 96, 48, 16), [(16, False), (16, True), (2, True)]),
    ],
)
def test_accesses_are_as_wide_as_addresses_permit(rows, expected):
    """The accesses that are compiled do not depend on a rank's shard; which of them is made does,
    and fits every address and distance.
    """
    found = rows.accesses(2)
    assert found == expected
    assert rows._replace(shard=2).accesses(2) == expected
    assert rows.fits(found[-1], 1024 + 2)
    assert [rows.fits(access, 1024) for access in found] == [True] * len(found)
    for address in range(1024, 1024 + 32, 2):
        for shard in (rows, rows._replace(shard=rows.shard + 2), rows._replace(shard=64)):
            width, by_rows = next(access for access in found if shard.fits(access, address))
            within = shard.shard if by_rows else shard.size
            assert address % width == within % width == 0
            assert by_rows or shard.rows == 1 or shard.shard == shard.row


def test_each_rank_needs_its_own_queue(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    options.check_queues(2, 1)
    with pytest.raises(
        ValueError,
        match="3 ranks need 12 concurrent streams, and there are 8: use at most 2 ranks",
    ):
        options.check_queues(3, 1)


def test_time_limits_are_nanoseconds():
    assert symmetric.time_limit(1.5) == 1_500_000_000
    assert symmetric.time_limit(1e9) < symmetric.time_limit(math.inf) < 2**63


@pytest.mark.parametrize(
    ("start", "stop", "columns", "block"),
    [(0, 4096, 3, 128), (5, 1000, 2, 64), (7, 8, 1, 16), (3, 3, 4, 16)],
)
def test_tiles_cover_every_row_and_column_once(start, stop, columns, block):
    covered = [
        (row, column)
        for first, last, column in tiles(start, stop, columns, block)
        for row in range(first, last)
    ]
    assert sorted(covered) == [
        (row, column) for row in range(start, stop) for column in range(columns)
    ]
    assert all(0 < last - first <= block for first, last, _ in tiles(start, stop, columns, block))


def product(low, high, source="x", to=0, out="out"):
    return matmul(Region(0, source, low, high), Region(to, out, 100 + low, 100 + high))


FIRST, SECOND = Signal("arrived", 1), Signal("arrived", 2)


def test_tiles_follow_the_lane():
    made = launch_tables(
        [product(0, 4), Wait(FIRST, 3), product(4, 6), Wait(SECOND, 1), product(6, 9, "y")], 2, 4
    )
    assert made.waits == [(FIRST, 3), (SECOND, 1)]
    assert {
        (low, high, needed) for low, high, _, shift, _, needed, _ in made.tiles if shift == 100
    } == {
        (0, 4, 0),
        (4, 6, 1),
        (6, 9, 2),
    }
    needed = [tile[5] for tile in made.tiles]
    assert needed == sorted(needed)
    assert [tile[:2] for tile in made.tiles[made.first :]] == [(6, 9)] * 2
    with pytest.raises(ValueError, match="waits, multiplies and notifies"):
        launch_tables([Copy(Region(0, "x", 0, 1), Region(0, "y", 0, 1))], 1, 4)


def test_a_notify_counts_the_tiles_since_the_previous_notify():
    made = launch_tables(
        [
            product(0, 8, to=1),
            Notify(1, FIRST),
            product(8, 9, to=2),
            Notify(2, FIRST),
            product(9, 10),
        ],
        2,
        4,
    )
    assert made.notifies == [(1, FIRST, 4), (2, FIRST, 2 + 1)]
    assert [tile[4::2] for tile in made.tiles] == [(1, 0)] * 4 + [(2, 1)] * 2 + [(0, 2)] * 2


def test_runs_of_a_lane_and_their_launches():
    wait, notify = Wait(FIRST, 1), Notify(1, SECOND)
    copy = Copy(Region(0, "x", 0, 1), Region(0, "y", 0, 1))
    lane = [
        wait,
        notify,
        product(0, 2),
        wait,
        product(2, 4, "y"),
        notify,
        product(4, 5, "y"),
        notify,
        wait,
    ]
    assert runs(lane) == [(2, 7)]
    assert runs([product(0, 1), wait, notify, product(1, 2)]) == [(0, 1), (3, 4)], (
        "the notify follows the wait"
    )
    assert runs([product(0, 1), copy, product(1, 2)]) == [(0, 1), (2, 3)]
    assert runs([product(0, 1), product(0, 1, out="other"), notify, product(1, 2)]) == [
        (0, 2),
        (3, 4),
    ]
    three = [product(0, 1), wait, product(0, 1, "y"), Wait(SECOND, 1), product(0, 1, "z")]
    assert [*launches(three)] == [three[:3], three[3:]], (
        "rows from two tensors at most; a wait belongs to the launch that needs its rows"
    )
    several = [
        product(0, 1),
        product(0, 1, out="other"),
        wait,
        product(1, 2),
        product(1, 2, out="other"),
    ]
    assert [*launches(several)] == [[several[0], wait, several[3]], [several[1], wait, several[4]]]


@pytest.mark.parametrize(("source", "out"), [("out", "other"), ("y", "x"), ("y", "out")])
def test_a_run_ends_before_a_product_that_depends_on_one_of_it(source, out):
    def second(low):
        return matmul(Region(0, source, low, low + 2), Region(0, out, low, low + 2))

    first, wait = matmul(Region(0, "x", 0, 2), Region(0, "out", 0, 2)), Wait(FIRST, 1)
    assert runs([first, wait, second(1), second(3)]) == [(0, 1), (2, 4)]
    assert runs([first, wait, second(2), second(1)]) == [(0, 3), (3, 4)]


def test_rows_are_stored_16_bytes_at_a_time_where_all_begin_and_end_there():
    memory = torch.zeros(1 << 12, dtype=torch.bfloat16)
    begin = -memory.data_ptr() // 2 % 8
    for at, columns, stride, expected in (
        (0, 64, 64, 8),
        (8, 40, 48, 8),
        (0, 520, 520, 8),
        (1, 64, 64, 1),
        (0, 36, 40, 1),
        (0, 40, 44, 1),
    ):
        out = memory[begin + at :].as_strided((4, columns), (stride, 1))
        assert vector(out) == expected, (at, columns, stride)
    floats = memory[begin + 8 :].view(torch.float32)
    assert vector(floats[:36].view(3, 12)) == 4
    assert vector(floats[1:37].view(3, 12)) == 1


@pytest.mark.parametrize(
    ("rows", "columns", "programs", "expected"),
    [
        ([4096], 4096, 132, (128, 256)),  # 512 tiles
        ([2048], 1024, 132, (128, 128)),  # 64 of the largest, 128 of this one
        ([128] * 16, 1024, 132, (128, 128)),  # of the same rows in pieces
        ([2048], 1024, 12, (128, 256)),  # for ranks that share a GPU
        ([512], 1024, 120, (64, 128)),
        ([1], 8, 132, (64, 64)),
        ([], 8, 132, (64, 64)),
    ],
)
def test_small_products_have_small_tiles(rows, columns, programs, expected):
    """At most as small as it takes to give a tile to more than half of the programs."""
    assert smaller((128, 256), rows, columns, programs) == expected
    lane = [matmul(Region(0, "x", 0, n), Region(0, "out", 0, n)) for n in rows]
    half, cpu = torch.float16, torch.device("cpu")
    for tile in (None, (64, 256)):
        made = ProductKernel(lane, columns, half, half, lambda _: 0, 0, programs, cpu, tile)
        assert made.blocks[:2] == (tile or expected)


def test_product_kernels_leave_sms_to_communication(a_gpu):
    assert symmetric.max_programs(1, GPU, symmetric.RESERVED_SMS) == 128
    assert symmetric.max_programs(8, GPU, symmetric.RESERVED_SMS) == 12
    with pytest.raises(
        ValueError,
        match="33 ranks that share a GPU of 132 SMs have 4 each, but kernels that wait need more than 4",
    ):
        symmetric.max_programs(33, GPU, symmetric.RESERVED_SMS)


def test_invalid_products_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="must be torch or triton; got 'cublas'"):
        weft.local_world(2, products="cublas")
    monkeypatch.setattr(symmetric.triton.knobs.runtime, "interpret", False)
    with pytest.raises(weft.WeftError, match="set TRITON_INTERPRET=1"):
        weft.init(products="triton")
    monkeypatch.setattr(symmetric.triton, "__version__", "3.5.1")
    with pytest.raises(
        weft.WeftError, match=r"needs Triton 3.6 or newer, and there is 3.5.1: pip install -e "
    ):
        weft.local_world(2, products="triton")
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    with pytest.raises(weft.WeftError, match=r"and there is none: pip install -e "):
        weft.local_world(2, products="triton")
