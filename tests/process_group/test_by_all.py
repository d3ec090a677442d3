"""Groups that all ranks make, or none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from support.ranks import group, start

import weft
from weft.process_group import by_all
from weft.process_group.by_all import NotMade, made_by_all

MADE = "made"


def attempt(errors, times=1):
    """What ranks get of attempts that fail by these errors, each in a thread."""
    store, ranks = dist.HashStore(), len(errors)

    def make(rank):
        def fail():
            if errors[rank] is None:
                return MADE
            raise errors[rank]

        try:
            return made_by_all(fail, store, rank, ranks, 60.0)
        except Exception as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return [[*pool.map(make, range(ranks))] for _ in range(times)]


@pytest.mark.parametrize(
    "lacking",
    [
        weft.SymmetricMemoryError("none left"),
        MemoryError("none left"),
        OSError(12, "none left"),
        RuntimeError("can't start new thread, none left"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_all_ranks_name_the_one_that_lacks_something(lacking):
    lost, late = weft.PeerLost("rank 1 died"), weft.PeerTimeout("rank 1 is late")
    for outcomes in attempt([lost, lacking, late], times=2):
        assert [type(error) for error in outcomes] == [NotMade] * 3
        assert len({str(error) for error in outcomes}) == 1
        assert "a group of 3 ranks cannot be made: rank 1: " in str(outcomes[0])
        assert "none left" in str(outcomes[0])


def test_the_words_of_others_are_printable():
    store, lacking = dist.HashStore(), MemoryError("none left")
    store.set("weft failed 1/verdict", b"lacks \x1b[2Jlost\xff\rweft: made")

    def fail():
        raise lacking

    with pytest.raises(NotMade) as raised:
        made_by_all(fail, store, 0, 1, 60.0)
    assert str(raised.value).endswith("\\x1b[2Jlost\N{REPLACEMENT CHARACTER}\\rweft: made")


def test_other_errors_are_raised_and_told_to_ranks_that_were_left_alone():
    lost = weft.PeerLost("rank 1 died")
    for outcomes in attempt([lost, ValueError("a wrong value"), MemoryError("none left")]):
        assert [type(error) for error in outcomes] == [weft.PeerLost, ValueError, MemoryError]
        assert "rank 1: ValueError: a wrong value; rank 2: MemoryError" in str(outcomes[0])


def test_nothing_is_agreed_without_the_word_of_a_rank(monkeypatch):
    """It has made the group, as far as it knows; it cannot use it without the others."""
    monkeypatch.setattr(by_all, "_SOON", 0.2)
    lost, memory = weft.PeerLost("rank 1 died"), MemoryError("none left")
    for outcomes in attempt([lost, memory, None]):
        assert outcomes == [lost, memory, MADE]


def fails_last(_):
    def fail(*_):
        raise MemoryError("none left")

    if dist.get_rank() == 1:
        by_all.confirm = fail
    dist.new_group(backend="weft")


def test_a_rank_that_fails_at_the_very_end_fails_all():
    for outcome in start(fails_last, 2, context=group):
        assert isinstance(outcome.error, NotMade), outcome
        assert "rank 1: MemoryError: none left" in str(outcome.error)


def test_a_rank_that_has_waited_for_its_whole_limit_hardly_waits_more():
    late = weft.PeerTimeout("rank 1 has not come")

    def fail():
        raise late

    with pytest.raises(weft.PeerTimeout) as raised:  # a wait for the vote of rank 1 would not end
        made_by_all(fail, dist.HashStore(), 0, 2, 1e9)
    assert raised.value is late
