"""Matmul + reduce-scatter or all-reduce of two kernels: products put where they are added up, and the sums in rank order."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels import symmetric
from weft.kernels.all_gather_matmul import Blocks, blocks_for, check
from weft.kernels.matmul_put import matmul_put_kernel
from weft.kernels.sum_in_rank_order import sum_in_rank_order_kernel
from weft.kernels.symmetric import POLLS
from weft.kernels.tiles import tiles
from weft.schedules.common import after, offsets
from weft.world import World

_BLOCK = 2048  # elements that a program adds up at once


class MatmulSums:
    """``sum over ranks of x @ weight`` for certain tensors; made, and called, collectively.

    `x` (rows, K) and `weight` (K, N) have rows that begin at multiples of 16 bytes. With `rows`, the rows that each rank keeps,
    `out` is this rank's part (rows[rank], N): a reduce-scatter. Without it `out` is everything (rows, N), the same bits on all
    ranks: an all-reduce. Products travel in float32, or in bfloat16 where inputs and result are that. A call puts both kernels, the
    first one of `programs` programs, on the current stream and returns at once; `check` raises `PeerTimeout` if a wait ran out of
    `polls`. Calls may be captured in a CUDA graph.
    """

    def __init__(
        self,
        world: World,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        rows: list[int] | None = None,
        *,
        average: bool = False,
        programs: int = 64,
        blocks: Blocks | None = None,
        polls: int = POLLS,
    ) -> None:
        device, ranks, columns = x.device, world.ranks, weight.shape[1]
        symmetric.check_grid(programs, world.sharing, device)
        check(x, weight, out)
        kept = rows or [len(x)] * ranks
        fitting = len(kept) == ranks and out.is_contiguous() and out.shape == (kept[world.rank], columns)
        if not fitting or sum(kept) != len(x) * (1 if rows else ranks):
            raise ValueError(f"of {len(x)} rows {kept} are kept, in a contiguous tensor; got out {tuple(out.shape)}")
        dtype = torch.bfloat16 if x.dtype == out.dtype == torch.bfloat16 else torch.float32
        blocks = blocks or blocks_for(device)._replace(n=256 if dtype == torch.bfloat16 and not torch.version.hip else 128)
        self.world, self.out = world, out
        self.inbox = world.empty(ranks, max(kept), columns, dtype=dtype)
        self.counters = symmetric.zeroed(world, 2 * ranks)
        self.calls = torch.zeros(1, dtype=torch.int64, device=device)
        self.ledger = symmetric.ledger(device)
        made = _tiles(world, len(x), rows, triton.cdiv(columns, blocks.n), blocks.m)
        totals = [sum(owner in (-1, peer) for _, _, _, owner, _ in made) for peer in range(ranks)]
        transposed = weight.stride(1) != 1
        wide = [blocks.n, blocks.k] if transposed else [blocks.k, blocks.n]
        self.grid = (min(programs, len(made)),)
        self.put: tuple[Any, ...] = (
            TensorDescriptor.from_tensor(x, [blocks.m, blocks.k]),
            TensorDescriptor.from_tensor(weight.t() if transposed else weight, wide),
            self.inbox,
            symmetric.bases(world, self.inbox),
            torch.tensor(made, dtype=torch.int32).to(device),
            torch.tensor(totals, dtype=torch.int32).to(device),
            len(made),
            self.counters,
            symmetric.bases(world, self.counters),
            self.calls,
            torch.zeros(ranks, dtype=torch.int32, device=device),
            self.ledger,
            world.rank,
            polls,
            columns,
        )
        self.options: dict[str, Any] = {
            "RANKS": ranks,
            "K": x.shape[1],
            "BLOCK_M": blocks.m,
            "BLOCK_N": blocks.n,
            "BLOCK_K": blocks.k,
            "TRANSPOSED": transposed,
            "num_warps": blocks.warps,
            "num_stages": blocks.stages,
        }
        self.sum = out.numel(), max(kept) * columns, columns, 1 / ranks if average else 1.0, polls
        self.sum_grid = (max(1, min(programs, triton.cdiv(out.numel(), _BLOCK))),)

    def __call__(self, bias: Tensor | None = None) -> None:
        """Multiply and add up; `bias` (N,) is added once."""
        put: Any = matmul_put_kernel
        add: Any = sum_in_rank_order_kernel
        put[self.grid](*self.put, **self.options)
        if not self.out.numel():
            self.calls.add_(1)
            return
        addend, counted = self.out if bias is None else bias, (self.counters, self.calls, self.ledger)
        options = {"RANKS": self.world.ranks, "BLOCK": _BLOCK, "BIAS": bias is not None}
        add[self.sum_grid](self.inbox, addend, self.out, *counted, *self.sum, **options)
        self.calls.add_(1)

    def check(self) -> None:
        """Raise `PeerTimeout` if a wait of a call that the device has finished ran out of time."""
        symmetric.check(self.ledger, f"a matmul_sums of rank {self.world.rank}")


def _tiles(world: World, total: int, rows: list[int] | None, columns: int, block_m: int) -> list[tuple[int, int, int, int, int]]:
    """``(first row, last + 1, column, owner, row in the owner's inbox)``: the peers' in rotated order, then the own ones.

    If all ranks own everything, -1 is the owner, and each rank begins with other rows, so that they do not all put to one place.
    """
    if rows is None:
        made = [*tiles(0, total, columns, block_m)]
        turn = len(made) * world.rank // world.ranks
        return [(first, last, column, -1, world.rank * total + first) for first, last, column in made[turn:] + made[:turn]]
    starts = offsets(rows)
    return [
        (first, last, column, owner, world.rank * max(rows) + first - starts[owner])
        for owner in [*after(world.rank, world.ranks), world.rank]
        for first, last, column in tiles(starts[owner], starts[owner] + rows[owner], columns, block_m)
    ]
