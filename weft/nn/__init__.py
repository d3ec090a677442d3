"""Linear layers sharded over ranks, and drop-in forms of torch's tensor-parallel styles.

    from torch.distributed.tensor.parallel import parallelize_module

    parallelize_module(model, mesh, {"mlp.up": weft.nn.ColwiseParallel(), "mlp.down":
    weft.nn.RowwiseParallel()}) print(weft.nn.explain(model))  # what each of these layers runs

The styles take the arguments of torch's, leave the same DTensor parameters and state dict, and
compute the same. Where weft has an operator for the layouts, it replaces torch's product and
collective; elsewhere torch's own style is applied, and `explain` says so. Layers that take the same
sharded input, such as those of queries, keys and values, can share its gather:
`SharedColwiseParallel`.

Weights are packed (`weft.pack`) at the first call in eval mode without gradients, and unpacked when
they are trained or changed.
"""

from weft.nn.layers import ColumnParallelLinear, RowParallelLinear, explain
from weft.nn.styles import ColwiseParallel, RowwiseParallel, SequenceParallel, SharedColwiseParallel

__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "SharedColwiseParallel",
    "explain",
]
