"""A baseline: DeepSpeed's all-reduce in shared memory, in this process, compiled from its own
source (``make baselines``).

Each rank copies its tensor to a shared buffer and spins until all ranks have done so. Up to 1 MiB
each rank then sums the whole tensor, above that a part, and fetches the rest after spinning once
more. The operator sums in place, and on one host.
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

from weft import trust
from weft_tools.bench.mpi import DIRECTORY

NAME = "deepspeed"
DTYPES = ("float32", "bfloat16", "float16")

_MODULE = "deepspeed_shared_memory"
_SHARED = "deepspeed_allreduce_buffer"  # the name of its segments in DeepSpeed's code


def missing() -> str | None:
    """The reason why the baseline cannot run here, or None."""
    if not _library().exists():
        return f"there is no {_library()} here: run `make baselines` and start in its directory"
    if why := trust.rejection(_library().parent):
        return f"it is not loaded, since {why}"
    if "avx512bw" not in Path("/proc/cpuinfo").read_text():
        return "DeepSpeed's operator needs a processor with AVX-512"
    return None


def build() -> None:
    """Compile the operator from the package's source, which `make baselines` has put into the same
    folder.
    """
    from torch.utils import cpp_extension

    sources = [
        str(_library().parent / "csrc" / "cpu" / "comm" / name)
        for name in ("shm_interface.cpp", "shm.cpp")
    ]
    flags = ["-O2", "-fopenmp"]  # DeepSpeed's own flags
    cpp_extension.load(
        _MODULE,
        sources,
        extra_cflags=flags,
        extra_ldflags=flags[1:],
        build_directory=str(_library().parent),
    )


def connect() -> None:
    """Load the operator and connect it to its peers, collectively; its segments last as long as the
    processes.
    """
    sys.path.append(str(_library().parent))
    module = import_module(_MODULE)
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    number = [os.getpid()]
    dist.broadcast_object_list(number, 0)
    variables = {"LOCAL_SIZE": str(ranks), "MASTER_ADDR": "weft", "MASTER_PORT": str(number[0])}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    module.initialize(ranks, rank)
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    dist.barrier()  # all ranks have opened the segments
    (Path("/dev/shm") / f"{_SHARED}_{os.getuid()}_weft_{number[0]}_{rank}").unlink()


def all_reduce(tensor: Tensor) -> Callable[[], object]:
    """The call that sums `tensor` over the ranks, in place."""
    return partial(torch.ops.deepspeed.inference_all_reduce_, tensor)


def _library() -> Path:
    return (DIRECTORY / NAME / f"{_MODULE}.so").absolute()


if __name__ == "__main__":
    build()
