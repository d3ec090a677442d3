"""weft as a backend of torch.distributed: ``init_process_group("weft")``, ``"cpu:weft,cuda:nccl"``,
``new_group(backend="weft")``.

`register` is an entry point that torch calls when it is imported; importing weft calls it too. It
does not load weft: the first group does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from weft import variables

if TYPE_CHECKING:
    from torch._C._distributed_c10d import (
        Backend,
        ProcessGroup,
        Store,
        _DistributedBackendOptions,
    )


def register() -> None:
    """Register the backend ``weft``, make weft's errors subclasses of torch.distributed's, and put
    weft in gloo's place if the variable WEFT_REPLACES_GLOO asks for it; idempotent.

    It raises nothing, since torch could not be imported then: if weft cannot be loaded, a group
    that asks for it raises the error.
    """
    try:
        _register()
    except Exception as error:
        logging.getLogger("weft").log(
            logging.WARNING if os.environ.get("WEFT_REPLACES_GLOO") else logging.DEBUG,
            "weft cannot serve torch's process groups (%s: %s)",
            type(error).__name__,
            error,
        )
        with contextlib.suppress(Exception):  # a torch that has no backends of others
            _register_failure(error)


def _register() -> None:
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "WEFT"):
        return
    import weft.errors as errors

    errors.set_base(dist.DistBackendError)
    dist.Backend.register_backend("weft", _backend, extended_api=True, devices=["cpu"])
    if os.environ.get("WEFT_REPLACES_GLOO"):
        from weft.process_group import in_place_of_gloo

        in_place_of_gloo.replace()


def _register_failure(error: Exception) -> None:
    """Let groups that ask for weft raise an error of its loading."""
    import torch.distributed as dist

    def fail(*_: object) -> None:
        raise ImportError(f"the backend weft cannot be loaded: {error}") from error

    if not hasattr(dist.Backend, "WEFT"):
        dist.Backend.register_backend("weft", fail, extended_api=True, devices=["cpu"])


def make(
    store: Store, rank: int, ranks: int, timeout: timedelta, global_ranks: Sequence[int] = ()
) -> ProcessGroup:
    """A process group of `ranks` ranks that share a store, unknown to torch.distributed, for
    libraries that keep their own groups, as torchft does; collective.

    `timeout` is the time limit of every wait; `global_ranks` are the ranks' numbers in a larger
    job, for errors. Errors are as of `weft.init`.
    """
    import torch
    import torch.distributed as dist

    made = _made(store, rank, ranks, timeout, global_ranks)
    group = dist.ProcessGroup(store, rank, ranks)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, made)
    name: Any = "unnamed"  # torch names those that it knows
    group._set_group_name(name)
    return group


def _made(
    store: Store, rank: int, ranks: int, timeout: timedelta, global_ranks: Sequence[int]
) -> Backend:
    """The backend of a connected group."""
    from weft.process_group.by_all import confirm, made_by_all
    from weft.process_group.operations import Operations
    from weft.world import init_by_store

    variables.check()
    seconds = timeout.total_seconds()

    def make() -> Backend:
        world = init_by_store(store, rank, ranks, seconds, global_ranks)
        try:
            native = _native()  # now that peers learn why there is none
            operations = Operations(world, store)
            made: Backend = native.make(operations, None, rank, ranks, seconds)
            confirm(world)
        except BaseException as error:
            world.failure.fail(error)
            world.close()
            raise
        return made

    return made_by_all(make, store, rank, ranks, seconds)


def _backend(group: _DistributedBackendOptions, options: object) -> Backend:
    """The constructor that torch calls, on all ranks."""
    timeout, rank, ranks = _timeout(options, group.timeout), group.group_rank, group.group_size
    if getattr(group, "enable_reconfigure", False):
        from weft.process_group.elastic import Elastic

        variables.check()
        seconds = timeout.total_seconds()
        unconnected: Backend = _native().make(None, Elastic(group.store), rank, ranks, seconds)
        return unconnected
    made = _made(group.store, rank, ranks, timeout, group.global_ranks_in_group)
    if os.environ.get("TORCH_FR_BUFFER_SIZE", "0") != "0":
        recorded = weakref.ref(getattr(group, "process_group", made))
        _native().operations_of(made).start_recorder = partial(_record, recorded)
    return made


def _native() -> Any:
    """The module that makes backends; before the first group torch's functions are replaced that
    serve its own backends only.
    """
    from weft.process_group import compiled
    from weft.process_group.replaced import replace

    replace()
    return compiled.backend()


def _record(group: weakref.ref[Any]) -> Any:
    """Let torch's flight recorder record a group's calls, as it does gloo's. Before 2.14 it has
    only those of torch's own backends, and later versions do it themselves.
    """
    from torch._C import _distributed_c10d as c10d
    from torch.distributed.distributed_c10d import _world

    hook = getattr(c10d, "FlightRecorderHook", None)
    if hook is None or hasattr(_world, "pg_flight_recorder_hooks"):
        return None
    return hook.attach(group())


def _timeout(options: object, given: timedelta) -> timedelta:
    """The group's time limit: of its options, if it has any of weft's."""
    import torch.distributed as dist

    backend = getattr(options, "backend", None)
    if backend == "weft":
        limit: timedelta = options._timeout  # type: ignore[attr-defined]
        return limit
    others = dist.Backend.backend_capability
    # those of another device's backend, as in "cpu:weft,cuda:nccl", are for that one
    if options is None or "cpu" not in others.get(str(backend), ["cpu"]):
        return given
    kind = f"{type(options).__module__}.{type(options).__qualname__}"
    raise TypeError(
        f"weft has no options of type {kind}: pass timeout= in place of pg_options, or "
        'torch._C._distributed_c10d.Backend.Options("weft", timeout)'
    )
