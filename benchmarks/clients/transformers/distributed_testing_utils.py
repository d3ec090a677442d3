"""In place of the file of this name that transformers' source distribution lacks: its tests start
their ranks by these functions.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_distributed(world_size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a function, with its rank and these arguments, on ranks of a group of gloo."""

    def on_ranks(fn: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            _start_rank_processes(_rank, (fn, world_size, port, args), world_size)

        return run

    return on_ranks


def _rank(rank: int, fn: Callable[..., None], ranks: int, port: int, args: Any) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    dist.init_process_group(_get_distributed_backend())
    fn(rank, *args)
    dist.barrier()
    dist.destroy_process_group()


def _start_rank_processes(fn: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    mp.spawn(fn, args=args, nprocs=nprocs)  # type: ignore[no-untyped-call]


def _get_distributed_backend() -> str:
    return "gloo"


def _get_distributed_device_type() -> str:
    return "cpu"


def _get_rank_device(rank: int) -> torch.device:
    return torch.device("cpu")


def _set_rank_device(rank: int) -> None:
    pass
