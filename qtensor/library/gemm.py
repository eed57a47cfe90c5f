"""The quantized matmul op, with the reference backend."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from qtensor.errors import ArgumentTypeError, check, fail
from qtensor.kernels.gemm.problem import Product
from qtensor.layout import Shape
from qtensor.library.checks import check_buffers
from qtensor.library.define import LIBRARY, below_autograd, check_one_device, leaf_op
from qtensor.registry import QuantizerLike, parse

LAYOUTS = ("TN", "NN", "NT")
"""Layouts of a product, named as in column-major GEMMs.

TN: ``a @ b.T`` (fprop, both rowwise). NN: ``a @ b`` (dgrad, a rowwise, b columnwise). NT:
``a.T @ b`` (wgrad, both columnwise).
"""


def output_shape(a_shape: Shape, b_shape: Shape, layout: str) -> tuple[int, ...]:
    """Shape of the product of operands with logical shapes ``a_shape`` and ``b_shape``."""
    if layout == "TN":
        return (*a_shape[:-1], b_shape[-2])
    if layout == "NN":
        return (*a_shape[:-1], b_shape[-1])
    return (*a_shape[:-2], a_shape[-1], b_shape[-1])


class GemmArgs(NamedTuple):
    """Arguments of the op ``gemm``."""

    a: list[Tensor]
    a_quantizer: str
    a_shape: Shape
    b: list[Tensor]
    b_quantizer: str
    b_shape: Shape
    layout: str
    dtype: torch.dtype
    bias: Tensor | None = None
    backend: str = "auto"
    fast: bool = False


def _gemm_alloc(args: GemmArgs) -> Tensor:
    check_layout(args.layout)
    check(bool(args.a and args.b), "gemm", "operands have buffers", "none", "Pass their buffers")
    return torch.empty(product_shape(args), dtype=args.dtype, device=args.a[0].device)


def product_shape(args: Any) -> tuple[int, ...]:
    """Return the shape of a product.

    Args:
        args: ``GemmArgs``, or arguments with the same fields.

    Raises:
        QTensorError: an operand has too few dimensions.
    """
    try:
        return output_shape(args.a_shape, args.b_shape, args.layout)
    except IndexError:
        check_operands(None, args.a_shape, None, args.b_shape, args.layout)
        raise


def check_product(args: Any) -> None:
    """Refuse the arguments of a product whose operands, sizes or bias do not fit each other.

    Args:
        args: ``GemmArgs`` on real tensors, or arguments with the same fields.

    Raises:
        QTensorError: the message names what does not fit.
    """
    left, right = (parse(q) if q else None for q in (args.a_quantizer, args.b_quantizer))
    check_operands(left, args.a_shape, right, args.b_shape, args.layout)
    check_buffers("gemm", args.a, args.a_quantizer, args.a_shape)
    check_buffers("gemm", args.b, args.b_quantizer, args.b_shape)
    if args.bias is not None:
        check_bias(args.bias.shape, output_shape(args.a_shape, args.b_shape, args.layout))


def _gemm_fill(out: Tensor, args: GemmArgs) -> None:
    check_product(args)
    # Only a product needs the backends.
    from qtensor.kernels.gemm import choice  # noqa: PLC0415

    # torch.autocast would round operands to its dtype, in eager code alone.
    with below_autograd(), torch._C._DisableAutocast():
        choice.multiply_(out, Product(*args[:7], *args[8:]))


_CONTRACTED = {
    "TN": "the last dims of a and b",
    "NN": "the last dim of a and the first of b",
    "NT": "the first dims of a and b",
}


def check_bias(bias_shape: Shape, out_shape: Shape) -> None:
    """Refuse a bias that does not broadcast to the product.

    Raises:
        QTensorError: with both shapes.
    """
    tail = out_shape[len(out_shape) - len(bias_shape) :]
    if len(bias_shape) > len(out_shape) or any(
        n not in (1, size) for n, size in zip(bias_shape, tail, strict=True)
    ):
        fail(
            "gemm",
            "the bias must broadcast to the product",
            f"{tuple(bias_shape)} for {tuple(out_shape)}",
            "Fix the argument",
        )


def _refuse(
    a: QuantizerLike | None,
    a_shape: Shape,
    b: QuantizerLike | None,
    b_shape: Shape,
    rule: str,
    fix: str,
) -> NoReturn:
    formats = ", ".join(codec.format for codec in (a, b) if codec is not None)
    got = f"a {tuple(a_shape)}, b {tuple(b_shape)}"
    fail(f"gemm[{formats}]" if formats else "gemm", rule, got, fix)


def check_layout(layout: str) -> None:
    """Refuse a layout that does not exist.

    Raises:
        QTensorError: the message lists the layouts.
    """
    if layout not in LAYOUTS:
        refuse_layout(layout)


def refuse_layout(layout: object) -> NoReturn:
    """Say which layouts there are.

    Raises:
        QTensorError: always.
    """
    rule = f"layout must be one of {', '.join(LAYOUTS)}"
    fail("gemm", rule, repr(layout), "Choose one of them")


def check_operands(
    a: QuantizerLike | None, a_shape: Shape, b: QuantizerLike | None, b_shape: Shape, layout: str
) -> None:
    """Refuse operands whose sizes do not meet or whose blocks do not run along the contraction.

    Raises:
        QTensorError: with the rule that is broken and the way out.
    """
    if len(b_shape) != 2 or len(a_shape) < (2 if layout == "NT" else 1):
        if len(b_shape) < 2 or len(a_shape) < (2 if layout == "NT" else 1):
            rule = "operands must be matrices or batches of them"
            _refuse(a, a_shape, b, b_shape, rule, "Add a dim with unsqueeze(0)")
        if tuple(a_shape[:-2]) != tuple(b_shape[:-2]):
            rule = "both operands must have the same batch dims, or b none"
            _refuse(a, a_shape, b, b_shape, rule, "Use torch.matmul, which repeats a batch")
    left = a_shape[-2] if layout == "NT" else a_shape[-1]
    right = b_shape[-1] if layout == "TN" else b_shape[-2]
    if left != right:
        rule = f"{_CONTRACTED[layout]} must be equal ({layout})"
        _refuse(a, a_shape, b, b_shape, rule, "Transpose one operand or fix the shapes")
    if a is None or b is None:
        return
    for name, codec, columnwise in (("a", a, layout == "NT"), ("b", b, layout != "TN")):
        usage = "columnwise" if columnwise else "rowwise"
        check(
            getattr(codec, usage) or codec.spec.transpose_shares_bytes,
            f"gemm[{codec.format}]",
            f"operand {name} needs {usage} data, whose blocks run along the contraction",
            f"rowwise={codec.rowwise}, columnwise={codec.columnwise}",
            f"Quantize it with {usage}=True",
        )


GEMM = leaf_op(
    "gemm(Tensor[] a, str a_quantizer, SymInt[] a_shape, Tensor[] b, str b_quantizer, SymInt[] "
    "b_shape, str layout, ScalarType dtype, Tensor? bias=None, str backend='auto', bool "
    "fast=False) -> Tensor",
    GemmArgs,
    _gemm_alloc,
    _gemm_fill,
)
"""Multiply two operands: the buffers of a quantized tensor, or (quantizer "") one tensor."""

LIBRARY.define(
    "gemm_tensor(Tensor a, Tensor b, str layout, ScalarType? dtype=None, Tensor? bias=None) -> "
    "Tensor"
)


def _gemm_plain(
    a: Tensor, b: Tensor, layout: str, dtype: torch.dtype | None = None, bias: Tensor | None = None
) -> Tensor:
    """Multiply two plain tensors. A subclass answers the op in its dispatch table instead."""
    if a is None or b is None:
        fail("gemm", "a and b must be tensors", None, "Pass both", ArgumentTypeError)
    check_layout(layout)
    check_operands(None, a.shape, None, b.shape, layout)
    return GEMM([a], "", a.shape, [b], "", b.shape, layout, dtype or a.dtype, bias)


LIBRARY.impl("gemm_tensor", _gemm_plain, "CompositeExplicitAutograd")


def _gemm_tensor_fake(
    a: Tensor, b: Tensor, layout: str, dtype: torch.dtype | None = None, bias: Tensor | None = None
) -> Tensor:
    check_one_device("gemm", a, b, bias)
    shape = output_shape(a.shape, b.shape, layout)
    return torch.empty(shape, dtype=dtype or a.dtype, device=a.device)


torch.library.register_fake("qtensor::gemm_tensor", _gemm_tensor_fake, lib=LIBRARY)
GEMM_TENSOR = torch.ops.qtensor.gemm_tensor.default
"""``gemm`` over tensors themselves, so that one made inside a compiled region can be an operand."""


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, layout, _, bias = (*inputs, None, None)[:5]
    ctx.save_for_backward(a, b)
    ctx.layout = layout
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)


def _gemm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients: products of ``grad`` with the value of the other operand."""
    a, b = ctx.saved_tensors
    d_a = d_b = d_bias = None
    if ctx.needs_input_grad[0]:
        left, right, layout = {"TN": (grad, b, "NN"), "NN": (grad, b, "TN"), "NT": (b, grad, "TN")}[
            ctx.layout
        ]
        d_a = GEMM_TENSOR(left, right, layout, a.dtype)
    if ctx.needs_input_grad[1]:
        if b.ndim == 2:
            # One matrix serves a whole batch: its gradient sums over it.
            a, grad_b = _fold(a, ctx.layout), _fold(grad, ctx.layout)
        else:
            grad_b = grad
        left, right, layout = {
            "TN": (grad_b, a, "NT"),
            "NN": (a, grad_b, "NT"),
            "NT": (a, grad_b, "NN"),
        }[ctx.layout]
        d_b = GEMM_TENSOR(left, right, layout, b.dtype)
    if ctx.bias is not None and ctx.needs_input_grad[4]:
        shape, dtype = ctx.bias
        d_bias = grad.float().sum_to_size(shape).to(dtype)
    return d_a, d_b, None, None, d_bias


def _fold(t: Tensor, layout: str) -> Tensor:
    return t if layout == "NT" or t.ndim == 2 else t.reshape(-1, t.shape[-1])


torch.library.register_autograd(
    "qtensor::gemm_tensor", _gemm_backward, setup_context=_save_operands, lib=LIBRARY
)
