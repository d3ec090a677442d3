"""Linear layers sharded over ranks, and drop-in replacements of torch's tensor-parallel styles.

    from torch.distributed.tensor.parallel import parallelize_module

    styles = {"mlp.up": weft.nn.ColwiseParallel(), "mlp.down": weft.nn.RowwiseParallel()}
    parallelize_module(model, mesh, styles)
    print(weft.nn.explain(model))  # the operators that each of these layers runs

The styles take the same arguments as torch's, leave the same DTensor parameters and state dict, and
compute the same results. If weft has an operator for the layouts, it replaces torch's product and
collective; otherwise torch's own style is applied, and `explain` shows the reason. Layers that take
the same sharded input, such as the projections to queries, keys and values, can share its gather:
`SharedColwiseParallel`.

The experts of a mixture are on several ranks by the style `ExpertParallel`, or as the layers `MoE`
and `ParallelExperts`.

A layer multiplies by what its weight holds at the time of the call. The owner of a model whose
weights will not change can promise so, by `freeze`, and few rows are multiplied faster.
"""

from weft.nn.expert_parallel import ExpertParallel
from weft.nn.experts import MoE, ParallelExperts
from weft.nn.freeze import freeze
from weft.nn.layers import ColumnParallelLinear, RowParallelLinear, explain
from weft.nn.styles import ColwiseParallel, RowwiseParallel, SequenceParallel, SharedColwiseParallel

__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "ExpertParallel",
    "MoE",
    "ParallelExperts",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "SharedColwiseParallel",
    "explain",
    "freeze",
]
