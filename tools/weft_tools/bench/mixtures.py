"""The data of the benchmark of a mixture of experts: tokens, what they choose, and weights, which
every rank draws for all ranks; and the exact results.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from weft_tools.bench.settings.moe import MoeSettings
from weft_tools.bench.verification import RUNS, Check, compare

TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5, "float64": 1e-12}
"""The largest error of an element relative to the largest element: three products one after the
other, whose sums are rounded in different orders.
"""


def likely(settings: MoeSettings, ranks: int) -> Tensor:
    """How likely each expert is to be chosen, relative to the others. Those that are chosen often
    are on all ranks.
    """
    every = settings.experts * ranks
    if settings.routing == "zipf":
        by_rank = 1 / torch.arange(1.0, 1 + every, device="cpu")
        return by_rank.view(settings.experts, ranks).t().flatten()
    odds = torch.ones(every, device="cpu")
    if settings.routing == "empty":
        odds[1::2] = 0
    return odds


def choices(settings: MoeSettings, ranks: int) -> Tensor:
    """The experts of each token (ranks, tokens, top), all different."""
    odds, tokens = likely(settings, ranks), ranks * settings.tokens
    numbers = torch.Generator().manual_seed(settings.seed)
    others = settings.top - (settings.routing == "hot")
    if others != settings.top:
        odds[0] = 0
    chosen = torch.empty(tokens, 0, dtype=torch.int64, device="cpu")
    if others:
        chosen = odds.expand(tokens, -1).multinomial(others, generator=numbers)
    if others != settings.top:  # the first expert is everyone's
        chosen = torch.cat((chosen.new_zeros(tokens, 1), chosen), 1)
    return chosen.view(ranks, settings.tokens, settings.top)


class Mixture:
    """The operands of all ranks. The tokens of run 0, 1, … are a window onto longer random matrices
    that moves by one token, so each run has others; what a place in it chooses stays.
    """

    def __init__(self, settings: MoeSettings, ranks: int) -> None:
        self.settings, self.dtype = settings, getattr(torch, settings.dtype)
        numbers = torch.Generator().manual_seed(settings.seed + 1)
        every, width, inner = settings.experts * ranks, settings.width, settings.inner

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=numbers, device="cpu")

        self.stream = random(ranks, settings.tokens + RUNS, width).to(self.dtype)
        self.chosen = choices(settings, ranks)
        self.scores = random(ranks, settings.tokens, settings.top).softmax(-1)
        self.gate_up = (random(every, 2 * inner, width) * width**-0.5).to(self.dtype)
        self.down = (random(every, width, inner) * inner**-0.5).to(self.dtype)

    def tokens(self, rank: int, run: int) -> Tensor:
        """A rank's tokens in this run."""
        return self.stream[rank, run : run + self.settings.tokens]

    def chosen_of_ranks(self) -> list[int]:
        """How often the experts of each rank are chosen, by tokens of all ranks, or of rank 0 if
        all ranks have these.
        """
        chosen = self.chosen[:1] if self.settings.replicated else self.chosen
        counts = chosen.flatten().bincount(minlength=len(self.gate_up))
        return [int(of.sum()) for of in counts.split(self.settings.experts)]

    def check(self, y: Tensor, rank: int, run: int, experts: slice = slice(None)) -> Check:
        """Compare what `experts`, by default all, contribute to the layer's result for a rank's
        tokens with the exact contribution.
        """
        return self.compared(y, self.exact(rank, run, experts))

    def exact(self, rank: int, run: int, experts: slice) -> Tensor:
        """What `experts` contribute to the layer's result for a rank's tokens, in float64."""
        x, chosen = self.tokens(rank, run).double(), self.chosen[rank].flatten()
        scores = self.scores[rank].double().flatten()
        order = chosen.argsort(stable=True)
        ends = accumulate(chosen.bincount(minlength=len(self.gate_up)).tolist(), initial=0)
        sums = torch.zeros_like(x)
        for expert, (start, stop) in [*enumerate(pairwise(ends))][experts]:
            at = order[start:stop]
            token = at // self.settings.top
            result = self.expert(x[token], expert) * scores[at].unsqueeze(1)
            sums.index_add_(0, token, result)
        return sums

    def expert(self, rows: Tensor, number: int) -> Tensor:
        """An expert's results in float64."""
        gate, up = (rows @ self.gate_up[number].double().t()).chunk(2, 1)
        between = F.silu(gate) * up
        result: Tensor = between @ self.down[number].double().t()
        return result

    def compared(self, actual: Tensor, exact: Tensor) -> Check:
        """Compare within the tolerance of the dtype."""
        if not exact.numel():
            return Check(0)
        return compare(actual, exact, TOLERANCE[self.settings.dtype] * exact.abs().max())
