"""A rank's part of a layer of experts, by a kernel of linear experts whose sums are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.vllm.local_experts import ExpertKernel, local_sums

HIDDEN = 32


class Experts:
    """A kernel of experts that each multiply by a matrix of small whole numbers: sums are exact."""

    def __init__(self, matrices: Tensor) -> None:
        self.matrices = matrices
        self.rows = 0

    def __call__(
        self, *, output: Tensor, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> None:
        assert topk_ids.dtype == torch.int32
        assert output.is_contiguous()
        assert hidden_states.is_contiguous()
        assert topk_ids.is_contiguous()
        assert topk_weights.is_contiguous()
        assert int(topk_ids.min()) >= 0
        assert int(topk_ids.max()) < len(self.matrices)
        products = torch.einsum("th,tkho->tko", hidden_states.float(), self.matrices[topk_ids])
        output.copy_((products * topk_weights.unsqueeze(2)).sum(1))
        self.rows += topk_ids.numel()


def maps(owners: Sequence[int], ranks: int) -> list[Tensor]:
    """For each rank, the local number of each expert, -1 for those of other ranks."""
    owner = torch.tensor(owners)
    local = [(owner == rank).cumsum(0).to(torch.int32) - 1 for rank in range(ranks)]
    return [torch.where(owner == rank, local[rank], -1) for rank in range(ranks)]


def whole_numbers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=generator).float()


@settings(max_examples=60)
@given(st.data())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_ranks_parts_add_up_to_the_layer(dtype: torch.dtype, data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 12), label="experts")
    chosen = data.draw(st.integers(1, experts), label="chosen")
    ranks = data.draw(st.integers(1, 5), label="ranks")
    tokens = data.draw(st.integers(1, 20), label="tokens")
    owners = data.draw(
        st.lists(st.integers(0, ranks - 1), min_size=experts, max_size=experts), label="owners"
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32), label="seed"))
    matrices = whole_numbers(generator, experts, HIDDEN, 4)
    hidden = whole_numbers(generator, tokens, HIDDEN).to(dtype)
    weights = torch.randint(1, 3, (tokens, chosen), generator=generator) / 2
    ids = torch.rand(tokens, experts, generator=generator).topk(chosen).indices.to(torch.int32)

    whole = torch.empty(tokens, 4)
    Experts(matrices)(output=whole, hidden_states=hidden, topk_weights=weights, topk_ids=ids)
    parts, rows = torch.zeros(tokens, 4), 0
    for rank, expert_map in enumerate(maps(owners, ranks)):
        kernel = Experts(matrices[torch.tensor(owners) == rank])
        part = torch.full((tokens, 4), float("nan"), dtype=dtype)
        local_sums(kernel, part, hidden, weights, ids, expert_map)
        parts += part.float()
        rows += kernel.rows
    assert rows == ids.numel(), "every choice is computed by one rank"
    # a token's row of K products has magnitude 8·HIDDEN·K at most; one rounding a choice and a rank
    rounding = torch.finfo(dtype).eps / 2
    assert torch.allclose(parts, whole, rtol=0, atol=rounding * 4 * HIDDEN * (chosen + ranks))


def test_a_rank_without_a_token_computes_nothing() -> None:
    def never(**tensors: Tensor) -> None:
        raise AssertionError("the kernel ran without rows")

    kernel: ExpertKernel = never
    part = torch.full((3, HIDDEN), float("nan"))
    ids = torch.zeros(3, 1, dtype=torch.int32)
    nowhere = torch.tensor([-1, 0], dtype=torch.int32)
    local_sums(kernel, part, torch.ones(3, HIDDEN), torch.ones(3, 1), ids, nowhere)
    assert torch.equal(part, torch.zeros(3, HIDDEN))


def test_rows_of_a_token_are_added_in_float32() -> None:
    def kernel(
        *, output: Tensor, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> None:
        output.copy_(topk_weights.expand_as(output))

    part = torch.empty(1, HIDDEN, dtype=torch.bfloat16)
    weights = torch.tensor([[256.0, 1.0, 1.0]])
    ids = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    local_sums(kernel, part, torch.ones(1, HIDDEN), weights, ids, ids.squeeze(0))
    assert torch.equal(part, torch.full_like(part, 258.0))  # 256 + 1 is 256 in bfloat16
