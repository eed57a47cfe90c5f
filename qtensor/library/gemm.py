"""The quantized matmul op, with the reference backend."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from qtensor.errors import check, fail
from qtensor.kernels import table
from qtensor.kernels.cpu.native import Part
from qtensor.layout import Shape
from qtensor.library import tiles
from qtensor.library.checks import check_buffers
from qtensor.library.codec import Codec, by_name, parse
from qtensor.library.define import LIBRARY, below_autograd, check_one_device, leaf_op
from qtensor.library.dequantize import decode_turned, turned
from qtensor.reference.gemm import matmul, matmul_

LAYOUTS = ("TN", "NN", "NT")
"""TN: ``a @ b.T`` (fprop, both rowwise). NN: ``a @ b`` (dgrad, a rowwise, b columnwise). NT: ``a.T @ b`` (wgrad,
both columnwise). The letters are the field's: the operand that is transposed in a column-major GEMM."""


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


def _gemm_alloc(args: GemmArgs) -> Tensor:
    check_layout(args.layout)
    check(bool(args.a and args.b), "gemm", "operands have buffers", "none", "Pass their buffers")
    try:
        shape = output_shape(args.a_shape, args.b_shape, args.layout)
    except IndexError:
        check_operands(None, args.a_shape, None, args.b_shape, args.layout)
        raise
    return torch.empty(shape, dtype=args.dtype, device=args.a[0].device)


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
    if not out.is_cpu:
        # Only products on other devices need what chooses among their kernels.
        from qtensor.library import backends  # noqa: PLC0415

        with below_autograd(), torch._C._DisableAutocast():
            if backends.multiply_(out, *args[:7], args.bias):
                return
    fill_by_decoding(out, *args)


