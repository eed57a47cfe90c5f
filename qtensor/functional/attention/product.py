"""A product of two activations through quantized operands, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtensor.core.operand import Operand, plain_operand
from qtensor.functional.attention.plan import ProductPlan, usage_text
from qtensor.functional.linear.saved import (
    SavedOperand,
    SavedOperands,
    restore_operands,
    save_operand,
    tensors_to_save,
)
from qtensor.functional.operands import column_part, multiply, quantize_operand, row_part


class ProductFunction(torch.autograd.Function):
    """``a @ b.mT`` (layout TN) or ``a @ b`` (layout NN) as a function of autograd."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, plan: ProductPlan, dtype: torch.dtype) -> Tensor:
        """Return the product (B, M, N) in ``dtype``."""
        dgrad_a, dgrad_b = ctx.needs_input_grad[:2]
        is_tn, quantizes_backward = plan.layout == "TN", plan.override is None
        again_a, again_b = dgrad_b and quantizes_backward, dgrad_a and quantizes_backward
        # Forward reads a by rows, backward by columns. Of b, each reads the other direction.
        left, _ = quantize_operand(a, usage_text(plan.a, True, again_a))
        right, _ = quantize_operand(b, usage_text(plan.b, is_tn or again_b, not is_tn or again_b))
        read = row_part(left), row_part(right) if is_tn else column_part(right)
        out = multiply(*read, plan.layout, dtype)
        if plan.override is None:
            kept = column_part(left), column_part(right) if is_tn else row_part(right)
        elif plan.override == "dequantized":
            kept = read
        else:
            kept = plain_operand(a), plain_operand(b)
        saved_a, of_a = _saved(kept[0], dgrad_b)
        saved_b, of_b = _saved(kept[1], dgrad_a)
        ctx.saved = SavedOperands(saved_a, saved_b)
        ctx.save_for_backward(*tensors_to_save(ctx.saved, [*of_a, *of_b], [a], [b]))
        ctx.plan, ctx.dtypes = plan, (a.dtype, b.dtype)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of a and b, in their dtypes, and None for the options."""
        plan, (dgrad_a, dgrad_b) = ctx.plan, ctx.needs_input_grad[:2]
        a, b, _ = restore_operands(ctx.saved, ctx.saved_tensors)
        g, _ = quantize_operand(grad, usage_text(plan.gradient, dgrad_a, dgrad_b))
        is_tn = plan.layout == "TN"
        d_a = d_b = None
        if b is not None:
            d_a = multiply(row_part(g), b, "NN" if is_tn else "TN", ctx.dtypes[0])
        if a is not None:
            pair = (column_part(g), a) if is_tn else (a, column_part(g))
            d_b = multiply(*pair, "NT", ctx.dtypes[1])
        return d_a, d_b, None, None


def _saved(operand: Operand, wanted: bool) -> tuple[SavedOperand | None, list[Tensor | None]]:
    if not wanted:
        return None, []
    return save_operand(operand, not operand.canonical)


def product(a: Tensor, b: Tensor, plan: ProductPlan, dtype: torch.dtype) -> Tensor:
    """Return the product of two batches of matrices through quantized operands.

    Backward multiplies the quantized gradient by the quantized operands: the derivative of
    quantization counts as the identity (the straight-through rule).

    Args:
        a: (B, M, K).
        b: (B, N, K) in layout TN, (B, K, N) in layout NN.
        plan: the operands.
        dtype: of the result, (B, M, N).
    """
    out: Tensor = ProductFunction.apply(a, b, plan, dtype)
    return out
