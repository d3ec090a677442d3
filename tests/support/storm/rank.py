"""A rank's part of a trial: its rendezvous, its calls, and the events it reports."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from typing import Any

import torch.distributed as dist

import weft
from support.process_resources import leaked, resources
from support.storm.calls import Call, calls, compiled, group_calls
from support.storm.machine import starved
from support.storm.trial import RIGHT, Kind, Trial
from weft.bootstrap import shared_store
from weft.process_group.worlds import operations_of
from weft.world import registry

HANGS = 30.0  # seconds after which an unfinished rank counts as hanging
_CLONE_NEWNET = 0x40000000


class Part:
    """The state of a rank in a trial; `victim` is whether the fault is on this rank, `draw` a
    random generator with equal state on all ranks.
    """

    def __init__(self, trial: Trial, rank: int, folder: str, events_out: int, go_in: int) -> None:
        self.trial, self.rank, self.folder, self.events_out, self.go_in = (
            trial,
            rank,
            folder,
            events_out,
            go_in,
        )
        self.victim, self.pid, self.draw = (
            rank == trial.victim,
            os.getpid(),
            random.Random(f"{trial.seed} {trial.kind} play"),
        )

    def report(self, name: str, **more: Any) -> None:
        """Report an event to the storm; a forked child of this rank reports nothing."""
        if os.getpid() == self.pid:
            os.write(
                self.events_out,
                json.dumps({"event": name, "when": time.monotonic(), **more}).encode() + b"\n",
            )

    def store(self, name: str) -> dist.Store:
        """A store of this trial, shared by the ranks that pass the same name."""
        return dist.FileStore(f"{self.folder}/{name}", self.trial.ranks)

    def open(self) -> weft.World:
        """The world of all ranks: the default one, or that of the default process group."""
        self.report("meeting")
        if self.trial.by == "world":
            return weft.init(timeout=self.trial.limit)
        ranks, limit = self.trial.ranks, timedelta(seconds=self.trial.limit)
        dist.init_process_group(
            "weft", store=self.store("group"), rank=self.rank, world_size=ranks, timeout=limit
        )
        return operations_of(dist.group.WORLD).world

    @contextlib.contextmanager
    def world(self) -> Iterator[weft.World]:
        """The world of `open`, closed at the end of the block."""
        world = self.open()
        if self.trial.place == "compile":
            compiled(world)  # so that a slower compilation on one rank does not count as lateness
        if self.trial.by == "world":
            with world:
                yield world
            return
        try:
            yield world
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def calls(self, number: int | None = None) -> Iterator[Call]:
        """`number` calls, or endless ones, the same on all ranks."""
        self.report("world")
        made = (
            group_calls(self.trial.seed)
            if self.trial.by == "group"
            else calls(self.trial.seed, self.trial.place)
        )
        return islice(made, number)

    def fault(self) -> None:
        """Report that the fault occurs now."""
        self.report("fault")

    def live(self, kind: Kind, network: str | None) -> None:
        """Play the part and end this process."""
        status = 1
        try:
            self._begin(kind, network)
            before = resources()
            connects_first = not kind.alone and self.trial.by == "world"
            if connects_first:
                store, ranks, limit = self.store("gloo"), self.trial.ranks, timedelta(seconds=HANGS)
                dist.init_process_group(
                    "gloo", store=store, rank=self.rank, world_size=ranks, timeout=limit
                )
                del store
            self.report("ready")
            os.read(self.go_in, 1)
            self._play(kind)
            # all ranks have finished: nothing that happens from here on is a loss
            os.read(self.go_in, 1)
            registry.default = None
            if dist.is_initialized():
                dist.destroy_process_group()
            shared_store._served.clear()  # which this process would serve as long as it lives
            if kind.alone:  # a store that torch makes of a launcher's variables keeps its pipe
                before["files"] += [one for one in resources()["files"] if "pipe:" in one]
            self.report("left", kept=leaked(before, self.trial.place == "compile"))
            status = 0
        except SystemExit as leaving:
            error: Any = leaving.code
            leaving.__traceback__ = None
            gc.collect()
            _leave_python(error)
        except BaseException:
            self.report("broken", text=traceback.format_exc())
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _begin(self, kind: Kind, network: str | None) -> None:
        out = os.open(
            f"{self.folder}/output of {self.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.close(out)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if kind.victim is not None or not self.victim:  # otherwise any ending is allowed
            faulthandler.enable(2)  # prints the stacks of an aborted rank
        if network:
            with open(f"/run/netns/{network}") as file:
                assert not ctypes.CDLL(None).setns(file.fileno(), _CLONE_NEWNET)
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"

    def _play(self, kind: Kind) -> None:
        error: BaseException | None = None
        limits = {
            name: resource.getrlimit(name) for name in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)
        }
        try:
            kind.play(self)
        except SystemExit:
            raise
        except BaseException as caught:
            error = caught
        if os.getpid() != self.pid:
            traceback.print_exception(error)
            os._exit(70)  # a child, which was to end by itself
        for name, limit in limits.items():
            resource.setrlimit(name, limit)
        text = "" if error is None else str(error)
        trace = "" if error is None else "".join(traceback.format_exception(error))
        ending, expected = (
            RIGHT if error is None else _public(type(error)).__name__,
            isinstance(error, weft.WeftError),
        )
        self.report(
            "over", starved=starved(os.getpid()), kind=ending, weft=expected, text=text, trace=trace
        )


def wait_for(child: int, limit: float = 10.0) -> str:
    """How a child of this process ends: "exit 0" or "signal 6"; one that hangs is killed. Time for
    which it waits for a core does not count.
    """
    began, busy = time.monotonic(), starved(child)
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return ending(status)
        took = time.monotonic() - began
        if took > limit and took - (starved(child) - busy) > limit:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"a hang of {limit:g} s"
        time.sleep(0.005)


def _public(error: type[BaseException]) -> type[BaseException]:
    """The class by which a user knows an error: of those of weft one that weft exports."""
    exported = (one for one in error.__mro__ if getattr(weft, one.__name__, None) is one)
    return next(exported, error)


def ending(status: int) -> str:
    """The ending of a process with this status of waitpid."""
    return (
        f"signal {os.WTERMSIG(status)}"
        if os.WIFSIGNALED(status)
        else f"exit {os.WEXITSTATUS(status)}"
    )


def _leave_python(code: Any) -> None:
    """End the interpreter as `sys.exit` does, with all finalizers; this process is a fork, so its
    caller's frames stay.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.pythonapi.Py_Exit(code if isinstance(code, int) else int(code is not None))
