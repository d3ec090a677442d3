"""What kernels and local worlds refuse before anything runs, and the order of tiles."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from weft import local
from weft.kernels import symmetric
from weft.kernels.all_gather import Traffic
from weft.kernels.tiles import follow, tiles
from weft.plan import Matmul, Notify, Region, Signal, Wait

GPU = torch.device("cuda", 0)


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"sms": 0}, "at least one SM"),
        ({"sms": 67}, "67 programs on each of 2 ranks that share a GPU of 132 SMs .* use at most 66"),
        ({"warps": 3}, "1, 2, 4, … of them"),
        ({"warps": 32, "threads_per_warp": 64}, "at most 1024 threads"),
        ({"threads_per_warp": 16}, "32 or 64 threads"),
        ({"tile": 3000}, "a tile is a power of two"),
        ({"tile": 2048, "warps": 8}, "at least 4096 in all; got 2048"),
    ],
)
def test_traffic_that_cannot_be(a_gpu, options, why):
    Traffic().check(SimpleNamespace(sharing=2), GPU)
    with pytest.raises(ValueError, match=why):
        Traffic(**options).check(SimpleNamespace(sharing=2), GPU)


def test_ranks_need_queues_of_their_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    local._check_queues(2)
    with pytest.raises(ValueError, match="3 ranks need 9 streams that run at once, and there are 8: use at most 2 ranks"):
        local._check_queues(3)


def test_polls_are_bounded():
    assert 0 < symmetric.polls(1.0) < symmetric.polls(30.0) <= symmetric.polls(1e9) < 2**31


@pytest.mark.parametrize(("start", "stop", "columns", "block"), [(0, 4096, 3, 128), (5, 1000, 2, 64), (7, 8, 1, 16), (3, 3, 4, 16)])
def test_tiles_cover_every_row_and_column_once(start, stop, columns, block):
    covered = [(row, column) for first, last, column in tiles(start, stop, columns, block) for row in range(first, last)]
    assert sorted(covered) == [(row, column) for row in range(start, stop) for column in range(columns)]
    assert all(0 < last - first <= block for first, last, _ in tiles(start, stop, columns, block))


def test_tiles_follow_the_lane():
    def product(low, high):
        return Matmul(Region(0, "x", low, high), Region(0, "out", 100 + low, 100 + high))

    first, second = Signal("arrived", 1), Signal("arrived", 2)
    made, waits = follow([product(0, 4), Wait(first, 3), product(4, 6), Wait(second, 1), product(6, 9)], 2, 4)
    assert waits == [(first, 3), (second, 1)]
    assert {(low, high, needed) for low, high, _, shift, needed in made if shift == 100} == {(0, 4, 0), (4, 6, 1), (6, 9, 2)}
    assert [needed for *_, needed in made] == sorted(needed for *_, needed in made)
    with pytest.raises(ValueError, match="waits and multiplies"):
        follow([Notify(1, first)], 1, 4)
