"""Which way of multiplying is taken for the fastest, with a clock of the test's own."""

import math
from types import SimpleNamespace

import pytest

from weft import matmul


@pytest.fixture
def clock(monkeypatch):
    """A clock that only works move; the test calls it with their seconds."""
    now = [0.0]
    monkeypatch.setattr(matmul, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def taking(seconds):
        runs = iter(seconds)

        def work():
            now[0] += next(runs, seconds[-1])

        return work

    return taking


def test_what_is_made_at_the_first_product_does_not_count(clock):
    ways = {"mm": clock([2.0]), "onednn": clock([500.0, 3.0, 1.0, 3.0])}
    assert matmul._times(ways) == {"mm": 2.0, "onednn": 1.0}


def test_what_cannot_run_is_never_the_fastest(clock):
    def fails():
        raise RuntimeError("no kernel for this")

    assert matmul._times({"mm": clock([2.0]), "onednn": fails}) == {"mm": 2.0, "onednn": math.inf}


def test_another_way_must_be_worth_it():
    seconds = {1: {"mm": 1.0, "onednn": 0.99}, 8: {"mm": 1.0, "onednn": 0.5}, 64: {"mm": 1.0}}
    assert matmul._fastest(seconds, packed=True) == {"1": "mm", "8": "onednn", "64": "mm"}
    assert matmul._fastest(seconds, packed=False) == {"1": "mm", "8": "onednn", "64": "mm"}
