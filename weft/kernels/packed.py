"""Packed weights: a tensor laid out once for many products."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import weft._native as _native
from weft.kernels import products
from weft.kernels.methods import METHODS, mm, mm_packed
from weft.kernels.weights import PreparedWeight, check_matrix, transposed
from weft.plan.kernel import Run

SAMPLED = 64
"""Elements that are compared: a net below a promise, which no result may rely on.

Measured on a 2-core Zen 4: the check takes 0.1 us.
"""


class PackedWeight(PreparedWeight):
    """A weight (K, N) laid out for products; made by `pack`.

    Attributes beside those of every `PreparedWeight`: `plain`, the source without its gradient, and
    `watched`, whether the caller checks for changes before each use, so that operators need not.

    Examples:
        >>> packed = weft.pack(torch.randn(8, 4))
        >>> packed.shape, packed.dtype
        (torch.Size([8, 4]), torch.float32)
    """

    source: Tensor
    watched = False
    words = "packed"

    def __init__(self, b: Tensor) -> None:
        self.source, self.plain = b, b.detach()
        self.tensors = (self.plain,)
        super().__init__(b.shape, b.dtype, b.stride())
        # torch counts no writes to inference tensors
        self._watch = _native.Watch(b, not b.is_inference(), SAMPLED)
        self._forms: dict[str, Tensor] = {}  # by method
        self._layout_name = "packed transposed" if transposed(self.plain) else "packed plain"

    def form(self, method: str) -> Tensor:
        """The weight as a method of `weft.kernels.methods` takes it; made at the first use."""
        if method not in self._forms:
            self._forms[method] = METHODS[method].packed(self.plain)
        return self._forms[method]

    def multiply(
        self, sources: Sequence[Tensor], out: Tensor, bias: Tensor | None, rows: int
    ) -> None:
        self.prepare(sources, out, rows)(*sources, self, out, bias)

    def prepare(self, sources: Sequence[Tensor], out: Tensor, rows: int) -> Run:
        name = products.select(sources[0], self.shape, out, rows, self._layout_name)
        run = METHODS[name].run
        if run is mm:
            return mm_packed
        return lambda x, weight, out, bias: run(x, weight.form(name), out, bias, True)

    def changed(self) -> bool:
        """Whether the source was written to, or its memory replaced, since it was packed."""
        changed: bool = self._watch.changed()
        return changed

    def check_unchanged(self) -> None:
        """Raise `ValueError` if the source was changed."""
        if not self.watched and self._watch.changed():
            raise ValueError(
                "the weight was changed after it was packed; pack it again with weft.pack(b)"
            )

    def as_tensor(self) -> Tensor:
        return self.plain


def pack(b: Tensor) -> PackedWeight:
    """Lay out the weight `b` (K, N), of any strides, for use in many products; worth most where
    these have few rows.

    Operators take the result in place of `b`. It keeps `b`, and at most one copy of it for each
    dtype of results, made at the first product that is faster with it: of b's dtype, or in float32
    where that is fastest for 16-bit numbers, as on processors other than x86-64.

    If `b` requires a gradient it gets it: a call that is recorded, or compiled, multiplies by `b`
    itself, with its current values.

    **Packing is a promise** that `b` does not change as long as the result is used: products may be
    by `b` as it was when it was packed, or as it is. A change is a `ValueError` at the next use if
    torch counts it (``b.mul_()``, optimizers, ``load_state_dict``) or the memory is another (as by
    `Module.to` or ``b.data = …``, also of the tensor that `b` is a view of). Torch counts no writes
    through ``b.data``, nor through NumPy arrays and DLPack views that share its memory, nor rows
    that are received into it: of these it is an error only if one of 64 elements spread over `b`
    has changed. Not detected either is that a module has another parameter in the place of `b`, as
    by ``load_state_dict(assign=True)``. Pack again after every change.

    Examples:
        >>> packed = weft.pack(torch.eye(4))
        >>> with weft.local_world(2) as local:
        ...     local.run(lambda: weft.all_gather_matmul(torch.ones(1, 4), packed))[0]
        tensor([[1., 1., 1., 1.],
                [1., 1., 1., 1.]])
    """
    check_matrix(b, "pack")
    return PackedWeight(b)
