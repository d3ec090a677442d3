"""Exceptions of signal handlers that come while native code has called Python, to hash, compare,
read an attribute or multiply: each arrives on the rank that got the signal, and its peer learns of
it.
"""

from __future__ import annotations

import signal

import pytest
import torch.distributed as dist
from support.interrupted import PLACES, Moment
from support.ranks import shared_store, start

import weft
from weft.world import init_by_store


class Interrupted(Exception):
    """The exception of a program's own handler."""


EXCEPTIONS = KeyboardInterrupt, SystemExit, Interrupted


def interrupt_of(kind):
    def handler(*_):
        raise kind("a signal")

    return handler


def interrupted(store, rank, place, kind):
    """The error of a rank whose peer, rank 1, gets a signal in its third call."""
    signal.signal(signal.SIGUSR1, interrupt_of(kind))
    moment = Moment()
    call = PLACES[place](moment)
    try:
        with init_by_store(store, rank, 2, timeout=60) as world:
            weft.world.registry.make_default(world)
            for number in range(3):
                moment.armed = rank == 1 and number == 2
                call()
            weft.barrier()
    except BaseException as error:
        return type(error).__name__, str(error), moment.came
    return "", "no error", moment.came


def interrupted_everywhere(made):
    store, rank = made
    return {
        (place, kind.__name__): interrupted(
            dist.PrefixStore(f"{place} {kind.__name__}", store), rank, place, kind
        )
        for place in PLACES
        for kind in EXCEPTIONS
    }


@pytest.fixture(scope="module")
def errors():
    found = []
    for outcome in start(interrupted_everywhere, 2, context=shared_store):
        assert outcome.error is None, outcome.trace
        found.append(outcome.result)
    return found


@pytest.mark.parametrize("kind", [kind.__name__ for kind in EXCEPTIONS])
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_arrives_and_the_peer_learns_of_it(errors, place, kind):
    peer, own = (each[place, kind] for each in errors)
    assert own == (kind, "a signal", True)
    name, message, came = peer
    assert (name, came) == ("PeerLost", False), message
    assert message.startswith("rank 1 (pid ")
    if place == "end_of_a_range":  # the failed product has closed the world before
        assert "failed with ValueError: a product that fails," in message
    elif kind == "SystemExit":
        assert "was ended by sys.exit(a signal)," in message
    else:
        assert f"failed with {kind}: a signal," in message
