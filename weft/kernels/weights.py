"""Weights as products take them: tensors, packed once for many products, or of float8 with scales."""

from __future__ import annotations

import torch
from torch import Tensor

import weft._native as _native
from weft.checks import check_tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that products take."""

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""The dtypes that products take with scales."""

_SAMPLED = 64  # elements of a packed weight that are compared to see whether it was changed


class PackedWeight:
    """A weight (K, N) laid out for products; made by `pack`.

    Attributes: `shape`, `dtype`, `source`, the tensor it was made from, `plain`, the same without
    its gradient, `lies`, how it does (`weft.kernels.products`), and `watched`: whether who packed it
    looks for changes before each use, so that operators need not.
    """

    watched = False

    def __init__(self, b: Tensor) -> None:
        self.source, self.plain, self.shape, self.dtype = b, b.detach(), b.shape, b.dtype
        self._base, self._counted = (
            b._base,
            not b.is_inference(),
        )  # what b is a view of; whether torch counts writes
        self._packed_from = self._state()
        self._laid: dict[str, Tensor] = {}
        self.lies = "packed transposed" if transposed(self.plain) else "packed plain"

    def laid_out(self, way: str) -> Tensor:
        """The weight as this way of multiplying wants it; made at the first use."""
        if way not in self._laid:
            dtype = torch.float32 if way.endswith("/float32") else self.dtype
            wide = self.plain.to(dtype)
            self._laid[way] = (
                torch.ops.mkldnn._reorder_linear_weight(wide.t().contiguous())
                if way.startswith("onednn")
                else wide
            )
        return self._laid[way]

    @property
    def requires_grad(self) -> bool:
        """Whether the tensor this was made from requires a gradient."""
        return self.source.requires_grad

    def changed(self) -> bool:
        """Whether the tensor this was made from has been written to since, or lies elsewhere; see
        `pack`.
        """
        return self._state() != self._packed_from

    def _state(self) -> tuple[object, ...]:
        """What tells of changes: torch's count of writes, where the tensor lies, some of its
        elements, and where its base lies.
        """
        base, version = self._base, self.source._version if self._counted else 0
        return (
            version,
            _native.fingerprint(self.source, _SAMPLED),
            None if base is None else _native.fingerprint(base, 0),
        )

    def check_unchanged(self) -> None:
        """Raise `ValueError` if the tensor that this was packed from is not as it was."""
        if not self.watched and self.changed():
            raise ValueError(
                "the weight was changed after it was packed; pack it again with weft.pack(b)"
            )

    def __repr__(self) -> str:
        return f"PackedWeight({tuple(self.shape)}, {self.dtype})"


class ScaledWeight:
    """A float8 weight (K, N) with its scales (1, N), for rows that carry theirs behind their K
    columns; see `weft.ops.float8`.

    `shape` counts the columns of such rows: K, filled up to a multiple of 4, and the 4 bytes of a
    scale in float32.
    """

    def __init__(self, b: Tensor, scales: Tensor) -> None:
        self.plain, self.scales, self.dtype, self.k = b, scales, b.dtype, b.shape[0]
        self.shape = torch.Size((-(-self.k // 4) * 4 + 4, b.shape[1]))


Weight = Tensor | PackedWeight | ScaledWeight


def plain(weight: Weight) -> Tensor:
    """The tensor that a weight is or was made from, this without its gradient."""
    return weight if isinstance(weight, Tensor) else weight.plain


def source(weight: Weight) -> Tensor:
    """The same with its gradient, if it requires one."""
    return weight.source if isinstance(weight, PackedWeight) else plain(weight)


def pack(b: Tensor) -> PackedWeight:
    """Lay out the weight `b` (K, N), of any strides, for use in many products; worth most where
    these have few rows.

    Operators take the result in place of `b`. It keeps `b`, and beside it at most one copy for each
    dtype of results, made at the first product that is faster with it: of b's dtype, or in float32
    on processors that do not multiply 16-bit numbers themselves.

    If `b` requires a gradient it gets it: a call that is recorded, or compiled, multiplies by `b`
    itself, as it is by then.

    `b` must not be changed: a changed weight is a `ValueError` when used. Noticed are writes that
    torch counts, other memory (as by `Module.to` or ``b.data = …``, also of the tensor that `b` is
    a view of), and writes that torch does not count, as through ``b.data``, if they change one of
    64 elements spread over `b`. Not noticed are smaller writes of that kind, nor that a module has
    another parameter in the place of `b`, as by ``load_state_dict(assign=True)``: `b` is then what
    it was.
    """
    check_tensor(b, "b")
    if b.dim() != 2 or b.dtype not in DTYPES or b.device.type != "cpu":
        raise ValueError(
            "b, a weight to pack, must be a CPU tensor (K, N) of a floating dtype; got "
            f"{tuple(b.shape)} {b.dtype} on {b.device}"
        )
    return PackedWeight(b)


def transposed(matrix: Tensor) -> bool:
    """Whether its columns are contiguous, and its rows are not."""
    return matrix.stride(0) == 1 and matrix.stride(1) > 1
