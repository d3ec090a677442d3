"""What operators share that sum products over ranks: dtypes, the bias that is added once, and the execution."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from weft.engines import engine
from weft.engines.engine import Geometry
from weft.engines.weights import Weight
from weft.plan import Plan
from weft.schedules.common import Hosts
from weft.schedules.matmul_reduce_scatter import product_buffer
from weft.schedules.workload import Variant
from weft.world import World


class Sums(NamedTuple):
    """What is planned: by whom, for which rows of each rank, in which way, and ``sum`` or ``avg``."""

    planner: Callable[..., Plan]
    rows: tuple[int, ...]
    way: Variant
    op: str


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums of this dtype are accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_dtype(dtype: torch.dtype, out_dtype: torch.dtype) -> torch.dtype:
    """What products of `dtype` are kept in until they are summed: the accumulator's dtype where it costs no speed."""
    return torch.bfloat16 if dtype == out_dtype == torch.bfloat16 else accumulator(dtype)


def add_up(work: Sums, x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor, world: World, timeout: float | None) -> None:
    """Execute `work`: multiply the matrix `x` (rows, K) by `weight` (K, N), and sum over ranks into `out` (rows kept, N).

    Rank 0 adds the bias to its product, so that it is added once.
    """
    tensors = {"a": x, "out": out}
    wide, product = accumulator(x.dtype), product_dtype(x.dtype, out.dtype)
    remote_reads, hosts = world.remote_reads, world.topology
    key = work, remote_reads, Geometry.of(x, world), Geometry.of(out, world)
    dtypes = {"partial": product, "inbox": product, "running": wide, "summed": out.dtype}
    program = engine(world).program(key, _plan(work, remote_reads, hosts), tensors, dtypes)
    into = product_buffer(work.way.algorithm, world.ranks)
    added = {}
    if bias is not None and world.rank == 0:
        added[into] = bias.to(wide) * world.ranks if work.op == "avg" else bias
    program.run(tensors, {into: weight}, added, timeout)


@lru_cache(maxsize=1024)
def _plan(work: Sums, remote_reads: bool, hosts: Hosts | None) -> Plan:
    order = {"order": work.way.order} if work.way.order != "peer" else {}
    options = {"op": work.op, "remote_reads": remote_reads, "hosts": hosts, **order}
    return work.planner(work.rows, work.way.algorithm, chunk_rows=work.way.chunk_rows, **options)
