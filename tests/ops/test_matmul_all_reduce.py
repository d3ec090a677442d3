"""Matmul + all-reduce on real ranks, against float64 on one process."""

from __future__ import annotations

import pytest
import torch
from support.checks.matmul_all_reduce import every_algorithm, shapes_and_options
from support.products import assert_sum
from support.ranks import on_ranks

import weft
from weft.engines.recording import record
from weft.plan import Copy
from weft.schedules.matmul_all_reduce import ALGORITHMS


@pytest.mark.data
@pytest.mark.parametrize(("ranks", "rows"), [(2, 40), (2, 1), (3, 7), (4, 2)])
def test_every_algorithm_and_dtype(ranks, rows):
    on_ranks(every_algorithm, ranks, rows)


@pytest.mark.parametrize(("ranks", "rows"), [(1, 5), (2, 0)])
def test_without_elements_to_sum(ranks, rows):
    on_ranks(every_algorithm, ranks, rows)


@pytest.mark.data
def test_shapes_and_options():
    on_ranks(shapes_and_options, 2)


def back_to_back(world, algorithm):
    """Hundreds of calls without a barrier, with different sizes in between; every element of every
    result is checked.
    """
    generator = torch.Generator().manual_seed(5)
    for call in range(150):
        rows = [6, 1, 33][call % 3]
        everyone = [
            torch.randint(0, 2, (rows, 16), generator=generator).float() for _ in range(world.ranks)
        ]
        weights = [
            torch.randint(0, 2, (16, 8), generator=generator).float() for _ in range(world.ranks)
        ]
        chosen = ALGORITHMS[call % len(ALGORITHMS)] if algorithm == "mixed" else algorithm
        y = weft.matmul_all_reduce(
            everyone[world.rank], weights[world.rank], algorithm=chosen, chunk_rows=4
        )
        assert torch.equal(y, sum(a @ b for a, b in zip(everyone, weights, strict=True))), (
            f"call {call}"
        )


@pytest.mark.data
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "mixed"])
def test_calls_back_to_back_without_barriers(algorithm):
    on_ranks(back_to_back, 3, algorithm)


def emulated(world):
    a, b = torch.randn(16, 4), torch.randn(4, 4)
    world.emulate_link(0.01, 50)
    with pytest.raises(ValueError, match="put moves no rows"):
        weft.matmul_all_reduce(a, b, algorithm="put")
    for algorithm in (name for name in ALGORITHMS if name != "put"):
        with record(world) as recording:
            assert_sum(
                weft.matmul_all_reduce(a, b, algorithm=algorithm, chunk_rows=3), a, b, lambda x: x
            )
        spans = recording.gather(algorithm)
        assert spans is None or any(
            span.kind == "copy" and span.lane == "comm" for span in spans.spans
        ), "rows pass the link"


@pytest.mark.data
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_emulated_link(ranks):
    on_ranks(emulated, ranks)


def into_symmetric_memory(world):
    """Peers put their sums to a symmetric result, in calls back to back, with the same bits as in
    an ordinary one; what is read of it between calls is never a later call's.
    """
    out = world.empty(24, 8)
    for call in range(40):
        generator = torch.Generator().manual_seed(call * world.ranks + world.rank)
        a, b = (torch.randn(*shape, generator=generator) for shape in ((24, 16), (16, 8)))
        plain = weft.matmul_all_reduce(a, b, algorithm="push", chunk_rows=4)
        with record(world) as recording:
            found = weft.matmul_all_reduce(a, b, algorithm="push", chunk_rows=4, out=out)
        assert found is out
        assert torch.equal(out, plain)
        ((plan, _, _),) = recording.executions
        copied = {i.dst.buffer for _, i in plan.instructions() if isinstance(i, Copy)}
        assert copied == {"inbox", "out"}, "no copies from a workspace"


@pytest.mark.data
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_put_into_symmetric_memory(ranks):
    on_ranks(into_symmetric_memory, ranks)


def explained(world):
    a, b = torch.randn(2048, 256), torch.randn(256, 256)
    assert f"ranks: {'one_shot' if world.ranks == 2 else 'two_shot'}" in weft.explain(
        a, b, operator="matmul_all_reduce"
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_explain(ranks):
    on_ranks(explained, ranks)


def bad_arguments(world):
    a, b = torch.randn(4, 6), torch.randn(6, 5)
    bad = [
        (ValueError, "op must be sum or avg; got 'max'", (a, b), {"op": "max"}),
        (ValueError, "a has 6 columns and b 5 rows", (a, b.t())),
        (TypeError, "b must be a tensor; got list", (a, [b])),
        (ValueError, "at least 2 dimensions", (a[0], b)),
        (ValueError, "there is no algorithm 'pull'", (a, b), {"algorithm": "pull"}),
        (ValueError, r"out must have shape \(4, 5\)", (a, b), {"out": torch.empty(2, 5)}),
        (TypeError, "out_dtype must be float32", (a, b), {"out_dtype": torch.float16}),
    ]
    for kind, message, arguments, *options in bad:
        with pytest.raises(kind, match=message):
            weft.matmul_all_reduce(*arguments, **(options[0] if options else {}))
    # nothing was sent: the world stays usable
    assert_sum(weft.matmul_all_reduce(a, b), a, b, lambda x: x)


def test_bad_arguments_are_refused_before_anything_is_sent():
    on_ranks(bad_arguments, 2)
