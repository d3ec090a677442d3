"""Ranks that fork at random moments: children that make calls, end by various means, and may
outlive their rank.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist

import weft
from support.storm.rank import Part, wait_for
from weft.world import registry

_OUTLIVES = 4.0  # seconds that a child lives, longer than any time limit


def forking(part: Part) -> None:
    """A child makes a call, or none, and ends by one of several means, while its rank continues
    calling, with or without outstanding calls.
    """
    # gloo's own threads would hang an exiting child
    endings = ("_exit", "drop", "exit") if part.trial.by == "group" else ("_exit", "drop")
    calls, ending = part.draw.random() < 0.6, part.draw.choice(endings)
    outstanding = part.trial.by == "world" and part.draw.random() < 0.5
    handles: list[Any] = []
    child = 0
    world: Any = part.open()
    try:
        for number, call in enumerate(part.calls(part.trial.call + 15)):
            if number == part.trial.call:
                handles = (
                    [weft.all_reduce_async(torch.full((9,), float(n))) for n in range(3)]
                    if outstanding
                    else []
                )
                if part.victim:
                    part.fault()
                    if not (child := os.fork()):
                        _end_child(calls, ending)
                        handles, world = [], None
                        gc.collect()
                        os._exit(0)
                for n, handle in enumerate(handles):
                    assert torch.equal(handle.wait(), torch.full((9,), float(n * part.trial.ranks)))
                handles = []
            call(world)
        if child:
            how = wait_for(child)
            assert how == "exit 0", (
                f"the child, which {'calls and' if calls else ''} ends by {ending}, ended with {how}"
            )
    finally:
        if part.trial.by == "world":
            world.close()
        elif dist.is_initialized():
            dist.destroy_process_group()


def forking_during_calls(part: Part) -> None:
    """A thread of the victim forks at a random moment while another thread calls; the child makes a
    call.
    """
    children: list[int] = []

    def fork_later() -> None:
        time.sleep(part.trial.delay)
        part.fault()
        if child := os.fork():
            children.append(child)
            return
        _end_child(True, "_exit")

    with part.world() as world:
        thread = threading.Thread(target=fork_later)
        if part.victim:
            thread.start()
        for call in part.calls(50):
            call(world)
        if part.victim:
            thread.join()
            how = wait_for(children[0])
            assert how == "exit 0", f"the child ended with {how}"


def pooling(part: Part) -> None:
    """Calls by the processes of a pool."""
    with part.world() as world:
        for number, call in enumerate(part.calls(part.trial.call + 15)):
            if part.victim and number == part.trial.call:
                part.fault()
                with multiprocessing.get_context("fork").Pool(2) as pool:
                    found = pool.map_async(_error_of_call, range(2)).get(10)
                    pool.close()
                    pool.join()
                assert found == [""] * 2, found
            call(world)


def all_forking(part: Part) -> None:
    """Children of all ranks make one call together, and afterwards so do their ranks."""
    with part.world() as world:
        for call in part.calls(part.trial.call):
            call(world)
        part.fault()
        if not (child := os.fork()):
            _end_child(True, "_exit")
        how = wait_for(child)
        x = torch.full((4,), float(world.rank + 1))
        if part.trial.by == "group":
            dist.all_reduce(x)
        else:
            x = weft.all_reduce(x)
        wanted = float(sum(range(1, world.ranks + 1)))
        assert torch.equal(x, torch.full((4,), wanted)), (
            f"{x.tolist()} after the fork, where {wanted} is right"
        )
        assert how == "exit 0", f"the child ended with {how}"


def outlived(part: Part) -> None:
    """The victim has a child that lives on for seconds after the victim is killed: the victim's
    files and memory stay open in the child.
    """
    with part.world() as world:
        weft.barrier() if part.trial.by == "world" else dist.barrier()
        if part.victim:
            if not (child := os.fork()):
                time.sleep(_OUTLIVES)
                os._exit(0)
            part.report("child", pid=child)
        for call in part.calls():
            call(world)


def _end_child(calls: bool, ending: str) -> None:
    """End a child, with exit code 0 if its call raises the right error or it makes none."""
    if calls and (wrong := _error_of_call(0)):
        print(wrong, file=sys.stderr, flush=True)
        os._exit(71)
    if ending == "_exit":
        os._exit(0)
    if ending == "exit":
        sys.exit(0)
    registry.default = None
    if dist.is_initialized() and dist.get_backend() == "weft":
        dist.destroy_process_group()


def _error_of_call(_: int) -> str:
    """The complaint about a call in a child, empty if the call raises a WeftError."""
    try:
        if dist.get_backend() == "weft":
            dist.all_reduce(x := torch.full((4,), 1000.0))
        else:
            x = weft.all_reduce(torch.full((4,), 1000.0))
    except weft.WeftError:
        return ""
    except BaseException:
        return f"a call in a child must raise a WeftError: {traceback.format_exc()}"
    return f"a child that calls is owed a WeftError, and is given {x.tolist()}"
