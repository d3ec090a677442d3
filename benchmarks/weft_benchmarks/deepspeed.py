"""A baseline: DeepSpeed's all-reduce in shared memory, in this process, compiled from its own
source (``make baselines``).

Each rank copies its tensor to a buffer that all see and spins until all have. Up to 1 MiB it then
sums everything itself, above that a part, and it fetches the rest after spinning once more. It sums
in place, and on one host.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from weft_benchmarks.mpi import DIRECTORY

NAME = "deepspeed"
DTYPES = ("float32", "bfloat16", "float16")

_MODULE = "deepspeed_shared_memory"
_SHARED = "deepspeed_allreduce_buffer"  # what its code calls its segments


def missing() -> str | None:
    """Why it cannot run here, if so."""
    if not _library().exists():
        return f"there is no {_library()} here: run `make baselines` and start in its directory"
    if "avx512bw" not in Path("/proc/cpuinfo").read_text():
        return "DeepSpeed's operator needs a processor with AVX-512"
    return None


def build() -> None:
    """Compile the operator from the package's source, which `make baselines` has laid beside it."""
    from torch.utils import cpp_extension

    sources = [
        str(_library().parent / "csrc" / "cpu" / "comm" / name)
        for name in ("shm_interface.cpp", "shm.cpp")
    ]
    flags = ["-O2", "-fopenmp"]  # as DeepSpeed compiles it
    cpp_extension.load(
        _MODULE,
        sources,
        extra_cflags=flags,
        extra_ldflags=flags[1:],
        build_directory=str(_library().parent),
    )


def connect() -> None:
    """Load the operator and have it find its peers, collectively; the segments it makes last as
    long as the processes.
    """
    sys.path.append(str(_library().parent))
    module = import_module(_MODULE)
    ranks, rank, number = dist.get_world_size(), dist.get_rank(), [os.getpid()]
    dist.broadcast_object_list(number, 0)
    told = {"LOCAL_SIZE": str(ranks), "MASTER_ADDR": "weft", "MASTER_PORT": str(number[0])}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    module.initialize(ranks, rank)
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    dist.barrier()  # all have opened it
    (Path("/dev/shm") / f"{_SHARED}_{os.getuid()}_weft_{number[0]}_{rank}").unlink()


def all_reduce(tensor: Tensor) -> Callable[[], object]:
    """The call that sums `tensor` over the ranks, in place."""
    return partial(torch.ops.deepspeed.inference_all_reduce_, tensor)


def _library() -> Path:
    return (DIRECTORY / NAME / f"{_MODULE}.so").absolute()


if __name__ == "__main__":
    build()
