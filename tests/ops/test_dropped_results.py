"""A warning where a program drops the result of a collective, as if it worked in place."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch

import weft
from weft.ops import dropped


def drops(x):
    for _ in range(3):
        weft.all_reduce(x)  # dropped
    weft.all_gather(x, shard_rows=[4, 4])  # dropped
    weft.all_to_all(x, input_split_sizes=[1, 3])  # dropped
    weft.reduce_scatter(
        x,  # dropped
        op="max",
    )


def keeps(x):
    y = x.clone()
    weft.all_reduce(y, out=y)
    weft.broadcast(y, 0)
    weft.barrier()
    weft.all_reduce(x).sum()
    print(weft.all_gather(x), file=None) if y is None else weft.all_gather(x, dim=0)[:0]
    _ = weft.reduce_scatter(x)
    if weft.all_reduce(x[:1]):
        weft.all_gather_matmul(x.view(1, 4), torch.ones(4, 1))
    return weft.all_to_all(x)


def warned(function):
    """The warnings of two ranks, as (line, text)."""

    def run():
        function(torch.arange(4.0))

    with warnings.catch_warnings(record=True) as found, weft.local_world(2) as local:
        warnings.simplefilter("default")
        local.run(run)
    assert all(each.category is RuntimeWarning for each in found)
    return [(each.filename, each.lineno, str(each.message)) for each in found]


def test_each_line_that_drops_a_result_warns_once():
    with open(__file__) as file:
        lines = [n for n, line in enumerate(file, 1) if line.endswith("# dropped\n")]
    found = warned(drops)
    # the call of several lines is at its first in some versions of Python
    assert {file for file, _, _ in found} == {__file__}
    assert [line for _, line, _ in sorted(found)][:3] == lines[:3]
    assert len(found) == 4
    assert {text.split()[3] for _, _, text in found} == {
        "weft.all_reduce",
        "weft.all_gather",
        "weft.all_to_all",
        "weft.reduce_scatter",
    }
    assert "pass out=, as in weft.all_reduce(x, out=x)" in found[0][2]


def test_a_result_that_is_used_does_not_warn():
    assert warned(keeps) == []


def test_repeated_calls_do_not_look(monkeypatch):
    looks = []
    monkeypatch.setattr("weft.ops.collective.warn_if_dropped", lambda: looks.append(1))

    def repeat():
        x = torch.ones(3)
        for _ in range(100):
            weft.all_reduce(x)

    with weft.local_world(1) as local:
        local.run(repeat)
    assert len(looks) == 1


@pytest.mark.parametrize("traced", [False, True])
def test_the_bytecode_of_calls_of_all_kinds(traced):
    found = []

    def call(*args, **options):
        found.append(dropped._discards(sys._getframe(1)))
        return 1

    def dropping():
        call()
        call(1, b=2)
        call(*[1])
        call(a=1)
        "text".join(())

    def using():
        x = call(1, b=2)
        assert [call(*[x])]
        return call(a=1)

    before = sys.gettrace()
    if traced:
        sys.settrace(lambda *_: lambda *_: None)
    try:
        for _ in range(20):  # the interpreter specialises what runs often
            dropping()
        assert all(found)
        found.clear()
        for _ in range(20):
            using()
        assert not any(found)
    finally:
        sys.settrace(before)
