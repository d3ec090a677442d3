"""A rank's part of a trial: how it meets the others, what it calls, and what it says of itself."""

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
from weft.world import world as worlds

HANGS = 30.0  # seconds after which a rank that is not through is one that hangs
_CLONE_NEWNET = 0x40000000


class Part:
    """What a rank has of a trial. Attributes: `victim` (whether it is this rank), `draw` (the same
    chances on all ranks).
    """

    def __init__(self, trial: Trial, rank: int, folder: str, mouth: int, ear: int) -> None:
        self.trial, self.rank, self.folder, self.mouth, self.ear = trial, rank, folder, mouth, ear
        self.victim, self.pid, self.draw = (
            rank == trial.victim,
            os.getpid(),
            random.Random(f"{trial.seed} {trial.kind} play"),
        )

    def say(self, what: str, **more: Any) -> None:
        """Tell the storm something; a child that this rank has forked says nothing."""
        if os.getpid() == self.pid:
            os.write(
                self.mouth,
                json.dumps({"what": what, "when": time.monotonic(), **more}).encode() + b"\n",
            )

    def store(self, name: str) -> dist.Store:
        """A store of this trial's, the same on ranks that give it the same name."""
        return dist.FileStore(f"{self.folder}/{name}", self.trial.ranks)

    def open(self) -> weft.World:
        """The world of all ranks: the default one, or that of the default process group."""
        self.say("meeting")
        if self.trial.by == "world":
            return weft.init(timeout=self.trial.limit)
        ranks, limit = self.trial.ranks, timedelta(seconds=self.trial.limit)
        dist.init_process_group(
            "weft", store=self.store("group"), rank=self.rank, world_size=ranks, timeout=limit
        )
        return dist.group.WORLD.world

    @contextlib.contextmanager
    def world(self) -> Iterator[weft.World]:
        """The same until the block ends, in which all of it is used."""
        world = self.open()
        if self.trial.place == "compile":
            compiled(world)  # that some ranks compile for longer than others is no lateness
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
        """So many calls, or calls for ever, the same on all ranks."""
        self.say("world")
        made = (
            group_calls(self.trial.seed)
            if self.trial.by == "group"
            else calls(self.trial.seed, self.trial.place)
        )
        return islice(made, number)

    def fault(self) -> None:
        """Say that something goes wrong now."""
        self.say("fault")

    def live(self, kind: Kind, network: str | None) -> None:
        """All that this process does: it ends here."""
        status = 1
        try:
            self._begin(kind, network)
            before = resources()
            meets = not kind.alone and self.trial.by == "world"
            if meets:
                store, ranks, limit = self.store("gloo"), self.trial.ranks, timedelta(seconds=HANGS)
                dist.init_process_group(
                    "gloo", store=store, rank=self.rank, world_size=ranks, timeout=limit
                )
                del store
            self.say("ready")
            os.read(self.ear, 1)
            self._play(kind)
            os.read(self.ear, 1)  # all are through; what comes now is nobody's loss
            worlds._default = None
            if dist.is_initialized():
                dist.destroy_process_group()
            if kind.alone:  # a store that torch makes of a launcher's variables keeps its pipe
                before["files"] += [one for one in resources()["files"] if "pipe:" in one]
            self.say("left", kept=leaked(before, self.trial.place == "compile"))
            status = 0
        except SystemExit as leaving:
            error: Any = leaving.code
            leaving.__traceback__ = None
            gc.collect()
            _leave_python(error)
        except BaseException:
            self.say("broken", text=traceback.format_exc())
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _begin(self, kind: Kind, network: str | None) -> None:
        out = os.open(f"{self.folder}/said by {self.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.close(out)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if kind.victim is not None or not self.victim:  # else it may end in any way
            faulthandler.enable(2)  # which says where a rank that hangs is aborted
        if network:
            with open(f"/run/netns/{network}") as file:
                assert not ctypes.CDLL(None).setns(file.fileno(), _CLONE_NEWNET)
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"

    def _play(self, kind: Kind) -> None:
        error: BaseException | None = None
        limits = {
            what: resource.getrlimit(what) for what in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)
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
        for what, limit in limits.items():
            resource.setrlimit(what, limit)
        text = "" if error is None else str(error)
        trace = "" if error is None else "".join(traceback.format_exception(error))
        ending, known = (
            RIGHT if error is None else type(error).__name__,
            isinstance(error, weft.WeftError),
        )
        self.say(
            "over", starved=starved(os.getpid()), kind=ending, weft=known, text=text, trace=trace
        )


def wait_for(child: int, limit: float = 10.0) -> str:
    """How a child of this process ends: "exit 0" or "signal 6"; one that hangs is killed."""
    deadline = time.monotonic() + limit
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return ending(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"a hang of {limit:g} s"
        time.sleep(0.005)


def ending(status: int) -> str:
    """How a process ended that waitpid says this of."""
    return (
        f"signal {os.WTERMSIG(status)}"
        if os.WIFSIGNALED(status)
        else f"exit {os.WEXITSTATUS(status)}"
    )


def _leave_python(code: Any) -> None:
    """End the interpreter as `sys.exit` does, with all that runs then; the process is a fork, and
    its caller's frames stay.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.pythonapi.Py_Exit(code if isinstance(code, int) else int(code is not None))
