"""The experts of one rank as an operator: each token's weighted sum of the results of its experts,
with gradients.
"""

from __future__ import annotations

from torch import Tensor

from weft.experts.gradients import gradients
from weft.experts.layer import Layer
from weft.experts.recorded import LayerOperator
from weft.experts.weights import Experts


def expert_sums(x: Tensor, chosen: Tensor, scores: Tensor, experts: Experts) -> Tensor:
    """Each token's weighted sum of the results of its experts, as far as `experts` has them.

    Choices of other experts count as none: with each rank's experts the results of all ranks add
    up to that of the layer, as `moe` does. Nothing is sent. Products are summed in float32 (float64
    for float64), and a token's results in the order of the experts, rounded once. By weft's own
    product the bits of a token depend on no other token.

    There are gradients of x, of scores and of the experts' weights, of this rank's contribution to
    the layer; an expert without a token gets zeros. There are no second derivatives.

    Args:
        x: the tokens (T, K), of the dtype of the experts; any strides, as of the next two.
        chosen: the numbers of each token's experts (T, top), int64 or int32.
        scores: the factors of their results (T, top), of any floating dtype; they are multiplied in
            float32 (float64 for float64).
        experts: `Experts`, or packed ones (`pack_experts`), which are faster without gradients.

    Returns:
        (T, K) of x's dtype.

    Raises `ValueError` or `TypeError` for operands that do not fit.

    Examples:
        >>> experts = weft.Experts(torch.ones(2, 2, 3), torch.ones(2, 3, 1), activation="relu")
        >>> x, chosen, scores = torch.ones(2, 3), torch.tensor([[0, 1], [1, 2]]), torch.ones(2, 2)
        >>> weft.expert_sums(x, chosen, scores, experts)  # there is no expert 2
        tensor([[18., 18., 18.],
                [ 9.,  9.,  9.]])
    """
    layer = Layer(x, chosen, scores, experts)
    layer.check()
    return OPERATOR(layer) if layer.recorded else _sums(layer)


def _sums(layer: Layer) -> Tensor:
    """The sums of checked operands, without gradients."""
    x, chosen, scores, experts = layer.ready()
    experts.check_unchanged()
    out = x.new_empty(x.shape)
    experts.sums(x, chosen, scores, out)
    return out


OPERATOR = LayerOperator(
    "expert_sums", _sums, lambda layer, grad, of_tokens: gradients(layer, grad)
)
