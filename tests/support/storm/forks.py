"""Ranks that fork at random moments: children that call, that end in any way, and that outlive
their rank.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist

import weft
from support.storm.rank import Part, wait_for
from weft.world import world as worlds

_OUTLIVES = 4.0  # seconds for which a child lives, more than anybody should wait


def forking(part: Part) -> None:
    """A child makes a call, or none, and ends in any way, while its rank goes on, with calls under
    way or not.
    """
    ways = (
        ("_exit", "drop", "exit") if part.trial.by == "group" else ("_exit", "drop")
    )  # gloo by itself hangs as a child exits
    calls, way = part.draw.random() < 0.6, part.draw.choice(ways)
    under_way = part.trial.by == "world" and part.draw.random() < 0.5
    handles: list[Any] = []
    child = 0
    world: Any = part.open()
    try:
        for number, call in enumerate(part.calls(part.trial.call + 15)):
            if number == part.trial.call:
                handles = (
                    [weft.all_reduce_async(torch.full((9,), float(n))) for n in range(3)]
                    if under_way
                    else []
                )
                if part.victim:
                    part.fault()
                    if not (child := os.fork()):
                        _live(calls, way)
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
                f"the child, which {'calls and' if calls else ''} ends by {way}, ended with {how}"
            )
    finally:
        if part.trial.by == "world":
            world.close()
        elif dist.is_initialized():
            dist.destroy_process_group()


def forking_beside(part: Part) -> None:
    """A thread of the victim's forks at any moment while another calls; the child makes a call."""
    children: list[int] = []

    def beside() -> None:
        time.sleep(part.trial.delay)
        part.fault()
        if child := os.fork():
            children.append(child)
            return
        _live(True, "_exit")

    with part.world() as world:
        thread = threading.Thread(target=beside)
        if part.victim:
            thread.start()
        for call in part.calls(50):
            call(world)
        if part.victim:
            thread.join()
            how = wait_for(children[0])
            assert how == "exit 0", f"the child ended with {how}"


def pooling(part: Part) -> None:
    """The processes of a pool call."""
    with part.world() as world:
        for number, call in enumerate(part.calls(part.trial.call + 15)):
            if part.victim and number == part.trial.call:
                part.fault()
                with multiprocessing.get_context("fork").Pool(2) as pool:
                    found = pool.map_async(_tried, range(2)).get(10)
                    pool.close()
                    pool.join()
                assert found == [""] * 2, found
            call(world)


def all_forking(part: Part) -> None:
    """Children of all ranks make one call together, and so do their ranks afterwards."""
    with part.world() as world:
        for call in part.calls(part.trial.call):
            call(world)
        part.fault()
        if not (child := os.fork()):
            _live(True, "_exit")
        how = wait_for(child)
        given = torch.full((4,), float(world.rank + 1))
        if part.trial.by == "group":
            dist.all_reduce(given)
        else:
            given = weft.all_reduce(given)
        wanted = float(sum(range(1, world.ranks + 1)))
        assert torch.equal(given, torch.full((4,), wanted)), (
            f"{given.tolist()} after the fork, where {wanted} is right"
        )
        assert how == "exit 0", f"the child ended with {how}"


def outlived(part: Part) -> None:
    """The victim has a child that lives on for seconds when it is killed: all that it has stays
    open in there.
    """
    with part.world() as world:
        weft.barrier() if part.trial.by == "world" else dist.barrier()
        if part.victim:
            if not (child := os.fork()):
                time.sleep(_OUTLIVES)
                os._exit(0)
            part.say("child", pid=child)
        for call in part.calls():
            call(world)


def _live(calls: bool, way: str) -> None:
    """What a child does: it ends with 0 if it is given what it is owed."""
    signal.alarm(8)  # which ends one that hangs
    if calls and (wrong := _tried(0)):
        print(wrong, file=sys.stderr, flush=True)
        os._exit(71)
    if way == "_exit":
        os._exit(0)
    if way == "exit":
        sys.exit(0)
    worlds._default = None
    if dist.is_initialized() and dist.get_backend() == "weft":
        dist.destroy_process_group()


def _tried(_: int) -> str:
    """What is wrong with how a call ends in a child."""
    signal.alarm(8)
    try:
        if dist.get_backend() == "weft":
            dist.all_reduce(given := torch.full((4,), 1000.0))
        else:
            given = weft.all_reduce(torch.full((4,), 1000.0))
    except weft.WeftError:
        return ""
    except BaseException:
        return f"a child that calls is owed a WeftError: {traceback.format_exc()}"
    finally:
        signal.alarm(0)
    return f"a child that calls is owed a WeftError, and is given {given.tolist()}"
