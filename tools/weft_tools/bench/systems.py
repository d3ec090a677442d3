"""The systems that weft is compared with, by the names that ``--baseline`` takes.

Imports neither torch nor ranks.
"""

from __future__ import annotations

from typing import NamedTuple


class System(NamedTuple):
    """A system that weft is compared with.

    Attributes:
        device: the device of its tensors, "cpu" or "cuda".
        collectives: whether the benchmarks of collectives compare it.
        fused: its name in results of fused operators, "" if they do not compare it.
        backend: the backend of torch.distributed that it uses, "" for none.
        in_chunks: whether its collectives run in chunks beside products.
        one_host: whether it runs on one host only.
        registered: whether its collectives take memory that is registered with NCCL.
    """

    device: str
    collectives: bool = True
    fused: str = ""
    backend: str = ""
    in_chunks: bool = False
    one_host: bool = False
    registered: bool = False


SYSTEMS = {
    "gloo": System("cpu", fused="gloo+torch.mm", backend="gloo"),
    "gloo-chunks": System("cpu", False, "gloo-chunks", "gloo", in_chunks=True),
    "openmpi": System("cpu", one_host=True),
    "mpich": System("cpu", one_host=True),
    "intel-mpi": System("cpu", one_host=True),
    "deepspeed": System("cpu", one_host=True),
    "nccl": System("cuda", fused="nccl+torch.mm", backend="nccl"),
    "nccl-chunks": System("cuda", False, "nccl-chunks", "nccl", in_chunks=True),
    "nccl-registered": System("cuda", False, "nccl registered+torch.mm", "nccl", registered=True),
    # its operators on symmetric memory
    "torch": System("cuda", fused="torch symmetric"),
}


def of_collectives(device: str) -> tuple[str, ...]:
    """The systems that benchmarks of collectives compare on a device, the default first."""
    return tuple(
        name for name, each in SYSTEMS.items() if each.device == device and each.collectives
    )


def of_fused(device: str) -> tuple[str, ...]:
    """The systems that benchmarks of fused operators compare on a device, the default first."""
    return tuple(name for name, each in SYSTEMS.items() if each.device == device and each.fused)


LIBRARIES = tuple(name for name, each in SYSTEMS.items() if each.backend and each.collectives)
"""The libraries of collectives of torch.distributed."""
