"""Experts of a mixture: a token's weighted sum of the results of the experts that it chose."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import weft._native as _native
from weft.checks import check_tensor, name
from weft.kernels import expert_methods as methods
from weft.kernels.expert_methods import ACTIVATIONS, Shape
from weft.kernels.packed import SAMPLED
from weft.kernels.weights import DTYPES, PreparedWeight, check_product
from weft.plan import Kernel
from weft.plan.kernel import Load, Rates, Run


class Experts:
    """The weights of consecutive experts of a mixture, those with the numbers from `first` on, as
    they are at the time of a call.

    An expert computes ``(activation(x @ gate.T) * (x @ up.T)) @ down.T``.

    Args:
        gate_up: (experts, 2 I, K), the rows of the gate before those of up: the parameter
            ``gate_up_proj`` of Mixtral and Qwen-MoE in transformers. Of float16, bfloat16, float32
            or float64, of any strides. There may be no expert: (0, 2 I, K).
        down: (experts, K, I) of the same dtype: ``down_proj``.
        first: the number of the first expert. Choices of others are another rank's.
        activation: ``silu``, ``gelu``, ``gelu_tanh`` (its approximation by tanh) or ``relu``.

    Raises `ValueError` or `TypeError` for anything else.

    Examples:
        >>> weft.Experts(torch.randn(4, 16, 6), torch.randn(4, 6, 8), first=4)
        Experts(4 of 6 x 8 from number 4, float32)
    """

    packed = False

    def __init__(
        self, gate_up: Tensor, down: Tensor, *, first: int = 0, activation: str = "silu"
    ) -> None:
        if not torch.compiler.is_compiling():
            check_tensor(gate_up, "gate_up", traced=True)
            check_tensor(down, "down", traced=True)
        if gate_up.dim() != 3 or down.dim() != 3:
            raise ValueError(
                "gate_up must be (experts, 2 I, K) and down (experts, K, I); got "
                f"{tuple(gate_up.shape)} and {tuple(down.shape)}"
            )
        (count, both, width), (count_down, out, inner) = gate_up.shape, down.shape
        if (count_down, out, 2 * inner) != (count, width, both):
            raise ValueError(
                f"gate_up {tuple(gate_up.shape)} needs down {(count, width, both // 2)}, (experts, "
                f"K, I); got {tuple(down.shape)}"
            )
        if gate_up.dtype not in DTYPES or gate_up.dtype != down.dtype:
            raise TypeError(
                f"gate_up and down must have one dtype of {', '.join(map(name, DTYPES))}; got "
                f"{name(gate_up.dtype)} and {name(down.dtype)}"
            )
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"there is no activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}"
            )
        self.gate_up, self.down, self.first, self.activation = gate_up, down, first, activation
        self.dtype = gate_up.dtype
        self.shape = Shape(count, width, inner)
        self._routed: dict[int, RoutedExperts] = {}

    def routed(self, top: int) -> RoutedExperts:
        """These experts as a weight of rows that carry their `top` choices each."""
        if top not in self._routed:
            self._routed[top] = RoutedExperts(self, top)
        return self._routed[top]

    @property
    def requires_grad(self) -> bool:
        return self.gate_up.requires_grad or self.down.requires_grad

    def check_unchanged(self) -> None:
        """Raise `ValueError` if these weights can no longer be used."""

    def sums(self, x: Tensor, chosen: Tensor, scores: Tensor, out: Tensor) -> None:
        """Write each token's sum over its choices to `out` (tokens, K), of the dtype of `x`, or in
        float32: for the choices of these experts, their results times their scores.

        `x` is (tokens, K), `chosen` and `scores` (tokens, top), scores in float32, or float64.
        """

        def weights(number: int) -> tuple[Tensor, Tensor]:
            return self.gate_up[number].t(), self.down[number].t()

        methods.each(weights, self, x, chosen, scores, out)

    def __repr__(self) -> str:
        count, width, inner = self.shape
        return (
            f"{type(self).__name__}({count} of {width} x {inner} from number {self.first}, "
            f"{name(self.dtype)})"
        )


class PackedExperts(Experts):
    """Experts laid out for products; made by `pack_experts`.

    Examples:
        >>> weft.pack_experts(torch.randn(2, 4, 6), torch.randn(2, 6, 2)).changed()
        False
    """

    packed = True

    def __init__(
        self, gate_up: Tensor, down: Tensor, *, first: int = 0, activation: str = "silu"
    ) -> None:
        super().__init__(gate_up, down, first=first, activation=activation)
        if any(tensor.device.type != "cpu" for tensor in (gate_up, down)):
            raise ValueError(f"weights to pack must be on the CPU; got {gate_up.device}")
        self._watches = [_watch(tensor) for tensor in (gate_up, down)]
        self._forms: dict[str, Any] = {}

    def changed(self) -> bool:
        """Whether a weight was written to, or its memory replaced, since it was packed."""
        return any(watch.changed() for watch in self._watches)

    def check_unchanged(self) -> None:
        if self.changed():
            raise ValueError(
                "the weights of the experts were changed after they were packed; pack them again "
                "with weft.pack_experts(gate_up, down)"
            )

    def form(self, method: str) -> Any:
        """The weights as a method takes them; made at the first use."""
        if method not in self._forms:
            with torch.no_grad():
                self._forms[method] = methods.METHODS[method].packed(self)
        return self._forms[method]

    @functools.cached_property
    def method(self) -> str:
        """The name of the method by which they are computed, chosen at the first call for the
        threads that torch has then.
        """
        return methods.fastest(self)

    def sums(self, x: Tensor, chosen: Tensor, scores: Tensor, out: Tensor) -> None:
        run = methods.METHODS[self.method].run
        run(self.form(self.method), self, x, chosen, scores, out)


def pack_experts(
    gate_up: Tensor, down: Tensor, *, first: int = 0, activation: str = "silu"
) -> PackedExperts:
    """Lay out the weights of experts for use in many calls.

    Arguments and errors are those of `Experts`; operators take the result in its place. It keeps
    both tensors, and a copy of them in the layout of the fastest product: weft's own, which
    computes gate, up, activation and down of all experts in one call, unless one expert after
    another by `pack` was faster on this machine by a quarter.

    Packing is the promise of `weft.pack`: the weights do not change as long as the result is used.
    A call that is recorded, or compiled, multiplies by `gate_up` and `down` themselves, which get
    the gradients.

    Examples:
        >>> experts = weft.pack_experts(torch.ones(2, 2, 3), torch.ones(2, 3, 1), activation="relu")
        >>> x, chosen, scores = torch.ones(1, 3), torch.tensor([[1]]), torch.ones(1, 1)
        >>> weft.expert_sums(x, chosen, scores, experts)
        tensor([[9., 9., 9.]])
    """
    return PackedExperts(gate_up, down, first=first, activation=activation)


@torch.no_grad()
def _watch(tensor: Tensor) -> _native.Watch:
    # elements of a matrix are sampled
    matrix = tensor.flatten(0, 1) if tensor.is_contiguous() else tensor
    return _native.Watch(matrix, not matrix.is_inference(), SAMPLED)


class ExpertSums(Kernel):
    """The sums of rows that carry their routing, by the experts of a rank.

    A row chooses what it is multiplied by, so it is no linear function of the row.
    """

    name = "expert_sums"

    def compute(self, sources: Sequence[Tensor], weight: Any) -> Tensor:
        out = sources[0].new_empty(len(sources[0]), weight.shape[1])
        weight.multiply(sources[0], out, None, len(out))
        return out

    def check(self, sources: Sequence[Tensor], weight: Any, out: Tensor) -> None:
        check_product(sources[0], weight, out)

    def prepare(self, sources: Sequence[Tensor], weight: Any, out: Tensor, rows: int) -> Run:
        product: Run = weight.prepare(sources[0], out, rows)
        return product

    def seconds(self, machine: Rates, load: Load) -> float:
        """About that of a product by a square weight; how many rows a rank has depends on the
        router.
        """
        _, n = load.columns
        return machine.product(load.rows, n, n, load.dtype, load.packed)


EXPERT_SUMS = ExpertSums()


class RoutedExperts(PreparedWeight):
    """Experts as a weight (columns, K) of rows that carry their routing: K columns, then the `top`
    experts that a row chose as int32, and their scores in float32; both in float64 for float64.
    `rows` makes such rows.
    """

    kernel = EXPERT_SUMS
    words = "experts"

    def __init__(self, experts: Experts, top: int) -> None:
        self.experts, self.top = experts, top
        count, width, inner = experts.shape
        item = experts.dtype.itemsize
        self.routing_at = -(-width * item // 4) * 4 // item
        columns = 2 * top if experts.dtype == torch.float64 else 8 * top // item
        self.tensors = (experts.gate_up, experts.down)
        self.packed = experts.packed
        super().__init__(
            (self.routing_at + columns, width),
            experts.dtype,
            count,
            inner,
            experts.first,
            experts.activation,
            experts.packed,
        )

    def rows(
        self, x: Tensor, chosen: Tensor, scores: Tensor, token_of: Tensor | None = None
    ) -> Tensor:
        """`x` (tokens, K), `chosen` and `scores` (tokens, top) as rows of this weight: all tokens,
        or for each row that of `token_of` (rows, 1), int64.
        """
        if x.dtype == torch.float64:
            made = torch.cat((x, chosen.to(x.dtype), scores), 1)
            return made if token_of is None else made[token_of[:, 0]]
        made = x.new_empty(len(x if token_of is None else token_of), self.shape[0])
        if len(made):
            _native.PackedExperts.route(x, chosen, scores, made, token_of)
        return made

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inverse of `rows`: tokens, what they chose, and their scores."""
        routing, tokens = rows[:, self.routing_at :], rows[:, : self.shape[1]]
        if rows.dtype == torch.float64:
            chosen, scores = routing.split(self.top, 1)
            return tokens, chosen.long(), scores
        chosen, scores = routing.view(torch.int32).split(self.top, 1)
        return tokens, chosen, scores.view(torch.float32)

    def multiply(self, x: Tensor, out: Tensor, bias: Tensor | None, rows: int) -> None:
        if len(x):
            self.experts.sums(*self.split(x), out)
        if bias is not None:
            out.add_(bias)

    def check_unchanged(self) -> None:
        self.experts.check_unchanged()
