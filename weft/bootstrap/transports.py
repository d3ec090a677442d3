"""How rows go to other hosts: by TCP, or by UCX, which uses InfiniBand, RoCE and EFA."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import weft._native as _native
from weft import variables
from weft.errors import WeftError

TCP, UCX = "tcp", "ucx"
VARIABLE = "WEFT_TRANSPORT"
_DEVICES = Path("/sys/class/infiniband")  # with those of RoCE and EFA
# What a rank offers besides exactly `TCP` or `UCX`: either of them, or the reason why it lacks the
# UCX that it asks for.
_EITHER = "either"
_MISSING = "missing: "


def offered() -> str:
    """What this process offers to ranks on other hosts, for `agreed`."""
    chosen = variables.value(VARIABLE)
    if chosen == UCX:
        try:
            _native.ucx_resources()
        except RuntimeError as error:
            return f"{_MISSING}{error}"
        return UCX
    return TCP if chosen else _EITHER if ucx_devices() else ""


def chosen() -> str:
    """The transport of ranks that are in one process: TCP, unless the user has chosen otherwise.
    Raises as `agreed`.
    """
    return agreed({0: offered()}) if variables.value(VARIABLE) == UCX else TCP


def agreed(offers: Mapping[int, str]) -> str:
    """The transport of a world of several hosts, from what each rank offers: UCX if all ranks
    have a device for it, or the user has chosen it; TCP otherwise.

    Raises `WeftError` if the user has chosen UCX on a rank that cannot use it, or not on all.
    """
    for rank, offer in offers.items():
        if offer.startswith(_MISSING):
            raise WeftError(
                f"{VARIABLE} is ucx, but rank {rank} cannot use UCX: "
                f"{offer.removeprefix(_MISSING)}; install a newer UCX there (as by pip install "
                f"libucx-cu12), or set {VARIABLE}=tcp on all ranks"
            )
    without = [rank for rank, offer in offers.items() if offer not in (UCX, _EITHER)]
    chose = [rank for rank, offer in offers.items() if offer == UCX]
    if chose and without:
        raise WeftError(
            f"{VARIABLE} is ucx on ranks {chose}, but not on ranks {without}: set it to one value "
            "on all ranks"
        )
    return TCP if without else UCX


def description(transport: str) -> str:
    """A sentence on the transport of this process's rows to other hosts."""
    if transport == TCP:
        return f"Rows go to other hosts by TCP ({VARIABLE})."
    resources = [each for each in _native.ucx_resources() if "/memory" not in each]
    return (
        f"Rows go to other hosts by UCX {_native.ucx_version()}, which has "
        f"{', '.join(resources) or 'no network'} ({VARIABLE}); weft has been tested with UCX over "
        "TCP, not with InfiniBand."
    )


def ucx_devices() -> list[str]:
    """The devices of InfiniBand, RoCE or EFA of this host that UCX would use, as mlx5_0:1; none
    without UCX.
    """
    try:
        here = os.listdir(_DEVICES)
        resources = _native.ucx_resources() if here else []
    except (OSError, RuntimeError):
        return []
    devices = {resource.partition("/")[2] for resource in resources}
    return sorted(each for each in devices if each.partition(":")[0] in here)