def fill_by_decoding(
    out: Tensor,
    a: list[Tensor],
    a_quantizer: str,
    a_shape: Shape,
    b: list[Tensor],
    b_quantizer: str,
    b_shape: Shape,
    layout: str,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> None:
    """The backend "reference": decoded operands, multiplied in float32."""
    # torch.autocast would round them to its dtype, in eager code alone.
    with below_autograd(), torch._C._DisableAutocast():
        if _fill_by_tiles(out, a, a_quantizer, a_shape, b, b_quantizer, b_shape, layout, bias):
            return
        left, right, factor = _decode_operands(
            a, a_quantizer, a_shape, b, b_quantizer, b_shape, layout
        )
        left = left.mT if layout == "NT" else left
        right = right.mT if layout == "TN" else right
        if out.dtype == torch.float32 and out.ndim == left.ndim == right.ndim == 2:
            matmul_(out, left, right, factor, bias)
        else:
            out.copy_(matmul(left, right, factor, bias))


def _fill_by_tiles(
    out: Tensor,
    a: list[Tensor],
    a_quantizer: str,
    a_shape: Shape,
    b: list[Tensor],
    b_quantizer: str,
    b_shape: Shape,
    layout: str,
    bias: Tensor | None,
) -> bool:
    """The product with a large weight whose rows are at hand; False for any other, with nothing written."""
    if layout == "NT" or not out.is_cpu or (bias is not None and bias.ndim > 1):
        return False
    weight = _weight(b, b_quantizer, tuple(b_shape), layout, bool(a_quantizer))
    if weight is None:
        return False
    codec = parse(a_quantizer) if a_quantizer else None
    if codec is not None and not codec.rowwise:
        return False
    return tiles.multiply_(out, tiles.Operand(codec, a, tuple(a_shape)), weight, bias)


def _weight(
    buffers: list[Tensor], quantizer: str, shape: tuple[int, ...], layout: str, both: bool
) -> tiles.Operand | None:
    """``b`` of a product as the rows (N, K) that its columns are: in layout TN, or behind ``t()``.

    Args:
        buffers: of ``b``.
        quantizer: of ``b``.
        shape: of ``b``.
        layout: of the product.
        both: both operands are quantized, so that the side whose blocks run along the contraction counts.
    """
    if not quantizer or not tiles.is_large(shape):
        return None
    codec = parse(quantizer)
    if layout == "TN":
        served = codec.rowwise if both else codec.side() == "_rowwise"
        return tiles.Operand(codec, buffers, (shape[0], shape[1])) if served else None
    if not (codec.columnwise if both else codec.side() == "_columnwise"):
        return None
    twin, rows = turned(codec, buffers)
    return tiles.Operand(twin, rows, (shape[1], shape[0])) if twin.rowwise else None


def _decode_operands(
    a: list[Tensor],
    a_quantizer: str,
    a_shape: Shape,
    b: list[Tensor],
    b_quantizer: str,
    b_shape: Shape,
    layout: str,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Both operands in float32, and the product of the factors that go to the end."""
    left, right = (parse(q) if q else None for q in (a_quantizer, b_quantizer))
    # One operand quantized: its value counts, whichever side holds it. Both: the sides whose blocks run along the
    # contraction.
    both = left is not None and right is not None
    a_values, a_factor = _values(left, a, a_shape, layout == "NT" if both else None)
    b_values, b_factor = _values(right, b, b_shape, layout != "TN" if both else None)
    if a_factor is None or b_factor is None:
        return a_values, b_values, b_factor if a_factor is None else a_factor
    return a_values, b_values, a_factor * b_factor


@functools.cache
def _part(columnwise: bool | None, codes_only: bool) -> Part:
    return Part(columnwise=columnwise, codes_only=codes_only)


def _values(
    codec: Codec | None, buffers: list[Tensor], shape: Shape, columnwise: bool | None
) -> tuple[Tensor, Tensor | None]:
    """Float32 values of an operand; one factor for the whole tensor is kept out of them."""
    if codec is None:
        return buffers[0].float(), None
    size = tuple(shape)
    values = torch.empty(size, dtype=torch.float32, device=buffers[0].device)
    part = _part(columnwise, codec.per_tensor)
    if table.dequantize_(codec, buffers, size, values, part):
        return values, by_name(codec, buffers)["_scale_inv"] if codec.per_tensor else None
    if (
        len(size) == 2
        and (values_t := decode_turned(codec, buffers, size, torch.float32)) is not None
    ):
        return values_t, None
    named = by_name(codec, buffers)
    if codec.per_tensor:
        return codec.decode_codes(named, size)
    return codec.decode(named, size, columnwise), None


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
            "Mend it",
        )


def _refuse(
    a: Codec | None, a_shape: Shape, b: Codec | None, b_shape: Shape, rule: str, fix: str
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
    a: Codec | None, a_shape: Shape, b: Codec | None, b_shape: Shape, layout: str
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
        _refuse(a, a_shape, b, b_shape, rule, "Transpose one operand or mend the shapes")
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
    "gemm(Tensor[] a, str a_quantizer, SymInt[] a_shape, Tensor[] b, str b_quantizer, SymInt[] b_shape, "
    "str layout, ScalarType dtype, Tensor? bias=None) -> Tensor",
    GemmArgs,
    _gemm_alloc,
    _gemm_fill,
)
"""Product of two operands, each the buffers of a quantized tensor or (quantizer "") one plain tensor."""

LIBRARY.define(
    "gemm_tensor(Tensor a, Tensor b, str layout, ScalarType? dtype=None, Tensor? bias=None) -> Tensor"
)


def _gemm_plain(
    a: Tensor, b: Tensor, layout: str, dtype: torch.dtype | None = None, bias: Tensor | None = None
) -> Tensor:
    """For two plain tensors. A subclass answers the op in its dispatch table instead."""
    if layout not in LAYOUTS:
        refuse_layout(layout)
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
    """The products of the other two layouts, with the gradient in high precision and the other operand's value."""
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
