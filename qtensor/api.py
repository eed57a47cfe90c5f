"""Define the functions that quantize and dequantize in one line."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from qtensor.core.compile_constants import compile_constant
from qtensor.core.errors import ArgumentTypeError, QTensorError, check, fail
from qtensor.core.quantizer_registry import format_names, parse, quantizer_class
from qtensor.library.dequantize import DEQUANTIZE_
from qtensor.quantizers import Quantizer
from qtensor.quantizers.call import (
    QuantizerConstants,
    constants_of,
    quantize_call,
    refuse_gradient,
)
from qtensor.quantizers.options import CALL_ARGUMENTS
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.storage.tensor import QuantizedTensor

Format = str | Quantizer


def parsed(canonical: str) -> Quantizer:
    """Return the quantizer of a canonical text such as ``"mxfp6(packed=True)"``."""
    return cast(Quantizer, parse(canonical))


def quantizer_of(q: QuantizedTensorStorage) -> Quantizer:
    """Return the quantizer of a tensor or storage, as a value with the options of its format."""
    return cast(Quantizer, q._quantizer)


def formats() -> tuple[str, ...]:
    """Return the ids of all registered formats: ``"fp8"``, ``"mxfp8"``, ``"nvfp4"`` and so on."""
    return format_names()


def quantizer(fmt: Format, **options: Any) -> Quantizer:
    """Return the quantizer of a format.

    Args:
        fmt: a format id, or a quantizer.
        **options: options of the format, for example ``rowwise``, ``columnwise``, ``dtype`` or
            ``scale_mode``; the docstring of the quantizer's class lists them. They replace the
            options of a quantizer ``fmt``.

    Returns:
        An immutable object, which is hashable and compares by value.

    Raises:
        QTensorError: the format or an option is unknown; the message lists the known ones.
    """
    if isinstance(fmt, Quantizer):
        return type(fmt)(**{**fmt.changed_options(), **options}) if options else fmt
    if not isinstance(fmt, str):
        is_class = isinstance(fmt, type) and issubclass(fmt, Quantizer)
        fix = f"Call it: {fmt.__name__}()" if is_class else f"Choose one of: {', '.join(formats())}"
        rule = "the format is an id or a quantizer"
        got = "a tensor" if isinstance(fmt, torch.Tensor) else repr(fmt)
        fail("quantizer", rule, got, fix, ArgumentTypeError)
    cls = quantizer_class(fmt)
    # Dynamo warns about a cache in traced code, so a traced call does not use the cache.
    if not torch.compiler.is_compiling():
        try:
            return _built(cls, **options)
        except TypeError:
            pass  # An option has no hash, or the line below raises the error again.
    return cls(**options)


@functools.lru_cache(maxsize=1024, typed=True)
def _built(cls: type[Quantizer], **options: Any) -> Quantizer:
    """Return a cached quantizer; ``typed`` tells ``1`` from the legal ``True``."""
    return cls(**options)


def _pop_call(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the arguments of the call from ``options`` and return them."""
    return {name: options.pop(name) for name in CALL_ARGUMENTS if name in options}


@compile_constant
def _constants(fmt: str, *options: tuple[str, bool | str]) -> QuantizerConstants | None:
    """Return the constants of a quantizer for compiled code; None if eager code raises."""
    try:
        return constants_of(quantizer(fmt, **dict(options)).canonical)
    except QTensorError:
        return None


def _traced_constants(fmt: str, options: dict[str, Any]) -> QuantizerConstants | None:
    """Return the constants, or None if an option is a number, which may be symbolic."""
    for value in options.values():
        if type(value) is not bool and type(value) is not str:
            return None
    return _constants(fmt, *options.items())


def quantize(x: Tensor, fmt: Format, **options: Any) -> QuantizedTensor:
    """Return a quantized tensor, for example ``qtensor.quantize(x, "nvfp4")``.

    Args:
        x: any shape, strides and device; float32, bfloat16 or float16. A tensor with another
            quantizer is dequantized first.
        fmt: a format id (see ``formats``) or a quantizer.
        **options: options of the format, and arguments of ``Quantizer.quantize``: ``out``,
            ``scale``, ``generator``, ``amax_reduction_group`` and ``noop_flag``.

    Returns:
        A tensor subclass with the shape and dtype of ``x``. Its gradient is the gradient of ``x``.

    Raises:
        QTensorError: a format, option, dtype or argument is wrong.
    """
    call = _pop_call(options) if options else {}
    if is_compiling() and isinstance(fmt, str) and "out" not in call:
        constants = _traced_constants(fmt, options) if options else _constants(fmt)
        if constants is not None:
            scale, generator = call.get("scale"), call.get("generator")
            group, noop_flag = call.get("amax_reduction_group"), call.get("noop_flag")
            return quantize_call(constants, x, scale, generator, group, noop_flag)[0]
    return quantizer(fmt, **options).quantize(x, **call)


def dequantize(
    q: Tensor | QuantizedTensorStorage,
    dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the values of a quantized tensor or storage as a plain tensor.

    Args:
        q: quantized tensor or storage of any shape; a plain tensor is copied.
        dtype: dtype of the result; the nominal dtype if None.
        out: plain tensor of the same shape, in which the values are written and which is returned;
            its dtype replaces ``dtype``.

    Raises:
        QTensorError: ``out`` has another shape; ``q`` is not a tensor, or its gradient would be
            lost in ``out``.
    """
    for name, value, kind in (("dtype", dtype, torch.dtype), ("out", out, torch.Tensor)):
        if value is not None and not isinstance(value, kind):
            rule = "dtype= is a torch.dtype and out= a tensor"
            got = f"{name}={'a tensor' if isinstance(value, torch.Tensor) else repr(value)}"
            fix = "Pass one, for example dtype=torch.float32"
            fail("dequantize", rule, got, fix, ArgumentTypeError)
    if isinstance(q, QuantizedTensorStorage) and out is not None:
        refuse_gradient("dequantize", q)
        return _dequantize_into(q, out)
    if isinstance(q, QuantizedTensorStorage):
        values = q.dequantize(dtype)
    elif isinstance(q, torch.Tensor):
        values = torch.ops.qtensor.dequantize_tensor(q, dtype if out is None else out.dtype)
    else:
        rule, got = "a quantized tensor or storage is needed", type(q).__name__
        fail("dequantize", rule, got, "Quantize it first", ArgumentTypeError)
    return values if out is None else _same_shape(q, out).copy_(values)


def _same_shape(q: Tensor | QuantizedTensorStorage, out: Tensor) -> Tensor:
    rule, got = "out must have the tensor's shape", f"{tuple(out.shape)} for {tuple(q.shape)}"
    check(out.shape == q.shape, "dequantize", rule, got, "Resize it")
    return out


def _dequantize_into(q: QuantizedTensorStorage, out: Tensor) -> Tensor:
    """Decode into ``out`` directly if it is plain and on the same device, else copy into it."""
    _same_shape(q, out)
    if isinstance(out, QuantizedTensorStorage) or out.device != q.device or out.requires_grad:
        return out.copy_(q.dequantize(torch.float32))
    DEQUANTIZE_(q.buffers(), q._quantizer.canonical, q.shape, out)
    return out
