"""A process group in Python, for machines on which `backend.cpp` cannot be compiled.

Its calls do not pass torch's dispatcher: tracers and tools of torch do not see them, nor do other
backends serve it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

from weft.checks import check_own_elements, in_modes, waited
from weft.process_group import collectives
from weft.process_group.operations import Operations
from weft.process_group.work_queue import DONE
from weft.uncompiled import uncompiled_methods

_CPU = torch.device("cpu")

Options = TypeVar("Options")
Timeout = timedelta | None
_ProcessGroup: Any = dist.ProcessGroup  # its stubs differ between versions of torch


@uncompiled_methods
class Group(_ProcessGroup):  # type: ignore[misc]
    """A process group whose `operations` torch.distributed calls without a backend in C++."""

    supports_splitting = supports_coalescing = supports_time_estimate = False
    group_name = group_desc = ""  # set by torch

    def __init__(self, operations: Operations) -> None:
        super().__init__(operations.rank, operations.ranks)
        self.operations = operations
        self.calls = 0

    # Reductions

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: Timeout = None, *, op: Any = None
    ) -> dist.Work:
        opts = _options(c10d.AllreduceOptions, opts, timeout, reduceOp=op)
        tensor = _one(tensors)
        if tensor.layout is torch.sparse_coo:
            return self._run("all_reduce_sparse", [tensor], opts, tensor, opts.reduceOp)
        return self._run("all_reduce", [tensor], opts, tensor, opts.reduceOp)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = _options(c10d.AllreduceCoalescedOptions, opts)
        tensors = [*map(waited, tensors)]
        return self._run("all_reduce_coalesced", tensors, opts, tensors, opts.reduceOp)

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: Timeout = None,
        *,
        root: Any = None,
    ) -> dist.Work:
        opts = _options(c10d.ReduceOptions, opts, timeout, rootRank=root, reduceOp=op)
        tensor = _one(tensors)
        return self._run("reduce", [tensor], opts, tensor, opts.reduceOp, opts.rootRank)

    def reduce_scatter(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: Timeout = None,
        *,
        op: Any = None,
    ) -> dist.Work:
        opts = _options(c10d.ReduceScatterOptions, opts, timeout, reduceOp=op)
        out = _one(outputs)
        return self._run("reduce_scatter", [out], opts, out, _list(inputs), opts.reduceOp)

    def reduce_scatter_single(self, out: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        opts = _options(c10d.ReduceScatterOptions, opts)
        out, tensor = waited(out), waited(tensor)
        return self._run("reduce_scatter_single", [out], opts, out, tensor, opts.reduceOp)

    def reduce_scatter_single_coalesced(
        self, outs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = _options(c10d.ReduceScatterOptions, opts)
        outs, tensors = [*map(waited, outs)], [*map(waited, tensors)]
        name = "reduce_scatter_single_coalesced"
        return self._run(name, outs, opts, outs, tensors, opts.reduceOp)

    # Gathers, scatters and exchanges

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: Timeout = None, *, root: int | None = None
    ) -> dist.Work:
        opts = _options(c10d.BroadcastOptions, opts, timeout, rootRank=root)
        tensor = _one(tensors)
        return self._run("broadcast", [tensor], opts, tensor, opts.rootRank)

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Timeout = None
    ) -> dist.Work:
        opts = _options(c10d.AllgatherOptions, opts, timeout)
        outs = _list(outputs)
        return self._run("all_gather", outs, opts, outs, _one(inputs))

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = _options(c10d.AllgatherOptions, opts)
        lists, tensors = [[*map(waited, outs)] for outs in outputs], [*map(waited, inputs)]
        filled = [out for outs in lists for out in outs]
        return self._run("all_gather_coalesced", filled, opts, lists, tensors)

    def all_gather_single(self, out: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        opts = _options(c10d.AllgatherOptions, opts)
        out, tensor = waited(out), waited(tensor)
        return self._run("all_gather_single", [out], opts, out, tensor)

    def all_gather_single_coalesced(
        self, outs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = _options(c10d.AllgatherOptions, opts)
        outs, tensors = [*map(waited, outs)], [*map(waited, tensors)]
        return self._run("all_gather_single_coalesced", outs, opts, outs, tensors)

    def gather(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: Timeout = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        opts = _options(c10d.GatherOptions, opts, timeout, rootRank=root)
        outs = _list(outputs)
        return self._run("gather", outs, opts, outs, _one(inputs), opts.rootRank)

    def scatter(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: Timeout = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        opts = _options(c10d.ScatterOptions, opts, timeout, rootRank=root)
        out = _one(outputs)
        return self._run("scatter", [out], opts, out, _list(inputs), opts.rootRank)

    def alltoall(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any = None,
        timeout: Timeout = None,
    ) -> dist.Work:
        opts = _options(c10d.AllToAllOptions, opts, timeout)
        outs = [*map(waited, outputs)]
        return self._run("all_to_all", outs, opts, outs, [*map(waited, inputs)])

    def all_to_all_single(
        self,
        out: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: Timeout = None,
    ) -> dist.Work:
        opts = _options(c10d.AllToAllOptions, opts, timeout)
        out, tensor = waited(out), waited(tensor)
        sizes = [*output_sizes], [*input_sizes]
        return self._run("all_to_all_single", [out], opts, out, tensor, *sizes)

    # Messages

    def send(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        return self.operations.send(_own(_one(tensors)), peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        return self.operations.receive(_own(_one(tensors)), peer, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        return self.operations.receive(_own(_one(tensors)), None, tag)

    # Barriers, coalescing and the group's end

    def barrier(self, opts: Any = None, timeout: Timeout = None) -> dist.Work:
        return self._run("barrier", [], _options(c10d.BarrierOptions, opts, timeout))

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        limit = None if timeout is None else timeout.total_seconds()
        self.operations.monitored_barrier(limit, wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        self.operations.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self.operations.end_coalescing()

    def shutdown(self) -> None:
        self.operations.shutdown()

    def abort(self) -> None:
        self.operations.abort()

    # Properties

    def get_group_store(self) -> Store:
        return self.operations.store

    def _set_group_name(self, name: str) -> None:
        self.group_name = name
        self.operations.set_name(name, self.group_desc)

    def _set_group_desc(self, text: str) -> None:
        self.group_desc = text
        self.operations.set_name(self.group_name, text)

    def getBackendName(self) -> str:
        return "weft"

    def getGroupName(self) -> str:
        return self.group_name

    def getGroupDesc(self) -> str:
        return self.group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        # while torch (2.15) makes the group, it would attach a recorder, for backends in C++
        return [_CPU] if self in distributed_c10d._world.pg_map else []

    def _get_backend(self, device: torch.device) -> Any:
        if (kind := torch.device(device).type) != "cpu":
            raise RuntimeError(f"No backend type associated with device type {kind}: {ONLY_CPU}")
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self.calls

    def _set_sequence_number_for_group(self) -> None:
        """They start at 0 on every rank."""

    def set_timeout(self, timeout: timedelta) -> None:
        self.operations.set_timeout(timeout.total_seconds())

    def _run(self, name: str, filled: Sequence[Tensor], opts: Any, *args: Any) -> dist.Work:
        tensors = [*_tensors(args)]
        for tensor in tensors:
            if not tensor.is_cpu:
                raise ValueError(f"the tensor is on {tensor.device}: {ONLY_CPU}")
        if in_modes():
            for tensor in tensors:
                check_own_elements(tensor, "tensor")
        self.calls += 1
        seconds = opts.timeout.total_seconds()
        limit = seconds if seconds > 0 else None
        own, collective = self.operations, getattr(collectives, name)
        if opts.asyncOp or own.coalesced is not None:
            return own.issue(collective, filled, *args, limit)
        own.queue.run(collective, own.world, *args, limit)
        return DONE

    # Names of some methods in other versions of torch
    _allgather_base, allgather_into_tensor_coalesced = (
        all_gather_single,
        all_gather_single_coalesced,
    )
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = (
        reduce_scatter_single,
        reduce_scatter_single_coalesced,
    )
    alltoall_base, _get_backend_name = all_to_all_single, getBackendName


ONLY_CPU = (
    "this process group of weft serves the CPU alone, since weft's backend could not be compiled; "
    'where it can be, torch.distributed is initialised with "cpu:weft,cuda:nccl"'
)


def _options(kind: type[Options], opts: Any, timeout: Timeout = None, **fields: Any) -> Options:
    """The options of a call: `opts`, or made of single arguments. An `opts` of another type is the
    value of the first field.
    """
    if type(opts) is kind:
        return opts
    made: Any = kind()
    if opts is not None:
        fields = {**fields, next(iter(fields)): opts}
    for name, value in fields.items():
        if value is not None:
            setattr(made, name, value)
    if timeout is not None:
        made.timeout = timeout
    return made  # type: ignore[no-any-return]


def _one(tensors: Any) -> Tensor:
    """The only tensor of an argument, bare or in a list."""
    if isinstance(tensors, Tensor):
        return waited(tensors)
    if not tensors:
        raise ValueError("a collective needs at least one tensor; got an empty list")
    return waited(tensors[0])


def _own(tensor: Tensor) -> Tensor:
    """A tensor whose memory holds its elements."""
    check_own_elements(tensor, "tensor")
    return tensor


def _tensors(args: Sequence[Any]) -> Iterator[Tensor]:
    """All tensors of a call's arguments."""
    for each in args:
        for tensor in each if isinstance(each, (list, tuple)) else (each,):
            if isinstance(tensor, Tensor):
                yield tensor


def _list(tensors: Any) -> list[Tensor]:
    """The list of tensors of an argument, bare or in a list; without one an empty list."""
    listed = tensors[0] if tensors and not isinstance(tensors[0], Tensor) else tensors
    return [*map(waited, listed)]
