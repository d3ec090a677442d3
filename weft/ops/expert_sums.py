"""The experts of one rank as an operator: each token's weighted sum of the results of those that it
chose, with gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.checks import check_tensor, in_modes, name
from weft.kernels.expert_methods import ACTIVATIONS, routed
from weft.kernels.experts import Experts
from weft.ops import arguments
from weft.ops.dims import adjacent


def expert_sums(x: Tensor, chosen: Tensor, scores: Tensor, experts: Experts) -> Tensor:
    """Each token's weighted sum of the results of its experts, as far as `experts` has them.

    Choices of other experts count as none: with each rank's experts the results of all ranks add
    up to that of the layer, as `moe` does. Nothing is sent. Products are summed in float32 (float64
    for float64), and a token's results in the order of the experts, rounded once. By weft's own
    product the bits of a token depend on no other token.

    Gradients are those of x, of scores, and of both weights of the experts, of whose parts of the
    layer they consist; an expert without a token gets zeros. There are no second derivatives.

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
    check_routing(x, chosen, scores, experts)
    if recorded(x, scores, experts):
        result: Tensor = torch.ops.weft.expert_sums(
            x, chosen, scores, experts.gate_up, experts.down, experts.first, experts.activation
        )
        return result
    return local_sums(x, chosen, scores, experts)


def local_sums(x: Tensor, chosen: Tensor, scores: Tensor, experts: Experts) -> Tensor:
    """The sums of checked operands, without gradients."""
    experts.check_unchanged()
    out = x.new_empty(x.shape)
    experts.sums(adjacent(x), adjacent(chosen), factors(scores, x.dtype), out)
    return out


def recorded(x: Tensor, scores: Tensor, experts: Experts) -> bool:
    """Whether torch records the call, for gradients or by the compiler."""
    if not (torch.compiler.is_compiling() or torch.is_grad_enabled() or in_modes()):
        return False
    return arguments.recorded((x, scores, experts.gate_up, experts.down))


