"""The options of the fused operators, a record for each: what its public function takes beside
operands, `world` and `timeout`.

A call's record is the part of its key in the call cache that says what is asked for; the fields are
arguments of its operator of torch (`weft.ops.options.schema`), and what `explain` accepts. A record
equals the tuple of its values, which the public function makes first, since a tuple is made in a
quarter of the time.

`keep`: the rows that ranks exchange are a result, too. `own_bias`: each rank adds its bias to its
product, so all are summed. Split sizes are None (equal parts), those that the caller gives, or all
ranks', once these have been `Exchanged`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from weft.schedules.exchanges import Counts


class Exchanged(NamedTuple):
    """The parts that every rank sends, and those that this rank receives; `again`: whether ranks
    have lately exchanged the same.
    """

    counts: Counts
    received: Sequence[int]
    again: bool


Sizes = Sequence[int] | Exchanged | None


class AllGatherMatmul(NamedTuple):
    """The options of `weft.all_gather_matmul`."""

    dim: int = 0
    out_dtype: torch.dtype | None = None
    keep: bool = False
    shard_rows: Sequence[int] | None = None
    algorithm: str = "auto"
    chunk_rows: int | None = None
    order: str | None = None
    compress: str | None = None


class MatmulReduceScatter(NamedTuple):
    """The options of `weft.matmul_reduce_scatter`."""

    op: str = "sum"
    dim: int = 0
    out_dtype: torch.dtype | None = None
    shard_rows: Sequence[int] | None = None
    algorithm: str = "auto"
    chunk_rows: int | None = None
    order: str | None = None
    compress: str | None = None
    own_bias: bool = False


class MatmulAllReduce(NamedTuple):
    """The options of `weft.matmul_all_reduce`."""

    op: str = "sum"
    out_dtype: torch.dtype | None = None
    algorithm: str = "auto"
    chunk_rows: int | None = None
    own_bias: bool = False


class AllGatherMatmulReduceScatter(NamedTuple):
    """The options of `weft.all_gather_matmul_reduce_scatter`."""

    out_dtype: torch.dtype | None = None
    algorithm: str = "auto"
    chunk_rows: int | None = None
    input_split_sizes: Sizes = None


class AllToAllMatmul(NamedTuple):
    """The options of `weft.all_to_all_matmul`."""

    out_dtype: torch.dtype | None = None
    algorithm: str = "auto"
    chunk_rows: int | None = None
    input_split_sizes: Sizes = None
    output_split_sizes: Sequence[int] | None = None
    experts_of_ranks: Sequence[int] | None = None
    keep: bool = False


class MatmulAllToAll(NamedTuple):
    """The options of `weft.matmul_all_to_all`."""

    out_dtype: torch.dtype | None = None
    algorithm: str = "auto"
    chunk_rows: int | None = None
    input_split_sizes: Sizes = None
    output_split_sizes: Sequence[int] | None = None
    experts_of_ranks: Sequence[int] | None = None


class AllToAllMatmulAllToAll(NamedTuple):
    """The options of `weft.all_to_all_matmul_all_to_all`."""

    out_dtype: torch.dtype | None = None
    algorithm: str = "auto"
    chunk_rows: int | None = None
    input_split_sizes: Sizes = None
    experts_of_ranks: Sequence[int] | None = None
