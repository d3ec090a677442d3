"""Signals at random moments, also in Python code that native code calls: handlers that do nothing,
raise, exit or leave the world, and Ctrl-C.
"""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import weft
from support.interrupted import PLACES, Moment
from support.storm.judge import Scene
from support.storm.rank import Part


class Interrupted(Exception):
    """The exception of a signal handler."""


def handling(handler: Callable[[Part], Any]) -> Callable[[Part], None]:
    """Endless calls, blocking and asynchronous, on ranks with this signal handler."""

    def play(part: Part) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: handler(part))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with part.world() as world:
            for number, call in enumerate(part.calls()):
                if number % 3 == 0:
                    _in_background(part, world)
                call(world)

    return play


def ignoring(part: Part) -> None:
    """Calls while a handler that does nothing runs every millisecond."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        with part.world() as world:
            for call in part.calls(40):
                call(world)
                _in_background(part, world)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def within(part: Part) -> None:
    """Calls during which native code runs Python code, and others. The victim gets a signal in such
    code, or at a random moment by a timer; its handler raises one of three exceptions.
    """
    kind = part.draw.choice((Interrupted, KeyboardInterrupt, SystemExit))
    by_timer, delay, moment = part.draw.random() < 0.5, part.draw.uniform(0.001, 0.15), Moment()

    def handler(*_: object) -> None:
        part.fault()
        raise kind(7)

    def again(_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.001)

    sys.unraisablehook = again  # Python drops what a handler raises in a finalizer
    signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGALRM, handler)
    made = [place(moment) for place in PLACES.values()]
    with part.world() as world:
        if part.victim and by_timer:
            signal.setitimer(signal.ITIMER_REAL, delay)
        for number, call in enumerate(part.calls()):
            moment.armed = part.victim and not by_timer and number >= part.trial.call
            part.draw.choice(made)()
            call(world)


def raises(part: Part) -> None:
    raise Interrupted


def exits(part: Part) -> None:
    sys.exit(7)


def leaves(part: Part) -> None:
    """Leave the world or group, as handlers of SIGTERM often do."""
    if part.trial.by == "group":
        dist.destroy_process_group()
    else:
        weft.world.current().close()


@contextmanager
def signalled(scene: Scene) -> Iterator[None]:
    scene.victim.kill(signal.SIGUSR1)
    yield


@contextmanager
def interrupted(scene: Scene) -> Iterator[None]:
    scene.victim.kill(signal.SIGINT)
    yield


def _in_background(part: Part, world: weft.World) -> None:
    """Several outstanding calls; the signal may come during any wait, or between the waits."""
    tensors = [torch.full((size,), 1.0) for size in (5, 200_000, 5, 3000)]
    if part.trial.by == "group":
        ends = [dist.all_reduce(x, async_op=True).wait for x in tensors]
    else:
        ends = [weft.all_reduce_async(x, out=x).wait for x in tensors]
    for end in random.sample(ends, len(ends)):
        end()
    assert all(torch.equal(x, torch.full_like(x, float(world.ranks))) for x in tensors)
