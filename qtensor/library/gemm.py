"""Define the ops that multiply: ``gemm`` and ``weight_gemm`` of buffers, ``gemm_tensor``."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.errors import ArgumentTypeError, DtypeError, check, fail
from qtensor.core.operand import Operand, plain_operand
from qtensor.core.quantizer_registry import QuantizerLike
from qtensor.core.torch_state import without_autocast
from qtensor.kernels.products.problem import Pair, Product
from qtensor.library.checks import check_operand
from qtensor.library.define import (
    FILLS,
    LIBRARY,
    SymInt,
    check_one_device,
    empty,
    leaf_op,
)
from qtensor.reference.denormals import denormals_kept

LAYOUTS = ("TN", "NN", "NT")
"""Layouts of a product, named as in column-major GEMMs.

TN: ``a @ b.T`` (fprop, both rowwise). NN: ``a @ b`` (dgrad, a rowwise, b columnwise). NT:
``a.T @ b`` (wgrad, both columnwise).
"""


def output_shape(a_shape: Shape, b_shape: Shape, layout: str) -> tuple[int, ...]:
    """Return the shape of the product of operands with logical shapes ``a_shape``, ``b_shape``.

    Raises:
        QTensorError: an operand has too few dimensions.
    """
    if len(b_shape) < 2 or len(a_shape) < (2 if layout == "NT" else 1):
        check_operands(None, a_shape, None, b_shape, layout)
    if layout == "TN":
        return (*a_shape[:-1], b_shape[-2])
    if layout == "NN":
        return (*a_shape[:-1], b_shape[-1])
    return (*a_shape[:-2], a_shape[-1], b_shape[-1])


class GemmArgs(NamedTuple):
    """Arguments of the op ``gemm``."""

    operands: Pair
    layout: str
    dtype: torch.dtype
    bias: Tensor | None = None
    backend: str = "auto"
    fast: bool = False


def _gemm_alloc(args: GemmArgs) -> Tensor:
    a, b = args.operands
    check_layout(args.layout)
    has_both = bool(a.buffers and b.buffers)
    check(has_both, "gemm", "operands have buffers", "none", "Pass their buffers")
    check_operands(a.quantizer, a.shape, b.quantizer, b.shape, args.layout)
    shape = output_shape(a.shape, b.shape, args.layout)
    if args.bias is not None:
        check_bias(args.bias.shape, shape)
    return empty(a.buffers[0], shape, args.dtype)


def check_product(pair: Pair, layout: str, bias: Tensor | None = None) -> None:
    """Refuse real operands whose buffers, sizes or bias do not fit each other.

    Raises:
        QTensorError: the message names what does not fit.
    """
    a, b = pair
    check_operands(a.quantizer, a.shape, b.quantizer, b.shape, layout)
    check_operand("gemm", a)
    check_operand("gemm", b)
    if bias is not None:
        check_bias(bias.shape, output_shape(a.shape, b.shape, layout))
        fix = "Pass its real part"
        check(not bias.is_complex(), "gemm", "the bias must be real", bias.dtype, fix, DtypeError)


def _gemm_fill(out: Tensor, args: GemmArgs) -> None:
    check_product(args.operands, args.layout, args.bias)
    # Only a product needs the backends.
    from qtensor.kernels.products import choice  # noqa: PLC0415

    # torch.autocast would round operands to its dtype, in eager code alone.
    with without_autocast(), denormals_kept():
        product = Product(args.operands, args.layout, args.bias, args.backend, args.fast)
        choice.multiply_(out, product)


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
        got = f"{tuple(bias_shape)} for {tuple(out_shape)}"
        fail("gemm", "the bias must broadcast to the product", got, "Fix the argument")


def check_layout(layout: object) -> None:
    """Refuse a layout that does not exist.

    Raises:
        QTensorError: the message lists the layouts.
    """
    if not isinstance(layout, str) or layout not in LAYOUTS:
        rule = f"layout must be one of {', '.join(LAYOUTS)}"
        fail("gemm", rule, repr(layout), "Choose one of them")


def _broken_rule(a_shape: Shape, b_shape: Shape, layout: str) -> tuple[str, str] | None:
    """Return the rule that the shapes break and the way out; None if they fit each other."""
    if len(b_shape) < 2 or len(a_shape) < (2 if layout == "NT" else 1):
        return "operands must be matrices or batches of them", "Add a dim with unsqueeze(0)"
    if len(b_shape) > 2 and tuple(a_shape[:-2]) != tuple(b_shape[:-2]):
        fix = "Use torch.matmul, which repeats a batch"
        return "both operands must have the same batch dims, or b none", fix
    left = a_shape[-2] if layout == "NT" else a_shape[-1]
    right = b_shape[-1] if layout == "TN" else b_shape[-2]
    if left != right:
        rule = f"{_CONTRACTED[layout]} must be equal ({layout})"
        return rule, "Transpose one operand or fix the shapes"
    return None


def check_operands(
    a: QuantizerLike | None, a_shape: Shape, b: QuantizerLike | None, b_shape: Shape, layout: str
) -> None:
    """Refuse operands whose sizes do not meet or whose blocks do not run along the contraction.

    Raises:
        QTensorError: with the rule that is broken and the way out.
    """
    broken = _broken_rule(a_shape, b_shape, layout)
    if broken is not None:
        formats = ", ".join([quantizer.format for quantizer in (a, b) if quantizer is not None])
        got = f"a {tuple(a_shape)}, b {tuple(b_shape)}"
        fail(f"gemm[{formats}]" if formats else "gemm", broken[0], got, broken[1])
    if a is None or b is None:
        return
    for name, quantizer, columnwise in (("a", a, layout == "NT"), ("b", b, layout != "TN")):
        usage = "columnwise" if columnwise else "rowwise"
        check(
            getattr(quantizer, usage) or quantizer.spec.transpose_shares_bytes,
            f"gemm[{quantizer.format}]",
            f"operand {name} needs {usage} data, whose blocks run along the contraction",
            f"rowwise={quantizer.rowwise}, columnwise={quantizer.columnwise}",
            f"Quantize it with {usage}=True",
        )


GEMM = leaf_op("gemm", GemmArgs, "Tensor", _gemm_alloc, _gemm_fill)
"""Multiply two operands: the buffers of a quantized tensor, or (quantizer "") one tensor."""


class _WeightGemmArgs(NamedTuple):
    x: Tensor
    weight: list[Tensor]
    quantizer: str
    n: SymInt
    bias: Tensor | None = None
    layout: str = "TN"


def _weight_gemm_alloc(args: _WeightGemmArgs) -> Tensor:
    rule = "layout must be TN or NN"
    check(args.layout in ("TN", "NN"), "weight_gemm", rule, repr(args.layout), "Choose one of them")
    return empty(args.x, (*args.x.shape[:-1], args.n))


def _weight_gemm_fill(out: Tensor, args: _WeightGemmArgs) -> None:
    x, weight, quantizer, n, bias, layout = args
    shape = (n, *x.shape[-1:]) if layout == "TN" else (*x.shape[-1:], n)
    pair = Pair(plain_operand(x), Operand(weight, quantizer, shape))
    FILLS["gemm"](out, GemmArgs(pair, layout, x.dtype, bias))


WEIGHT_GEMM = leaf_op(
    "weight_gemm", _WeightGemmArgs, "Tensor", _weight_gemm_alloc, _weight_gemm_fill
)
"""``gemm`` of plain x (..., K) and a quantized weight: (N, K), or (K, N) in layout NN.

