"""A process group of torch.distributed whose ranks are a world of weft."""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from weft.checks import PLAIN, check_own_elements, in_modes, waited
from weft.errors import PeerTimeout, WeftError
from weft.ops.barrier import barrier
from weft.process_group import collectives
from weft.process_group.messages import Messages
from weft.process_group.uncompiled import uncompiled_methods
from weft.process_group.work_queue import CombinedWork, GlooWork, Work, WorkQueue
from weft.world import init_by_store
from weft.world.rendezvous import time_left

_log = logging.getLogger("weft")
_CPU = torch.device("cpu")
_DONE = Work(())  # of synchronous calls
_DONE.end()
_TAGS = 1 << 63
_MESSAGES = "messages, since its ranks are on several hosts"
_DETECTION = 1.0  # seconds within which the world detects a lost peer

Options = TypeVar("Options")
Timeout = timedelta | None
_ProcessGroup: Any = dist.ProcessGroup  # its stubs differ between versions of torch


@uncompiled_methods
class Group(_ProcessGroup):  # type: ignore[misc]
    """A process group made by ``init_process_group("weft")`` or ``new_group(backend="weft")``.

    torch.distributed calls these methods. Tensors on the CPU are weft's; others go to the other
    backends of the group, as in "cpu:weft,cuda:nccl". A synchronous call returns when it is done,
    an asynchronous one returns a `Work`.

    Attributes: `world`, of the group's ranks, for calls of the group only.
    """

    supports_splitting = supports_coalescing = supports_time_estimate = False
    group_name = group_desc = ""  # set by torch

    def __init__(
        self, store: Store, rank: int, ranks: int, timeout: float, global_ranks: Sequence[int]
    ) -> None:
        super().__init__(rank, ranks)
        self.store = store
        self.global_ranks = [*global_ranks] or [*range(ranks)]
        self.world = init_by_store(store, rank, ranks, timeout)
        self.world.global_ranks = self.global_ranks
        self.world.maker = 'init_process_group("weft") or new_group(backend="weft")'
        self.queue = WorkQueue(f"weft group of {ranks}", self.world)
        self.messages = None if self.world.hosts.several else Messages(self.world)
        self.gloo: Any = None
        if self.messages is None:
            self._gloo_for(_MESSAGES)
        self.others: dist.ProcessGroup | None = None
        self.coalesced: list[Work] | None = None  # issued since `_start_coalescing`
        self.barriers = 0
        self._dropped = weakref.finalize(self, _drop, self.queue, self.messages)
        self._dropped.atexit = False
        try:
            for progress in filter(None, (self.queue, self.messages)):
                progress.start()
        except BaseException:  # such as Ctrl-C
            self.shutdown()
            raise

    # Reductions

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: Timeout = None, *, op: Any = None
    ) -> dist.Work:
        opts = _options(c10d.AllreduceOptions, opts, timeout, reduceOp=op)
        tensor = _one(tensors)
        if not tensor.is_cpu:
            return self._elsewhere(tensor).allreduce([tensor], opts)
        if tensor.layout is torch.sparse_coo:
            return self._run_by_gloo(
                tensor, self._gloo_for("sparse all_reduce").allreduce, [tensor], opts
            )
        if tensor.requires_grad:
            _not_recorded(_all_reduce, tensor)
        return self._issue([tensor], opts, collectives.all_reduce, tensor, opts.reduceOp)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = _options(c10d.AllreduceCoalescedOptions, opts)
        tensors = [*map(waited, tensors)]
        if not _first(tensors).is_cpu:
            return self._elsewhere(tensors[0]).allreduce_coalesced(tensors, opts)
        return self._issue(tensors, opts, collectives.all_reduce_coalesced, tensors, opts.reduceOp)

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
        if not tensor.is_cpu:
            return self._elsewhere(tensor).reduce([tensor], opts)
        return self._issue([tensor], opts, collectives.reduce, tensor, opts.reduceOp, opts.rootRank)

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
        out, tensors = _one(outputs), _list(inputs)
        if not out.is_cpu:
            return self._elsewhere(out).reduce_scatter([out], [tensors], opts)
        return self._issue([out], opts, collectives.reduce_scatter, out, tensors, opts.reduceOp)

    def reduce_scatter_single(self, out: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        opts = _options(c10d.ReduceScatterOptions, opts)
        if not (type(out) is type(tensor) is Tensor):
            out, tensor = waited(out), waited(tensor)
        if not out.is_cpu:
            return self._elsewhere(out)._reduce_scatter_base(out, tensor, opts)
        return self._issue(
            [out], opts, collectives.reduce_scatter_single, out, tensor, opts.reduceOp
        )

    def reduce_scatter_single_coalesced(
        self, outs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = _options(c10d.ReduceScatterOptions, opts)
        return CombinedWork(
            [self.reduce_scatter_single(*pair, opts) for pair in zip(outs, tensors, strict=True)]
        )

    # Gathers, scatters and exchanges

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: Timeout = None, *, root: int | None = None
    ) -> dist.Work:
        opts = _options(c10d.BroadcastOptions, opts, timeout, rootRank=root)
        tensor = _one(tensors)
        if not tensor.is_cpu:
            return self._elsewhere(tensor).broadcast([tensor], opts)
        if tensor.requires_grad:
            _not_recorded(_broadcast, tensor)
        return self._issue([tensor], opts, collectives.broadcast, tensor, opts.rootRank)

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Timeout = None
    ) -> dist.Work:
        opts = _options(c10d.AllgatherOptions, opts, timeout)
        outs, tensor = _list(outputs), _one(inputs)
        if not tensor.is_cpu:
            return self._elsewhere(tensor).allgather([outs], [tensor], opts)
        return self._issue(outs, opts, collectives.all_gather, outs, tensor)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        by_tensor = zip(zip(*outputs, strict=True), inputs, strict=True)
        return CombinedWork([self.allgather(outs, tensor, opts) for outs, tensor in by_tensor])

    def all_gather_single(self, out: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        opts = _options(c10d.AllgatherOptions, opts)
        if not (type(out) is type(tensor) is Tensor):
            out, tensor = waited(out), waited(tensor)
        if not out.is_cpu:
            return self._elsewhere(out)._allgather_base(out, tensor, opts)
        return self._issue([out], opts, collectives.all_gather_single, out, tensor)

    def all_gather_single_coalesced(
        self, outs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return CombinedWork(
            [self.all_gather_single(*pair, opts) for pair in zip(outs, tensors, strict=True)]
        )

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
        outs, tensor = _list(outputs), _one(inputs)
        if not tensor.is_cpu:
            return self._elsewhere(tensor).gather([outs] if outs else [], [tensor], opts)
        return self._issue(outs, opts, collectives.gather, outs, tensor, opts.rootRank)

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
        out, tensors = _one(outputs), _list(inputs)
        if not out.is_cpu:
            return self._elsewhere(out).scatter([out], [tensors] if tensors else [], opts)
        return self._issue([out], opts, collectives.scatter, out, tensors, opts.rootRank)

    def alltoall(
        self, outs: list[Tensor], tensors: list[Tensor], opts: Any = None, timeout: Timeout = None
    ) -> dist.Work:
        opts = _options(c10d.AllToAllOptions, opts, timeout)
        outs, tensors = [*map(waited, outs)], [*map(waited, tensors)]
        if not _first(outs).is_cpu:
            return self._elsewhere(outs[0]).alltoall(outs, tensors, opts)
        return self._issue(outs, opts, collectives.all_to_all, outs, tensors)

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
        if not (type(out) is type(tensor) is Tensor):
            out, tensor = waited(out), waited(tensor)
        if not out.is_cpu:
            return self._elsewhere(out).alltoall_base(
                out, tensor, [*output_sizes], [*input_sizes], opts
            )
        return self._issue(
            [out], opts, collectives.all_to_all_single, out, tensor, [*output_sizes], [*input_sizes]
        )

    # Messages

    def send(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        return self._message("send", _one(tensors), peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        return self._message("recv", _one(tensors), peer, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        return self._message("recv_anysource", _one(tensors), None, tag)

    def _message(self, call: str, tensor: Tensor, peer: int | None, tag: int) -> dist.Work:
        """Send a tensor to a peer, or receive one from it, or from any rank (None): by weft, gloo,
        or the backend of another device.
        """
        to = (tag,) if peer is None else (peer, tag)
        if not tensor.is_cpu:
            work: dist.Work = getattr(self._elsewhere(tensor), call)([tensor], *to)
            return work
        check_own_elements(tensor, "tensor")
        if peer is not None and (not 0 <= peer < self.size() or peer == self.rank()):
            raise ValueError(
                f"the peer of rank {self.rank()} must be another rank of this group of "
                f"{self.size()}; got rank {peer}"
            )
        if not 0 <= tag < _TAGS:
            raise ValueError(f"the tag of a message must be from 0 to 2**63 - 1; got {tag}")
        if self.messages is None:
            return self._run_by_gloo(
                tensor, getattr(self._gloo_for(_MESSAGES), call), [tensor], *to
            )
        begin: Callable[..., Work] = self.messages.send if call == "send" else self.messages.receive
        return self._coalesce(begin(tensor, peer, tag))

    # Barriers

    def barrier(self, opts: Any = None, timeout: Timeout = None) -> dist.Work:
        opts = _options(c10d.BarrierOptions, opts, timeout)
        if opts.device is not None and opts.device.type != "cpu":
            return self._on(opts.device).barrier(opts)
        return self._issue([], opts, barrier)

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """A barrier by the group's store; after `timeout` rank 0 names the first missing rank, or
        all.
        """
        seconds = self.world.timeout if timeout is None else timeout.total_seconds()
        rank = self.rank()
        deadline = time.monotonic() + seconds
        store = PrefixStore(f"weft monitored barrier {self.barriers}", self.store)
        self.barriers += 1

        def arrived(key: str) -> bool:
            try:
                store.wait([key], time_left(deadline))
            except RuntimeError:
                return False
            return True

        if rank:
            store.set(str(rank), "")
            if not arrived("all"):
                raise PeerTimeout(
                    f"Rank {rank} successfully reached monitoredBarrier, "
                    "but received errors while waiting for send/recv from rank 0"
                )
            return
        if not seconds > 0 and self.size() > 1:
            raise PeerTimeout(f"Rank 0 timed out in monitoredBarrier after {seconds * 1e3:g} ms")
        missing = (peer for peer in map(str, range(1, self.size())) if not arrived(peer))
        if late := [*itertools.islice(missing, None if wait_all_ranks else 1)]:
            late_ranks = f"Rank{'s' if len(late) > 1 else ''} {', '.join(late)}"
            raise PeerTimeout(
                f"{late_ranks} failed to pass monitoredBarrier in {seconds * 1e3:g} ms"
            )
        store.set("all", "")

    # Coalescing

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            self._on(device)._start_coalescing(device)
        self.coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works = self.coalesced or []
        self.coalesced = None
        if device.type != "cpu":
            return self._on(device)._end_coalescing(device)
        return CombinedWork(works)

    # Groups of this group

    def split_group(self, *_: Any, **__: Any) -> dist.ProcessGroup:
        raise RuntimeError("weft's groups cannot be split: make a group by dist.new_group(ranks)")

    merge_remote_group = split_group

    # Properties

    def get_group_store(self) -> Store:
        return self.store

    def _set_group_name(self, name: str) -> None:
        self.group_name = name
        self._name_world()

    def _set_group_desc(self, text: str) -> None:
        self.group_desc = text
        self._name_world()

    def _name_world(self) -> None:
        text = "" if self.group_desc == "undefined" else self.group_desc
        self.world.group_name = f"{self.group_name} {text}".strip()

    def getBackendName(self) -> str:
        return "weft"

    def getGroupName(self) -> str:
        return self.group_name

    def getGroupDesc(self) -> str:
        return self.group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        if self not in distributed_c10d._world.pg_map:
            # torch (2.15) is still making the group, and would attach a recorder, which needs
            # backends in C++
            return []
        return [_CPU, *(self._others()._device_types if self._other_backends() else ())]

    def _get_backend(self, device: torch.device) -> Any:
        device = torch.device(device)
        return self if device.type == "cpu" else self._on(device)._get_backend(device)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of every wait from now on."""
        self.world.timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Run all issued works, then close the world, as `dist.destroy_process_group` does.

        In a signal handler that interrupts a call on the group, the call and all works fail.
        """
        self._dropped.detach()
        if self.world.forked:
            return
        if call := self.queue.current_call() or (
            self.messages is not None and self.messages.current_call()
        ):
            self.world.fail(
                WeftError(
                    f"rank {self.rank()} left the group in a signal handler while it was in {call}"
                )
            )
        _leave(self.queue, self.messages)
        self.gloo = None  # its threads must end before the interpreter
        if self.others is not None:
            self.others.shutdown()

    def abort(self) -> None:
        """Close the world without running issued works; peers get the reason."""
        self.world.fail(WeftError("the group was aborted"))
        if self.others is not None:
            self.others.abort()
        self.shutdown()

    # Execution

    def _issue(
        self, tensors: Sequence[Tensor], opts: Any, call: Callable[..., None], *args: Any
    ) -> dist.Work:
        if in_modes():
            for tensor in _tensors(args):
                check_own_elements(tensor, "tensor")
        seconds = opts.timeout.total_seconds()
        limit = seconds if seconds > 0 else None
        if opts.asyncOp or self.coalesced is not None:
            return self._coalesce(self.queue.issue(tensors, call, self.world, *args, limit))
        self.queue.run(call, self.world, *args, limit)
        return _DONE

    def _coalesce(self, work: Work) -> Work:
        if self.coalesced is not None:
            self.coalesced.append(work)
        return work

    # Other backends

    def _gloo_for(self, operations: str) -> Any:
        """The gloo group for `operations`, made at the first use."""
        self.world.check()
        if self.gloo is None:
            if self.rank() == 0:
                _log.warning("a process group of weft uses gloo for %s", operations)
            limit = timedelta(seconds=self.world.timeout)
            self.gloo = dist.ProcessGroupGloo(
                PrefixStore("weft gloo", self.store), self.rank(), self.size(), timeout=limit
            )
        return self.gloo

    def _run_by_gloo(
        self, tensor: Tensor, begin: Callable[..., dist.Work], *args: Any
    ) -> dist.Work:
        """A gloo operation, started by ``begin(*args)``, which raises if a peer is already lost."""
        try:
            work = begin(*args)
        except RuntimeError as error:
            raise self._cause(error) from None
        return self._coalesce(GlooWork(work, [tensor], self._cause))

    def _cause(self, error: RuntimeError) -> BaseException:
        """The error of a lost peer if that is why gloo lost a connection, else `error`."""
        deadline = time.monotonic() + _DETECTION
        while time.monotonic() < deadline:
            if self.world.mesh.failure()[0]:
                return self.world.failure("for a message")
            time.sleep(0.01)
        return error

    def _other_backends(self) -> str:
        """The backends of other devices, such as "cuda:nccl"."""
        config = distributed_c10d._world.pg_backend_config.get(self, "")
        return ",".join(part for part in config.split(",") if part and not part.startswith("cpu:"))

    def _elsewhere(self, tensor: Tensor) -> dist.ProcessGroup:
        """The group of the backends for other devices, for a tensor that is not on the CPU."""
        if not self._other_backends():
            raise ValueError(
                f"the tensor is on {tensor.device}, but weft's backend takes CPU tensors only: "
                'initialise torch.distributed with backends for both, such as "cpu:weft,cuda:nccl"'
            )
        return self._others()

    def _on(self, device: torch.device) -> dist.ProcessGroup:
        """The group of the backends for other devices; `RuntimeError`, as of torch's own groups, if
        there are none.
        """
        if not self._other_backends():
            raise RuntimeError(
                f"No backend type associated with device type {device.type}: this group is weft's, "
                'for the CPU; initialise torch.distributed with backends for both, such as "cpu:'
                'weft,cuda:nccl"'
            )
        return self._others()

    def _others(self) -> dist.ProcessGroup:
        if self.others is None:
            # an empty group, for backends that read `others` while they are made
            self.others = _ProcessGroup(self.rank(), self.size())
            try:
                backends = dist.Backend(self._other_backends())
                limit = timedelta(seconds=self.world.timeout)
                name: Any = f"{self.group_name}, other backends"
                self.others, _ = distributed_c10d._new_process_group_helper(
                    self.size(),
                    self.rank(),
                    self.global_ranks,
                    backends,
                    self.store,
                    group_name=name,
                    timeout=limit,
                )
            except BaseException:
                self.others = None
                raise
        return self.others

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


def _leave(queue: WorkQueue, messages: Messages | None) -> None:
    """Run all issued works, and close the world of a group."""
    queue.close()
    if messages is not None:
        messages.close()
    queue.world.close()


def _drop(queue: WorkQueue, messages: Messages | None) -> None:
    """Leave a group that its owner has dropped: on its thread, since this one may be anywhere in
    the program.
    """
    if not queue.world.forked:
        queue.ended = partial(_leave, queue, messages)
        queue.deferred.close()


_library = torch.library.Library("weft", "FRAGMENT")


def _unknown_to_autograd(name: str) -> Any:
    """An operator that does nothing and has no gradient, so that a backward pass warns."""
    _library.define(f"{name}(Tensor(a!) tensor) -> Tensor(a!)")
    _library.impl(name, lambda tensor: tensor, "CPU")
    return getattr(torch.ops.weft, name).default


_all_reduce, _broadcast = _unknown_to_autograd("all_reduce_"), _unknown_to_autograd("broadcast_")


def _not_recorded(operator: Any, tensor: Tensor) -> None:
    """Let torch warn in a backward pass through an overwritten tensor, as for its own backends."""
    if torch.is_grad_enabled() and type(tensor) in PLAIN:
        operator(tensor)


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
    tensor = tensors if isinstance(tensors, Tensor) else _first(tensors)
    return tensor if type(tensor) is Tensor else waited(tensor)


def _first(tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        raise ValueError("a collective needs at least one tensor; got an empty list")
    return tensors[0]


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
