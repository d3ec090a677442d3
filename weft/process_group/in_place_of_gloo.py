"""Groups that a program asks for as "gloo" are weft's, if the variable WEFT_REPLACES_GLOO is 1.

One function of torch makes all groups: those of `init_process_group`, `new_group` and device
meshes. It is wrapped: CPU tensors get the backend weft where the program asked for gloo by name, by
a list such as "cpu:gloo,cuda:nccl", or not at all. The group keeps the name that the program gave.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import BackendConfig

from weft import variables
from weft.errors import WeftError

VARIABLE = "WEFT_REPLACES_GLOO"
_MAKER = "_new_process_group_helper"
_GLOO_OPTIONS: Any = getattr(getattr(dist, "ProcessGroupGloo", None), "_Options", ())
_BEFORE_BACKEND = ("group_size", "group_rank", "global_ranks_in_group")
_log = logging.getLogger("weft")


def in_force() -> bool:
    """Whether the groups of this process that are asked for as gloo's are weft's."""
    replaced = hasattr(getattr(distributed_c10d, _MAKER, None), "of_torch")
    return replaced and variables.value(VARIABLE) == "1"


def replace() -> None:
    """Let weft make the groups that are asked for as gloo's, while the variable is 1. If this
    version of torch makes groups differently, a warning says so, and nothing is replaced.
    """
    of_torch: Any = getattr(distributed_c10d, _MAKER, None)
    first = () if of_torch is None else (*inspect.signature(of_torch).parameters,)[:4]
    if first != (*_BEFORE_BACKEND, "backend"):
        _log.warning(
            "%s has no effect: torch %s makes process groups in a manner that this weft does not "
            "support",
            VARIABLE,
            torch.__version__,
        )
        return
    setattr(distributed_c10d, _MAKER, _wrapped(of_torch))


def _wrapped(of_torch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(of_torch)
    def make(
        size: int, rank: int, ranks: list[int], backend: Any, *others: Any, **named: Any
    ) -> Any:
        renamed = _renamed(backend) if in_force() else None
        if renamed is None:
            return of_torch(size, rank, ranks, backend, *others, **named)
        from weft.process_group.by_all import NotMade  # weft is loaded by the first group

        ours = dict(named)
        if isinstance(named.get("backend_options"), _GLOO_OPTIONS):
            ours["backend_options"] = None
        try:
            group, store = of_torch(size, rank, ranks, renamed, *others, **ours)
        except NotMade as error:
            _log.info("gloo keeps a group of %d ranks: %s", size, error)
            return of_torch(size, rank, ranks, backend, *others, **named)
        world = distributed_c10d._world
        if group in world.pg_map:
            world.pg_map[group] = backend, store
            world.pg_backend_config[group] = str(BackendConfig(backend))
            if rank == 0:
                _log.info("a group of %d ranks that was asked for as %s is weft's", size, backend)
        return group, store

    make.of_torch = of_torch  # type: ignore[attr-defined]
    return make


def _renamed(backend: Any) -> Any:
    """The backends of a group, with weft in place of gloo for CPU tensors; None if gloo has none of
    them. Where there is no other device, gloo is left out for others; any other backend stays, as
    torch rejects those that it was built without.

    Raises `WeftError` for a name of no backend.
    """
    config = BackendConfig(distributed_c10d.Backend(str(backend)))
    backends: dict[str, str] = dict(config.get_device_backend_map())
    if backends.get("cpu") != "gloo":
        return None
    names = distributed_c10d.Backend.backend_list
    for device, name in backends.items():
        if name not in names:
            raise WeftError(
                f"there is no backend {name!r} for {device}; torch.distributed knows "
                f"{', '.join(names)}"
            )
    backends["cpu"] = "weft"
    if torch.accelerator.current_accelerator() is None:
        backends = {device: name for device, name in backends.items() if name != "gloo"}
    if len(backends) == 1:
        return distributed_c10d.Backend("weft")
    named = ",".join(f"{device}:{name}" for device, name in backends.items())
    return distributed_c10d.Backend(named)