A call has half the arguments of ``gemm``: small products are a hot path, and passing arguments is
most of their time. The dtype of the result is that of x.
"""

LIBRARY.define(
    "gemm_tensor(Tensor a, Tensor b, str layout, ScalarType? dtype=None, Tensor? bias=None) -> "
    "Tensor"
)


def gemm_plain(
    a: Tensor, b: Tensor, layout: str, dtype: torch.dtype | None = None, bias: Tensor | None = None
) -> Tensor:
    """Multiply two plain tensors. A subclass answers the op in its dispatch table instead."""
    if a is None or b is None:
        fail("gemm", "a and b must be tensors", None, "Pass both", ArgumentTypeError)
    check_layout(layout)
    check_operands(None, a.shape, None, b.shape, layout)
    return GEMM(*plain_operand(a), *plain_operand(b), layout, dtype or a.dtype, bias)


LIBRARY.impl("gemm_tensor", gemm_plain, "CompositeExplicitAutograd")


def _gemm_tensor_fake(
    a: Tensor, b: Tensor, layout: str, dtype: torch.dtype | None = None, bias: Tensor | None = None
) -> Tensor:
    check_one_device("gemm", a, b, bias)
    shape = output_shape(a.shape, b.shape, layout)
    return torch.empty(shape, dtype=dtype or a.dtype, device=a.device)


torch.library.register_fake("qtensor::gemm_tensor", _gemm_tensor_fake, lib=LIBRARY)
GEMM_TENSOR = torch.ops.qtensor.gemm_tensor.default
"""``gemm`` over tensors themselves, so that one made inside a compiled region can be an operand."""


class _GemmContext(Protocol):
    """What ``gemm_tensor`` keeps for backward: both operands, layout, and facts about the bias."""

    layout: str
    bias: tuple[torch.Size, torch.dtype] | None
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def _save_operands(ctx: _GemmContext, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, layout, _, bias = (*inputs, None, None)[:5]
    ctx.save_for_backward(a, b)
    ctx.layout = layout
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)


def _gemm_backward(ctx: _GemmContext, grad: Tensor) -> tuple[Tensor | None, ...]:
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
