"""What NVIDIA's driver tells about a GPU, and torch does not.

All functions need a GPU; a call that fails is a `RuntimeError` with the driver's number.
"""

from __future__ import annotations

import ctypes

import torch

from weft.gpu import driver

_P2P_ACCESS, _P2P_ATOMICS = 2, 3
_ATTRIBUTES = {
    "copy_engines": 40,
    "host_native_atomics": 86,
    "compute_preemption": 90,
    "multicast": 132,
}


def attributes() -> dict[str, int]:
    """Some properties of the current GPU that torch does not have."""
    device = _device(torch.cuda.current_device())
    found = {}
    for name, number in _ATTRIBUTES.items():
        value = ctypes.c_int()
        _call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), device)
        found[name] = value.value
    return found


def version() -> str:
    """The newest version of CUDA that the driver supports."""
    value = ctypes.c_int()
    _call("cuDriverGetVersion", ctypes.byref(value))
    return f"{value.value // 1000}.{value.value % 1000 // 10}"


def access(one: int, other: int) -> bool:
    """Whether a GPU of this process can access the memory of another."""
    return _of_pair(_P2P_ACCESS, one, other)


def atomics(one: int, other: int) -> bool:
    """Whether atomics of a GPU of this process work in the memory of another."""
    return _of_pair(_P2P_ATOMICS, one, other)


def _of_pair(attribute: int, one: int, other: int) -> bool:
    value, number = ctypes.c_int(), ctypes.c_int(attribute)
    pair = _device(one), _device(other)
    _call("cuDeviceGetP2PAttribute", ctypes.byref(value), number, *pair)
    return bool(value.value)


def _device(number: int) -> ctypes.c_int:
    device = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(number))
    return device


def _call(name: str, *arguments: object) -> None:
    if code := getattr(driver.library(), name)(*arguments):
        raise RuntimeError(f"the GPU's driver rejected {name}: error {code}")
