"""Multiply groups of rows by the matrix of each group: ``aten::_grouped_mm``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qtensor.core.errors import UnsupportedError, fail
from qtensor.core.operand import plain_operand
from qtensor.kernels.products.stacks import stack_refusal
from qtensor.library.grouped import GROUPED_GEMM, SPLIT_SIZES
from qtensor.library.ragged import Groups
from qtensor.storage.base import is_quantized
from qtensor.storage.ops.decoded import dequantized
from qtensor.storage.ops.lazy_view import stack_of
from qtensor.storage.ops.products import operand_of
from qtensor.storage.ops.table import COMPUTE, TRANSFORMERS, Args, Kwargs, Op, implements, named
from qtensor.storage.ops.write import plain
from qtensor.storage.rebuild import FLOATING

if TYPE_CHECKING:
    from qtensor.storage.tensor import QuantizedTensor


def group_sizes(offs: Tensor, rows: int, label: str) -> Tensor:
    """Return the sizes of groups from the row at which each one ends.

    Args:
        offs: (groups,) integers, cumulative; the last one is ``rows``.
        rows: number of rows of the ragged operand.
        label: the calling op, for errors.

    Returns:
        int64 (groups,) on the CPU.

    Raises:
        QTensorError: a group has a negative size, or the groups do not cover the rows.
    """
    starts = torch.cat([offs.new_zeros(1), offs[:-1]])
    return SPLIT_SIZES((offs - starts).long(), rows, label)


def grouped_product(
    x: Tensor, stack: QuantizedTensor, layout: str, sizes: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the product of each group of rows with its own matrix of a quantized stack.

    A matrix whose group has no rows is not read.

    Args:
        x: (M, K), plain; the rows of each group are consecutive.
        stack: quantized, one matrix for each group: (groups, N, K) in layout TN, (groups, K, N) in
            layout NN.
        layout: ``"TN"`` or ``"NN"``.
        sizes: rows of each group, the result of ``group_sizes``.
        dtype: dtype of the result; the dtype of ``x`` if None.

    Returns:
        (M, N) plain tensor.
    """
    weights = operand_of(stack)
    if stack_refusal(weights.canonical, tuple(weights.shape)) is not None:
        # The matrices share factors, so indexing raises an error where it would not be exact.
        matrices = [operand_of(stack[i]) for i in range(len(stack))]
        buffers = [buffer for matrix in matrices for buffer in matrix.buffers]
        weights = matrices[0]._replace(buffers=buffers)
    groups = Groups([], sizes, len(stack))
    return GROUPED_GEMM(*plain_operand(x), *weights, *groups, layout, dtype or x.dtype, None)


@implements(COMPUTE, "_grouped_mm")
def _grouped_mm(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    """Handle ``_grouped_mm`` of rows in groups (M, K) with a quantized (groups, K, N)."""
    names = ("self", "mat2", "offs", "bias", "out_dtype")
    given = {**dict.fromkeys(names), **dict(zip(names, args, strict=False)), **kwargs}
    x, offs = given["self"], given["offs"]
    weight = given["mat2"]
    if is_quantized(x):
        x = plain(x)
    if not is_quantized(weight):
        return func(x, *args[1:], **kwargs)
    check_call(x, weight, offs, given["bias"])
    sizes = group_sizes(offs, x.shape[0], "_grouped_mm")
    stack = stack_of(weight)
    operand, layout = (weight, "NN") if stack is None else (stack, "TN")
    return grouped_product(x, operand, layout, sizes, given["out_dtype"])


@implements(TRANSFORMERS, "grouped_mm_fallback")
def _fallback(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    """Handle the grouped product of transformers, which its compiled models call in float32."""
    given = named(func, args, kwargs)
    return torch.ops.aten._grouped_mm.default(given["input"], given["weight"], given["offs"])


# Its backward pass computes the gradient of every weight, whether or not that is asked for.
implements(TRANSFORMERS, "grouped_mm_fallback_backward")(dequantized)


def check_call(
    x: Tensor, weight: QuantizedTensor, offs: Tensor | None, bias: Tensor | None
) -> None:
    """Refuse a call of ``_grouped_mm`` that quantized matrices do not support.

    Raises:
        UnsupportedError: the operands are not floating rows (M, K) in groups and matrices
            (groups, K, N), or there is a bias.
    """
    fits = x.ndim == 2 and weight.ndim == 3 and x.shape[1] == weight.shape[1]
    if not fits or offs is None or tuple(offs.shape) != (weight.shape[0],) or bias is not None:
        got = f"{tuple(x.shape)}, {tuple(weight.shape)}, offs {getattr(offs, 'shape', None)}"
        rule = "it takes rows (M, K), a weight (groups, K, N), offs (groups,) and no bias"
        fail("_grouped_mm", rule, got, "Call .dequantize() first", UnsupportedError)
    if x.dtype not in FLOATING:
        fail("_grouped_mm", "rows are floating", x.dtype, "Convert them", UnsupportedError)
