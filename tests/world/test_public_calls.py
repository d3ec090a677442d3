"""Every public collective function, with every kind of argument in the place of each, on one rank
alone: operands of all layouts are right, and of an argument that a rank refuses its peers are told.
"""

from __future__ import annotations

import contextlib
import inspect

import pytest
import torch
from support.public_calls import (
    METHODS,
    ONE_SIDED,
    OTHER_METHODS,
    RANKS,
    SHAPES,
    bad,
    bad_one_sided,
    layouts,
    public_calls,
)
from torch import Tensor

import weft

CALLS = public_calls()
NO_WORLD = ("world",)  # of which peers would be told is unknown then


class Over(Exception):
    """Ends the world of a case, in which the peer still waits."""


def outcomes(local, call):
    """What a call returns or raises on each rank; and of an error of rank 0 the text that its peer
    finds, and how many times it was told.
    """
    found = {}

    def run():
        world = weft.init()
        try:
            found[world.rank] = call(world.rank)
        except Exception as error:
            found[world.rank] = error
            if world.rank == 0 and world.closed is None:
                number = world.executor.calls + 1
                found["told"] = (
                    world.executor.times_refused(0, number),
                    world.executor.reason_of_refusal(0),
                )
            raise Over from error

    with contextlib.suppress(Over, weft.WeftError):
        local.run(run)
    return found


def refused(found):
    """What is wrong with a call for which rank 0 has a bad argument, "" if nothing is."""
    own, peers = found.get(0), found.get(1)
    if not isinstance(own, Exception):
        return f"rank 0 takes it: {own}"
    if isinstance(own, weft.MismatchError):  # an argument that is right by itself
        return "" if isinstance(peers, weft.MismatchError) else f"rank 1: {peers!r}"
    if type(own) not in (ValueError, TypeError):
        return f"rank 0: {own!r}"
    if type(peers) is type(own) and str(peers) == str(own):
        return ""  # all ranks raise it together
    times, why = found.get("told", (0, ""))
    if times != 1:
        return f"rank 0 told it {times} times: {own!r}"
    if not why.startswith(f"{type(own).__name__}: {str(own).splitlines()[0]}"[:300]):
        return f"rank 0 raised {own!r}, and told {why!r}"
    return ""


def same(found, wanted):
    """What is wrong with results, "" if nothing is."""
    for rank in range(RANKS):
        result = found.get(rank)
        if isinstance(result, Exception):
            return f"rank {rank}: {result!r}"
        if isinstance(result, Tensor) and not torch.equal(result, wanted[rank]):
            return f"rank {rank}: {result} in place of {wanted[rank]}"
    return ""


def operand(public, name, result):
    """A good tensor for a parameter."""
    if name == "out":
        return torch.empty_like(result.detach())
    return public.good(0).get(name, torch.ones(2))


@pytest.fixture(scope="module")
def local():
    with weft.local_world(RANKS, timeout=50) as made:
        yield made


@pytest.mark.parametrize("name", CALLS)
def test_every_argument(local, name):
    public, wrong = CALLS[name], []
    results = outcomes(local, lambda rank: public.call(public.good(rank)))
    assert not same(results, results)

    def judged(words, judge, argument, value):
        def call(rank):
            own = {argument: value} if rank == 0 else {}
            return public.call(public.good(rank) | own)

        if problem := judge(outcomes(local, call)):
            wrong.append(f"{argument} {words}: {problem}")

    for argument in public.parameters:
        if argument not in NO_WORLD:
            like = operand(public, argument, results[0])
            for words, value in bad(public, argument, like).items():
                judged(words, refused, argument, value)
            if isinstance(like, Tensor) and like.dim() > 1:
                for words, make in SHAPES.items():
                    judged(
                        words,
                        lambda found: refused(found) if isinstance(found[0], Exception) else "",
                        argument,
                        make(like),
                    )
    for argument, words, make in layouts(public):
        made = make(operand(public, argument, results[0]))
        good = {argument: made.contiguous()}
        wanted = outcomes(
            local,
            lambda rank, good=good: public.call(public.good(rank) | (good if not rank else {})),
        )
        assert not same(wanted, wanted), f"{argument} {words}"
        judged(words, lambda found, wanted=wanted: same(found, wanted), argument, made)
    assert not wrong, f"{len(wrong)} of {name}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", METHODS)
def test_every_argument_of_a_method(local, name):
    good, *wrong = METHODS[name]
    for arguments, options in wrong:

        def call(rank, arguments=arguments, options=options):
            method = getattr(weft.init(), name)
            return method(*good) if rank else method(*arguments, **options)

        assert not refused(outcomes(local, call)), (arguments, options)


def test_no_method_is_forgotten():
    public = [
        name
        for name, each in vars(weft.World).items()
        if inspect.isfunction(each) and not name.startswith("_")
    ]
    assert sorted(public) == sorted([*METHODS, *OTHER_METHODS])


@pytest.mark.parametrize("name", ONE_SIDED)
def test_every_argument_of_a_one_sided_call(local, name):
    """No peer waits for it: the world stays open, and nothing is moved."""
    function, wrong = getattr(weft, name), []

    def run():
        world = weft.init()
        part, signals = world.empty(4, 2).zero_(), world.signals(2)
        good = {"dst": part, "src": part, "signals": signals, "index": 0, "peer": 1}
        good |= {"cmp": "==", "value": 0}
        good = {
            key: each for key, each in good.items() if key in inspect.signature(function).parameters
        }
        if world.rank == 0:
            for argument in inspect.signature(function).parameters:
                for words, value in bad_one_sided(argument).items():
                    try:
                        function(**good | {argument: value})
                    except (ValueError, TypeError):
                        pass
                    except Exception as error:
                        wrong.append(f"{argument} {words}: {error!r}")
                    else:
                        wrong.append(f"{argument} {words} is taken")
        weft.barrier()
        assert signals[:] == [0, 0]

    local.run(run)
    assert not wrong, "\n".join(wrong)


def test_no_function_is_forgotten():
    functions = [name for name in weft.__all__ if inspect.isfunction(getattr(weft, name))]
    collective = {public.function.__name__ for public in CALLS.values()}
    of_signals = [
        name for name in functions if "signals" in inspect.signature(getattr(weft, name)).parameters
    ]
    assert {*of_signals} <= {*ONE_SIDED}
    assert not collective & {*ONE_SIDED}
    assert len(collective) >= 19
