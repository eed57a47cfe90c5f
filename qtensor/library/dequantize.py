"""The ops that decode: ``dequantize`` over buffers, ``dequantize_tensor`` over a subclass."""

from __future__ import annotations

from typing import NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.errors import DtypeError, fail
from qtensor.core.operand import Operand
from qtensor.core.quantizer_registry import by_name, check_buffers, parse
from qtensor.kernels import table
from qtensor.library.define import LIBRARY, Written, empty, leaf_op, no_outputs
from qtensor.reference.denormals import denormals_kept


def refuse_dtype(format_name: str, dtype: object) -> NoReturn:
    """Raise the error that lists the dtypes of results.

    Raises:
        DtypeError: always.
    """
    is_dtype = isinstance(dtype, torch.dtype)
    fail(
        f"dequantize[{format_name}]",
        "the result's dtype must be float64, float32, bfloat16 or float16",
        dtype if is_dtype else repr(dtype),
        "Dequantize to float32 and convert that"
        if is_dtype
        else "Pass a dtype, for example torch.float32",
        DtypeError,
    )


def check_dtype(dtype: torch.dtype, quantizer: str) -> None:
    """Refuse a dtype to which a format is not decoded.

    Raises:
        DtypeError: the message lists the dtypes.
    """
    if not dtype.is_floating_point or dtype.itemsize == 1:
        refuse_dtype(parse(quantizer).format, dtype)


class DequantizeArgs(NamedTuple):
    """Arguments of the op ``dequantize``."""

    buffers: list[Tensor]
    quantizer: str
    shape: Shape
    dtype: torch.dtype


def _dequantize_alloc(args: DequantizeArgs) -> Tensor:
    check_dtype(args.dtype, args.quantizer)
    if not args.buffers:
        count = len(parse(args.quantizer).slots)
        fail("dequantize", f"the quantizer has {count} buffers", 0, "Pass tensor.buffers()")
    return empty(args.buffers[0], tuple(args.shape), args.dtype)


def _dequantize_fill(out: Tensor, args: DequantizeArgs) -> None:
    quantizer = parse(args.quantizer)
    has_all = len(args.buffers) == len(quantizer.slots)
    if has_all and table.dequantize_(quantizer, args.buffers, args.shape, out):
        return
    op = f"dequantize[{quantizer.format}]"
    check_buffers(op, quantizer, args.buffers, args.shape)
    values = table.decode_rows(Operand(args.buffers, args.quantizer, args.shape), out.dtype)
    if values is not None:
        out.copy_(values)
        return
    with denormals_kept():
        out.copy_(quantizer.decode(by_name(quantizer, args.buffers), tuple(args.shape)))


DEQUANTIZE = leaf_op("dequantize", DequantizeArgs, "Tensor", _dequantize_alloc, _dequantize_fill)
"""Decode inner buffers to a tensor of ``shape`` and ``dtype``, rounded once from float32."""


class _DequantizeInPlaceArgs(NamedTuple):
    buffers: list[Tensor]
    quantizer: str
    shape: Shape
    out: Written


def _dequantize_inplace_fill(_: None, args: _DequantizeInPlaceArgs) -> None:
    check_dtype(args.out.dtype, args.quantizer)
    if args.out.shape != tuple(args.shape):
        rule = f"out must have the shape {tuple(args.shape)}"
        fail("dequantize_", rule, tuple(args.out.shape), "Pass a tensor of that shape")
    same = DequantizeArgs(args.buffers, args.quantizer, args.shape, args.out.dtype)
    _dequantize_fill(args.out, same)


DEQUANTIZE_ = leaf_op(
    "dequantize_", _DequantizeInPlaceArgs, "()", no_outputs, _dequantize_inplace_fill
)
"""Dequantize into an existing tensor of the logical shape."""

LIBRARY.define("dequantize_tensor(Tensor x, ScalarType? dtype=None) -> Tensor")


def _plain(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy of a plain tensor of any shape in ``dtype``.

    A subclass answers the op in its dispatch table instead.
    """
    return torch.empty_like(x, dtype=dtype or x.dtype).copy_(x)


LIBRARY.impl("dequantize_tensor", _plain, "CompositeExplicitAutograd")
torch.library.register_fake(
    "qtensor::dequantize_tensor",
    lambda x, dtype=None: torch.empty_like(x, dtype=dtype),
    lib=LIBRARY,
)


class _DtypeContext(Protocol):
    """What ``dequantize_tensor`` keeps for backward: the nominal dtype of its input."""

    dtype: torch.dtype


def _straight_through(ctx: _DtypeContext, grad: Tensor) -> tuple[Tensor, None]:
    return grad.to(ctx.dtype), None


def _keep_dtype(ctx: _DtypeContext, inputs: tuple[Tensor, object], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype


torch.library.register_autograd(
    "qtensor::dequantize_tensor", _straight_through, setup_context=_keep_dtype, lib=LIBRARY
)
DEQUANTIZE_TENSOR = torch.ops.qtensor.dequantize_tensor.default
"""Decode a quantized tensor to ``dtype`` (None: its nominal dtype); the gradient is unchanged.

The op takes the subclass itself, so that a tensor made inside a compiled region can be decoded too:
Dynamo sees one opaque call, and the subclass answers below it.
"""
