"""What weft asks of a GPU's driver, by a driver that keeps what it was asked."""

import ctypes
import logging
import os
import threading
from contextlib import nullcontext

import pytest
import torch

from weft.errors import WeftError
from weft.gpu import driver
from weft.gpu.backend import StreamBackend
from weft.gpu.lanes import StreamLane

GPU = torch.device("cuda", 0)


class Driver:
    """CUDA's, of a GPU with the priorities 0 to -5; modules are loaded in a `mode`."""

    def __init__(self, mode=2, error=0):
        self.mode, self.error, self.priorities = mode, error, []

    def cuModuleGetLoadingMode(self, mode):
        mode._obj.value = self.mode
        return self.error

    def cuCtxGetStreamPriorityRange(self, least, greatest):
        least._obj.value, greatest._obj.value = 0, -5
        return 0

    def cuStreamCreateWithPriority(self, made, flags, priority):
        assert flags.value == 1, "it would wait for the default stream"
        self.priorities.append(priority.value)
        made._obj.value = 4096 + len(self.priorities)
        return self.error


class Stream:
    def __init__(self, address, device):
        self.cuda_stream, self.device, self.waits = address, device, 0

    def synchronize(self):
        self.waits += 1

    def query(self):
        return True


@pytest.fixture
def asked(monkeypatch):
    found = Driver()
    monkeypatch.setattr(driver, "library", lambda: found)
    monkeypatch.setattr(driver, "_unused", {})
    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream(0, GPU))
    return found


def test_each_lane_has_a_stream_of_its_own(asked):
    """More of them than torch's pool has, at once; a lane that ends leaves its stream to another
    one, once nothing runs on it.
    """
    lanes = [StreamLane(GPU, urgent=bool(n % 2)) for n in range(40)]
    assert len({lane.stream.cuda_stream for lane in lanes}) == 40
    assert asked.priorities == [0, -5] * 20
    lanes[1].close()
    assert StreamLane(GPU, urgent=False).stream not in [lane.stream for lane in lanes]
    assert StreamLane(GPU, urgent=True).stream is lanes[1].stream
    assert len(asked.priorities) == 41


def test_streams_are_taken_by_one_rank_each(asked):
    taken, start = [], threading.Barrier(4)

    def rank():
        start.wait()
        taken.extend(StreamLane(GPU, urgent=True) for _ in range(8))

    threads = [threading.Thread(target=rank) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(lane.stream) for lane in taken}) == 32


def test_a_stream_that_is_refused_is_an_error(asked):
    asked.error = 201
    with pytest.raises(WeftError, match="the GPU's driver made no stream: its error 201"):
        StreamLane(GPU, urgent=False)


@pytest.mark.parametrize(
    ("mode", "error", "name"),
    [(1, 0, "EAGER"), (2, 0, "LAZY"), (2, 3, "unknown"), (7, 0, "unknown")],
)
def test_ranks_that_share_a_gpu_are_warned_of_lazy_loading(asked, caplog, mode, error, name):
    asked.mode, asked.error = mode, error
    assert driver.loading_mode() == name
    with caplog.at_level(logging.WARNING, "weft"):
        driver.check_loading()
    assert ("set CUDA_MODULE_LOADING=EAGER before" in caplog.text) == (name == "LAZY")


def test_without_a_driver_the_loading_mode_is_unknown(monkeypatch):
    monkeypatch.setattr(driver, "library", lambda: ctypes.CDLL("libno-such-driver.so"))
    assert driver.loading_mode() == "unknown"


@pytest.mark.parametrize("shared", [False, True])
def test_variables_are_set_unless_the_user_has(monkeypatch, shared):
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"):
        monkeypatch.setenv(name, "")  # restored in the end, if it was not set either
        monkeypatch.delenv(name)
    driver.set_variables(shared)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert os.environ.get("CUDA_MODULE_LOADING") == ("EAGER" if shared else None)
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"):
        monkeypatch.setenv(name, "1")
    driver.set_variables(shared)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == os.environ["CUDA_MODULE_LOADING"] == "1"


@pytest.mark.parametrize(
    ("devices", "shared"), [(["A", "B"], False), (["A", "B", "A"], True), (["A"], False)]
)
def test_symmetric_memory_overlaps_where_ranks_share_a_gpu(monkeypatch, devices, shared):
    """Not where each process sees one GPU only, another one: that would turn multicast off."""
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "0")
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
    StreamBackend(GPU, "torch", 1).meet(devices)
    assert ("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES" in os.environ) == shared
