"""The products of vLLM's linear layers as weights of weft's operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm import _custom_ops as vllm_operators
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel

from weft.kernels.function import FunctionWeight, weight

ROWS_MULTIPLE = 32  # of the tiles of vLLM's kernels

_KERNELS = "vllm.model_executor.kernels.linear"
_ROW_WISE = ("CPU", "Zentorch", "Dynamic4bit", "Unquantized")
"""Beginnings of names of kernels that quantise no activations, or each row by itself."""
_SCALE_BYTES = 4  # of a row's scale, in float32


def kernel_of(layer: nn.Module) -> Any:
    """The object of vLLM that multiplies by a layer's weight."""
    method: Any = layer.quant_method
    for owner in getattr(layer, "scheme", None), method:
        for value in vars(owner).values() if owner is not None else ():
            if type(value).__module__.startswith(_KERNELS):
                return value
    return method


def kernel_name(layer: nn.Module) -> str:
    return type(kernel_of(layer)).__name__


def is_row_wise(layer: nn.Module) -> bool:
    """Whether each row of a layer's result depends on the same row of its input alone."""
    return kernel_name(layer).startswith(_ROW_WISE)


class RowProduct:
    """Rows (n, K) of activations as they are sent, and multiplied by a layer's weight."""

    words = "rows"

    def __init__(self, layer: Any, columns: int, dtype: torch.dtype, bias: Tensor | None) -> None:
        self.layer = layer
        self.bias = bias
        self.dtype = dtype
        self.weight: FunctionWeight = weight(
            self._multiply,
            (columns, layer.output_size_per_partition),
            dtype,
            rows_multiple=ROWS_MULTIPLE,
        )

    def sent(self, x: Tensor) -> Tensor:
        return x

    def _multiply(self, rows: Tensor, out: Tensor) -> None:
        out.copy_(self.layer.quant_method.apply(self.layer, rows, self.bias))


class Int8Rows(RowProduct):
    """Rows that are quantised before they are sent, each with its scale: half the bytes, and the
    bits of rows that are quantised afterwards, since each row has its own scale.

    The K int8 and one float32 of a row are sent as elements of the layer's dtype.
    """

    words = "int8 rows"

    def __init__(self, layer: Any, columns: int, dtype: torch.dtype, bias: Tensor | None) -> None:
        super().__init__(layer, (columns + _SCALE_BYTES) // dtype.itemsize, dtype, bias)
        self.columns = columns
        self.kernel = kernel_of(layer)

    def sent(self, x: Tensor) -> Tensor:
        quantised, scales, _ = vllm_operators.onednn_scaled_int8_quant(x)
        return torch.cat([quantised.view(self.dtype), scales.view(self.dtype)], dim=1)

    def _multiply(self, rows: Tensor, out: Tensor) -> None:
        sent = rows.view(torch.int8)
        quantised, scales = sent.split([self.columns, _SCALE_BYTES], dim=1)
        *_, adjustment = self.kernel._get_layer_params(self.layer)
        product = torch.empty(out.shape, dtype=self.dtype, device="cpu")
        vllm_operators.onednn_scaled_mm(
            self.kernel.dnnl_handler,
            quantised.contiguous(),
            product,
            scales.contiguous().view(torch.float32),
            None,
            adjustment,
            self.bias,
        )
        out.copy_(product)


def sent_rows(layer: Any, columns: int, dtype: torch.dtype) -> type[RowProduct]:
    """How the rows of a column-parallel layer are sent."""
    return Int8Rows if _takes_int8_rows(layer) and columns % dtype.itemsize == 0 else RowProduct


def _takes_int8_rows(layer: nn.Module) -> bool:
    kernel = kernel_of(layer)
    return (
        isinstance(kernel, CPUInt8ScaledMMLinearKernel)
        and kernel.config.input_symmetric
        and not kernel.config.is_static_input_scheme
        and getattr(kernel, "linear_method", None) == kernel._apply_weights_onednn
    )
