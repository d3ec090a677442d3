"""Weights: the constant operands of products, as tensors or in another form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from weft.checks import check_tensor, name
from weft.plan import Kernel
from weft.plan.kernel import Run

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that products take."""

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""The dtypes that products take with scales."""

Product = Callable[[Tensor, Any, Tensor, Tensor | None], None]
"""``product(x, weight, out, bias)`` writes ``x @ weight (+ bias)`` to `out`; bias may be None."""

_layouts: dict[Hashable, int] = {}


class PreparedWeight(ABC):
    """A weight (K, N) that is no tensor: it brings its own product with rows of K columns.

    Operators take it wherever they take a tensor `b`. A product may be computed in several parts,
    so each row of the result must depend on the same row of x alone.

    Attributes: `shape`, ``torch.Size((K, N))``; `dtype`, of the rows that it multiplies; `layout`,
    a number that is equal for weights for which calls have the same plan and product; `tensors`,
    which its products read, so that no output may overlap them; `source`, the tensor that gets the
    gradient, or None if there is no gradient; `packed`, whether the product reads the weight as it
    is stored, without laying it out anew; `rows_multiple`, the number of rows of which its product
    prefers multiples; `kernel`, which plans run with it, or None for that of the matrix product;
    `words`, its kind for `weft.explain`.

    Examples:
        >>> isinstance(weft.pack(torch.eye(4)), weft.PreparedWeight)
        True
    """

    source: Tensor | None = None
    tensors: tuple[Tensor, ...] = ()
    packed = True
    rows_multiple = 1
    kernel: Kernel | None = None
    words: ClassVar[str]

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, *layout: Hashable) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype
        key = (type(self), self.shape, dtype, self.rows_multiple, *layout)
        self.layout = _layouts.setdefault(key, len(_layouts))

    @abstractmethod
    def multiply(
        self, sources: Sequence[Tensor], out: Tensor, bias: Tensor | None, rows: int
    ) -> None:
        """Write the product of rows, ``x @ weight (+ bias)``, to `out`: `sources` are x, a part of
        a call of `rows` rows, and the companions that `kernel` gives its rows.

        The columns of a row of each matrix are contiguous.
        """

    def prepare(self, sources: Sequence[Tensor], out: Tensor, rows: int) -> Run:
        """The product, ``run(*sources, weight, out, bias)``, for operands with these layouts and
        any weight with this `layout`.
        """

        def run(*operands: Any) -> None:
            *sources, weight, out, bias = operands
            weight.multiply(sources, out, bias, rows)

        return run

    def check(self, k: int) -> None:
        """Raise `ValueError` if this weight cannot be used with rows of `k` columns, or no longer.

        That K is `k` is checked elsewhere.
        """
        self.check_unchanged()

    def check_unchanged(self) -> None:  # noqa: B027, most weights can always be used
        """Raise `ValueError` if this weight can no longer be used."""

    @property
    def requires_grad(self) -> bool:
        """Whether its source requires a gradient."""
        return self.source is not None and self.source.requires_grad

    def as_tensor(self) -> Tensor:
        """The weight as a tensor; `ValueError` if it has no such form."""
        raise ValueError(
            f"{self!r} is multiplied by its own function, which works on rows of a alone: for "
            "this call b must be a tensor"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tuple(self.shape)}, {name(self.dtype)})"


Weight = Tensor | PreparedWeight
"""An operand `b` of an operator."""


class WeightKernel(Kernel):
    """A kernel that is computed by its weight, a `PreparedWeight`."""

    def compute(self, sources: Sequence[Tensor], weight: Any) -> Tensor:
        out = sources[0].new_empty(len(sources[0]), weight.shape[1])
        weight.multiply(sources, out, None, len(out))
        return out

    def check(self, sources: Sequence[Tensor], weight: Any, out: Tensor) -> None:
        check_product(sources[0], weight, out)

    def prepare(self, sources: Sequence[Tensor], weight: Any, out: Tensor, rows: int) -> Run:
        run: Run = weight.prepare(sources, out, rows)
        return run


def check_matrix(b: Tensor, use: str) -> None:
    """Raise an error unless `b`, of which a weight is made by `use`, is a matrix on the CPU of a
    floating dtype.
    """
    check_tensor(b, "b")
    if b.dim() != 2 or b.dtype not in DTYPES or b.device.type != "cpu":
        raise ValueError(
            f"b, a weight to {use}, must be a CPU tensor (K, N) of a floating dtype; got "
            f"{tuple(b.shape)} {b.dtype} on {b.device}"
        )


def check_product(x: Tensor, weight: Weight, out: Tensor) -> None:
    """Raise `ValueError` or `TypeError` unless ``out = x @ weight`` has equal inner dimensions, and
    dtypes that products have.
    """
    if (x.shape[1], out.shape[1]) != tuple(weight.shape):
        raise ValueError(
            f"rows of {x.shape[1]} columns times a weight {tuple(weight.shape)} are no rows of "
            f"{out.shape[1]} columns"
        )
    if x.dtype != weight.dtype:
        raise TypeError(
            f"rows of {name(x.dtype)} are multiplied by weights of that dtype; got "
            f"{name(weight.dtype)}"
        )
    wider = () if x.dtype == torch.float64 else (torch.float32,)
    if isinstance(weight, Tensor) and out.dtype not in (x.dtype, *wider):
        raise TypeError(
            f"a product of {name(x.dtype)} is {' or '.join(map(name, (x.dtype, *wider)))}; got a "
            f"result of {name(out.dtype)}"
        )


def as_tensor(weight: Weight) -> Tensor:
    """The weight as a tensor, without gradient if it was packed; `ValueError` if it is none."""
    return weight if isinstance(weight, Tensor) else weight.as_tensor()


def source(weight: Weight) -> Tensor:
    """The tensor that gets the gradient of a weight; `ValueError` if it has none."""
    if isinstance(weight, Tensor):
        return weight
    if weight.source is None:
        raise ValueError(
            f"{weight!r} has no gradient and cannot be compiled: call under torch.no_grad() and "
            "outside torch.compile"
        )
    return weight.source


def packed(weights: Sequence[Weight]) -> bool:
    """Whether products read all these weights as they are stored."""
    return all(not isinstance(weight, Tensor) and weight.packed for weight in weights)


def words(weights: Sequence[Weight]) -> str:
    """The kinds of weights, for `weft.explain`."""
    kinds = ("plain" if isinstance(weight, Tensor) else weight.words for weight in weights)
    return ", ".join(dict.fromkeys(kinds))


def rows_multiple(weights: Sequence[Weight]) -> int:
    """The number of rows of which products by these weights prefer multiples."""
    return max((1 if isinstance(w, Tensor) else w.rows_multiple for w in weights), default=1)


def transposed(matrix: Tensor) -> bool:
    """Whether its columns are contiguous, and its rows are not."""
    return matrix.stride(0) == 1 and matrix.stride(1) > 1
