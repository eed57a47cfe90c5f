"""The one-line API."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from qtensor.errors import DtypeError, QTensorError, check, fail

# Nothing here calls it; importing it registers the ops of norms and activations.
from qtensor.library import fused as _fused  # noqa: F401
from qtensor.library.codec import codec_class, codec_names
from qtensor.library.constant import compile_constant
from qtensor.library.dequantize import DEQUANTIZE_
from qtensor.quantizers import Quantizer
from qtensor.quantizers.autograd import quantize_traced
from qtensor.quantizers.options import CALL_ARGUMENTS, GIVEN
from qtensor.storage.base import QuantizedTensorStorage

Format = str | Quantizer


def formats() -> tuple[str, ...]:
    """The ids of all registered formats: ``"fp8"``, ``"mxfp8"``, ``"nvfp4"`` and so on."""
    return codec_names()


def quantizer(fmt: Format, **options: Any) -> Quantizer:
    """The quantizer of a format.

    Args:
        fmt: a format id, or a quantizer (then ``options`` replace some of its own).
        **options: as in the quantizer's class docstring: ``rowwise``, ``columnwise``, ``dtype``, ``scale_mode`` ...

    Returns:
        A frozen value: hashable, equal by value.

    Raises:
        QTensorError: unknown format or option; the message lists the known ones.
    """
    if isinstance(fmt, Quantizer):
        return type(fmt)(**{**fmt.given_options(), **options}) if options else fmt
    if not isinstance(fmt, str):
        is_class = isinstance(fmt, type) and issubclass(fmt, Quantizer)
        fix = f"Call it: {fmt.__name__}()" if is_class else f"Choose one of: {', '.join(formats())}"
        fail(
            "quantizer",
            "the format is an id or a quantizer",
            "a tensor" if isinstance(fmt, torch.Tensor) else repr(fmt),
            fix,
            DtypeError,
        )
    cls = codec_class(fmt)
    # Dynamo builds the value itself: it would warn of a cache in what it traces.
    if not torch.compiler.is_compiling():
        try:
            return _built(cls, **options)
        except TypeError:
            pass  # no hash, or an error that is raised again below
    return cls(**options)


@functools.lru_cache(maxsize=1024, typed=True)
def _built(cls: type[Quantizer], **options: Any) -> Quantizer:
    """Values that are equal may be one object; by type too, since ``1`` is no legal ``True``."""
    return cls(**options)


def _pop_call(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the call, out of the options."""
    return {name: options.pop(name) for name in CALL_ARGUMENTS if name in options}


@compile_constant
def _text(fmt: str, *options: tuple[str, bool | str]) -> str | None:
    """The canonical text, a constant of a compiled region; None where there is an error to raise."""
    try:
        return quantizer(fmt, **dict(options)).canonical
    except QTensorError:
        return None


def _text_of(fmt: str, options: dict[str, Any]) -> str | None:
    """``_text``, or None where an option is a number: it may be a symbol."""
    for value in options.values():
        if type(value) is not bool and type(value) is not str:
            return None
    return _text(fmt, *options.items())


def quantize(x: Tensor, fmt: Format, **options: Any) -> Any:
    """Quantize a tensor: ``qtensor.quantize(x, "nvfp4")``.

    Args:
        x: 0-d to n-d; float32, bfloat16 or float16; any strides; any device. One that is quantized in another way is
            dequantized first.
        fmt: a format id (see ``formats``) or a quantizer.
        **options: the format's options, and the arguments of the call: ``out``, ``scale``, ``generator``,
            ``amax_reduction_group``, ``noop_flag`` (see ``Quantizer.quantize``).

    Returns:
        A tensor subclass of the shape and dtype of ``x``. Gradients pass straight through.

    Raises:
        QTensorError: bad format, option, dtype or argument.
    """
    call = _pop_call(options) if options else {}
    if is_compiling() and isinstance(fmt, str) and "out" not in call:
        text = _text_of(fmt, options) if options else _text(fmt)
        if text is not None:
            given = [call.get(name) for name in GIVEN] if call else (None, None, None, None)
            return quantize_traced(text, x, *given)
    return quantizer(fmt, **options).quantize(x, **call)


def dequantize(
    q: Tensor | QuantizedTensorStorage,
    dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The values of a quantized tensor or storage as a plain tensor.

    Args:
        q: quantized; a plain tensor is copied.
        dtype: of the result; the nominal dtype if None.
        out: write into this plain tensor of the same shape instead; its dtype counts.

    Raises:
        QTensorError: ``out`` has another shape, or ``q`` is no tensor.
    """
    for value in (dtype, out):
        if value is not None and not isinstance(value, torch.dtype | torch.Tensor):
            fail(
                "dequantize",
                "dtype= is a torch.dtype and out= a tensor",
                repr(value),
                "Pass torch.float32, say",
                DtypeError,
            )
    if isinstance(q, QuantizedTensorStorage) and out is not None:
        return _dequantize_into(q, out)
    if isinstance(q, QuantizedTensorStorage):
        values = q.dequantize(dtype)
    elif isinstance(q, torch.Tensor):
        values = torch.ops.qtensor.dequantize_tensor(q, dtype if out is None else out.dtype)
    else:
        fail(
            "dequantize",
            "a quantized tensor or storage is needed",
            type(q).__name__,
            "Quantize it first",
            DtypeError,
        )
    return values if out is None else _same_shape(q, out).copy_(values)


def _same_shape(q: Any, out: Tensor) -> Tensor:
    check(
        out.shape == q.shape,
        "dequantize",
        "out must have the tensor's shape",
        f"{tuple(out.shape)} for {tuple(q.shape)}",
        "Resize it",
    )
    return out


def _dequantize_into(q: QuantizedTensorStorage, out: Tensor) -> Tensor:
    """Straight into ``out``, where it is a plain tensor that a decode can write; by way of a copy elsewhere."""
    _same_shape(q, out)
    if isinstance(out, QuantizedTensorStorage) or out.device != q.device or out.requires_grad:
        return out.copy_(q.dequantize(torch.float32))
    DEQUANTIZE_(q.buffers(), q._quantizer.canonical, q.shape, out)
    return out
