"""The reference engine of a world: the checks of the host engine, with some dtypes, since a call of
this engine takes milliseconds and elements of all dtypes are torch's.
"""

import pytest
import torch
from support.checks import all_gather_matmul, collectives, matmul_all_reduce, matmul_reduce_scatter
from support.ranks import on_ranks, reference_world

import weft
from weft.engines import engine
from weft.engines.replicated import ReferenceEngine


def by_reference(world, *checks):
    assert isinstance(engine(world), ReferenceEngine)
    for check, *args in checks:
        torch.manual_seed(world.rank)
        check(world, *args)


def test_two_ranks():
    on_ranks(
        by_reference,
        2,
        (all_gather_matmul.shapes_and_options,),
        (matmul_reduce_scatter.shapes_and_options,),
        (matmul_all_reduce.shapes_and_options,),
        (collectives.moving, False, [torch.bool, torch.bfloat16, torch.int64]),
        (collectives.reducing, True, [torch.bfloat16, torch.int64]),
        context=reference_world,
    )


@pytest.mark.slow
def test_three_ranks_with_uneven_shards():
    rows, dtypes = [5, 0, 9], [torch.float32, torch.bfloat16]
    on_ranks(
        by_reference,
        3,
        (all_gather_matmul.every_algorithm, rows, 19, 11, True, dtypes),
        (matmul_reduce_scatter.every_algorithm, rows, 19, 11, dtypes),
        (matmul_all_reduce.every_algorithm, 7, dtypes),
        (collectives.uneven,),
        context=reference_world,
    )


def another_call(world):
    with pytest.raises(weft.MismatchError, match="do not make the same call"):
        weft.all_reduce(torch.ones(3 + world.rank))
    with pytest.raises(weft.WeftError, match="closed"):
        weft.barrier()


def test_another_call_is_named():
    on_ranks(another_call, 2, context=reference_world)