def factors(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Scores as products by experts of this dtype take them."""
    return adjacent(scores.to(torch.float64 if dtype == torch.float64 else torch.float32))


def check_routing(x: Tensor, chosen: Tensor, scores: Tensor, experts: Experts) -> None:
    """Raise `ValueError` or `TypeError` unless the operands fit."""
    if not isinstance(experts, Experts):
        raise TypeError(
            f"experts must be weft.Experts or weft.pack_experts(…); got {type(experts).__name__}"
        )
    if not torch.compiler.is_compiling():
        for tensor, argument in ((x, "x"), (chosen, "chosen"), (scores, "scores")):
            if _ordinary(tensor):
                continue
            check_tensor(tensor, argument, traced=True)
            if tensor.device.type != "cpu":
                raise ValueError(f"{argument} must be on the CPU; got {tensor.device}")
    width = experts.shape.width
    if x.dim() != 2 or x.shape[1] != width:
        raise ValueError(
            f"x must be tokens (T, {width}) for {experts}; got {tuple(x.shape)}: flatten other "
            "dimensions"
        )
    if x.dtype != experts.dtype:
        raise TypeError(
            f"x is {name(x.dtype)} and the experts {name(experts.dtype)}; they must have one "
            f"dtype: pass x.to({experts.dtype})"
        )
    if chosen.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"chosen must be numbers of experts, int64 or int32; got {name(chosen.dtype)}"
        )
    if not scores.is_floating_point():
        raise TypeError(f"scores must be of a floating dtype; got {name(scores.dtype)}")
    if chosen.dim() != 2 or chosen.shape != scores.shape or chosen.shape[0] != x.shape[0]:
        raise ValueError(
            f"chosen and scores must be ({x.shape[0]}, top) for {x.shape[0]} tokens; got "
            f"{tuple(chosen.shape)} and {tuple(scores.shape)}"
        )


def _ordinary(tensor: Tensor) -> bool:
    """Whether a tensor passes all checks at once: most do, and a decoding step takes as long as
    they.
    """
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.is_neg() or tensor.is_nested or in_modes())
    )


OPERANDS = (
    "Tensor x, Tensor chosen, Tensor scores, Tensor gate_up, Tensor down, int first, str activation"
)
"""Those of a recorded layer, in a schema."""


def _sums(
    x: Tensor,
    chosen: Tensor,
    scores: Tensor,
    gate_up: Tensor,
    down: Tensor,
    first: int,
    activation: str,
) -> Tensor:
    experts = Experts(gate_up.detach(), down.detach(), first=first, activation=activation)
    return local_sums(x, chosen, scores, experts)


def gradients(
    grad: Tensor,
    x: Tensor,
    chosen: Tensor,
    scores: Tensor,
    gate_up: Tensor,
    down: Tensor,
    first: int,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x and scores, in the dtype of sums, and of both weights."""
    experts = Experts(gate_up.detach(), down.detach(), first=first, activation=activation)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    found = (
        x.new_zeros(x.shape, dtype=wide),
        scores.new_zeros(scores.shape, dtype=wide),
        torch.zeros_like(gate_up),
        torch.zeros_like(down),
    )
    add_gradients(grad, x, chosen, scores.to(wide), experts, found)
    return found


def add_gradients(
    grad: Tensor,
    x: Tensor,
    chosen: Tensor,
    scores: Tensor,
    experts: Experts,
    into: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Add the gradients of x and scores, in the dtype of sums, as `scores` are, and of both
    weights.
    """
    for_x, for_scores, for_gate_up, for_down = into
    top, wide = max(chosen.shape[1], 1), scores.dtype
    for number, tokens, at in routed(experts, chosen):
        gate_up, down = experts.gate_up[number], experts.down[number]
        choice = at % top
        rows, dy = x[tokens], grad[tokens]
        gate, up = (rows @ gate_up.t()).chunk(2, 1)
        active = ACTIVATIONS[experts.activation](gate)
        between = active * up
        for_scores[tokens, choice] += (dy.to(wide) * (between @ down.t()).to(wide)).sum(1)
        dy = (dy.to(wide) * scores[tokens, choice].unsqueeze(1)).to(x.dtype)
        for_down[number] += dy.t() @ between
        d_between = dy @ down
        d_gate = _BACKWARD[experts.activation](d_between * up, gate)
        both = torch.cat((d_gate, d_between * active), 1)
        for_gate_up[number] += both.t() @ rows
        for_x.index_add_(0, tokens, (both @ gate_up).to(wide))


def fake_gradients(
    grad: Tensor, x: Tensor, chosen: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    for_x, for_scores = (each.new_empty(each.shape, dtype=wide) for each in (x, scores))
    return for_x, for_scores, torch.empty_like(gate_up), torch.empty_like(down)


_aten = torch.ops.aten
_BACKWARD: dict[str, Callable[..., Tensor]] = {
    "silu": _aten.silu_backward,
    "gelu": _aten.gelu_backward,
    "gelu_tanh": lambda grad, gate: _aten.gelu_backward(grad, gate, approximate="tanh"),
    "relu": lambda grad, gate: _aten.threshold_backward(grad, gate, 0),
}
"""The gradients of the activations, from that of their result and from their input."""

_made = torch.library.custom_op(
    "weft::expert_sums", _sums, mutates_args=(), schema=f"({OPERANDS}) -> Tensor"
)
_made.register_fake(lambda x, *_: x.new_empty(x.shape))
torch.library.custom_op(
    "weft::expert_gradients",
    gradients,
    mutates_args=(),
    schema=f"(Tensor grad, {OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor)",
).register_fake(fake_gradients)


def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep all operands of a recorded call."""
    x, chosen, scores, gate_up, down, *ctx.options = inputs
    ctx.save_for_backward(x, chosen, scores, gate_up, down)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, chosen, scores, gate_up, down = ctx.saved_tensors
    for_x, for_scores, for_gate_up, for_down = torch.ops.weft.expert_gradients(
        grad, x, chosen, scores, gate_up, down, *ctx.options
    )
    return (for_x.to(x.dtype), None, for_scores.to(scores.dtype), for_gate_up, for_down, None, None)


_made.register_autograd(_backward, setup_context=save)
