"""Norms, activations and sums over rows by the CPU kernels. Each function is False, with nothing written, where it does not serve."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtensor.kernels.cpu import native

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ACTIVATIONS = {"gelu": 0, "qgelu": 1, "relu": 2, "silu": 3, "srelu": 4}
_GATED = {
    "geglu": 0,
    "qgeglu": 1,
    "reglu": 2,
    "swiglu": 3,
    "sreglu": 4,
    "glu": 5,
    "clamped_swiglu": 6,
}


Clamp = tuple[float, float, float, float]
"""The numbers of ``clamped_swiglu``: alpha, limit, offset, and 128 / alpha."""


@dataclass(frozen=True)
class Target:
    """What a fused kernel quantizes to.

    Attributes:
        codec: the quantizer.
        dtype: that the values are rounded to first.
        given: scale, maxima and seed of the call, as ``quantize`` takes them.
    """

    codec: Any
    dtype: torch.dtype
    given: tuple[Tensor | None, list[Tensor] | None, Tensor | None]


class _NormCall(ctypes.Structure):
    """``struct NormCall`` of plan.h, field by field."""

    _fields_ = (
        ("x", _POINTER),
        ("rows", _SIZE),
        ("cols", _SIZE),
        ("stride", _SIZE),
        ("y", _POINTER),
        ("y_stride", _SIZE),
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("mean", _POINTER),
        ("rstd", _POINTER),
        ("dx", _POINTER),
        ("dweight", _POINTER),
        ("dbias", _POINTER),
        ("y_dtype", _INT),
        ("weight_dtype", _INT),
        ("bias_dtype", _INT),
        ("zero_centered", _INT),
        ("threads", _INT),
        ("eps", ctypes.c_float),
    )


class _ActivationCall(ctypes.Structure):
    """``struct ActivationCall`` of plan.h, field by field."""

    _fields_ = (
        ("x", _POINTER),
        ("dy", _POINTER),
        ("out", _POINTER),
        ("rows", _SIZE),
        ("cols", _SIZE),
        ("stride", _SIZE),
        ("dy_stride", _SIZE),
        ("kind", _INT),
        ("gated", _INT),
        ("threads", _INT),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("offset", ctypes.c_float),
        ("bound", ctypes.c_float),
    )


def readable(*tensors: Tensor | None) -> Any:
    """The loaded kernels, or None where there are none or they cannot read a tensor."""
    for t in tensors:
        if t is not None and (type(t) not in native._PLAIN or not t.is_cpu):
            return None
    found = native.library()
    return None if isinstance(found, str) else found.handle


def _rows(t: Tensor) -> tuple[Tensor, int, int, int]:
    """A tensor as the kernels read it: not empty, rows contiguous; rows, columns, elements between rows."""
    cols = t.shape[-1]
    rows = t.numel() // cols
    if t.is_contiguous():
        return t, rows, cols, cols
    matrix = t if t.ndim == 2 else t.reshape(rows, cols)
    if matrix.stride(1) != 1 or matrix.stride(0) < cols:
        matrix = matrix.contiguous()
    return matrix, rows, cols, matrix.stride(0)


def _vector(t: Tensor | None) -> tuple[Tensor | None, int | None, int]:
    """A vector, contiguous, with its address and the code of its dtype."""
    if t is None:
        return None, None, 0
    t = t.contiguous()
    return t, t.data_ptr(), _DTYPES[t.dtype]


def _threads(count: int) -> int:
    return torch.get_num_threads() if count > native.ONE_THREAD else 1


def norm_call(
    outputs: tuple[Tensor | None, Tensor, Tensor],
    x: Tensor,
    vectors: tuple[Tensor | None, Tensor | None],
    settings: tuple[str, float, bool],
    dtype: torch.dtype,
) -> tuple[_NormCall, list[Tensor | None]]:
    """A norm as the kernels take it, and the tensors that it points into.

    Args:
        outputs: y, None where it is not kept; mean; rstd.
        x: not empty.
        vectors: weight and bias.
        settings: the kind, eps and whether the weight is centered at zero.
        dtype: of y.
    """
    y, mean, rstd = outputs
    kind, eps, zero_centered = settings
    matrix, rows, cols, stride = _rows(x)
    weight, weight_at, weight_dtype = _vector(vectors[0])
    bias, bias_at, bias_dtype = _vector(vectors[1])
    call = _NormCall(
        x=matrix.data_ptr(),
        rows=rows,
        cols=cols,
        stride=stride,
        y=None if y is None else y.data_ptr(),
        weight=weight_at,
        bias=bias_at,
        mean=mean.data_ptr() if kind == "layernorm" else None,
        rstd=rstd.data_ptr(),
        y_dtype=_DTYPES[dtype],
        weight_dtype=weight_dtype,
        bias_dtype=bias_dtype,
        zero_centered=zero_centered,
        threads=_threads(rows * cols),
        eps=eps,
    )
    return call, [matrix, weight, bias]


def norm_(
    outputs: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: tuple[str, float, bool],
) -> bool:
    """Write y, mean and rstd; ``settings`` as ``norm_call`` takes them."""
    handle = readable(x, weight, bias)
    if handle is None or not x.numel():
        return False
    call, _alive = norm_call(outputs, x, (weight, bias), settings, outputs[0].dtype)
    handle.qt_norm(ctypes.byref(call), _SIZE(_DTYPES[x.dtype]))
    return True


def norm_backward_(
    outputs: tuple[Tensor, Tensor, Tensor],
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    stats: tuple[Tensor | None, Tensor],
    zero_centered: bool,
) -> bool:
    """Write dx, dweight and dbias, the last two where they are not empty; the mean is None for RMSNorm."""
    mean, rstd = stats
    handle = readable(dy, x, weight, mean, rstd)
    if handle is None or not x.numel():
        return False
    dx, dweight, dbias = outputs
    matrix, rows, cols, stride = _rows(x)
    grad, _, _, grad_stride = _rows(dy)
    weight, weight_at, weight_dtype = _vector(weight)
    mean = None if mean is None else mean.contiguous()
    rstd = rstd.contiguous()
    call = _NormCall(
        x=matrix.data_ptr(),
        rows=rows,
        cols=cols,
        stride=stride,
        y=grad.data_ptr(),
        y_stride=grad_stride,
        weight=weight_at,
        mean=None if mean is None else mean.data_ptr(),
        rstd=rstd.data_ptr(),
        dx=dx.data_ptr(),
        dweight=dweight.data_ptr() if dweight.numel() else None,
        dbias=dbias.data_ptr() if dbias.numel() else None,
        y_dtype=_DTYPES[dy.dtype],
        weight_dtype=weight_dtype,
        bias_dtype=_DTYPES[dbias.dtype],
        zero_centered=zero_centered,
        threads=_threads(rows * cols),
    )
    handle.qt_norm(ctypes.byref(call), _SIZE(_DTYPES[x.dtype]))
    return True


def bias_grad_(out: Tensor, dy: Tensor) -> bool:
    """Write the sum of the rows."""
    handle = readable(dy)
    if handle is None or not dy.numel():
        return False
    matrix, rows, cols, stride = _rows(dy)
    call = _NormCall(
        x=matrix.data_ptr(),
        rows=rows,
        cols=cols,
        stride=stride,
        y=out.data_ptr(),
        threads=_threads(rows * cols),
    )
    handle.qt_sum_rows(ctypes.byref(call), _SIZE(_DTYPES[dy.dtype]))
    return True


def activation_call(
    out: Tensor | None, x: Tensor, kind: str, dy: Tensor | None, clamp: Clamp | None
) -> tuple[_ActivationCall, list[Tensor | None]]:
    """An activation, or a gradient where there is ``dy``, as the kernels take it, and the tensors that it points into."""
    alpha, limit, offset, bound = clamp or (0.0,) * 4
    matrix, rows, cols, stride = _rows(x)
    gated = kind in _GATED
    cols = cols // 2 if gated else cols
    grad, grad_at, grad_stride = None, None, 0
    if dy is not None:
        grad, _, _, grad_stride = _rows(dy)
        grad_at = grad.data_ptr()
    call = _ActivationCall(
        x=matrix.data_ptr(),
        dy=grad_at,
        out=None if out is None else out.data_ptr(),
        rows=rows,
        cols=cols,
        stride=stride,
        dy_stride=grad_stride,
        kind=(_GATED if gated else _ACTIVATIONS)[kind],
        gated=gated,
        threads=_threads(rows * cols),
        alpha=alpha,
        limit=limit,
        offset=offset,
        bound=bound,
    )
    return call, [matrix, grad]


def activation_(
    out: Tensor, x: Tensor, kind: str, dy: Tensor | None = None, clamp: Clamp | None = None
) -> bool:
    """Write the activation, or the gradient of ``x`` where there is a ``dy``, which must have its dtype."""
    handle = readable(x, dy)
    if handle is None or not x.numel() or (dy is not None and dy.dtype is not x.dtype):
        return False
    call, _alive = activation_call(out, x, kind, dy, clamp)
    handle.qt_activation(ctypes.byref(call), _SIZE(_DTYPES[x.dtype]))
    return True


def norm_quantize_(
    outputs: tuple[Tensor | None, Tensor, Tensor],
    buffers: Sequence[Tensor],
    x: Tensor,
    vectors: tuple[Tensor | None, Tensor | None],
    settings: tuple[str, float, bool],
    target: Target,
) -> bool:
    """Write mean, rstd, the buffers of the norm in slot order (and the amax of delayed scaling), and y where it is kept."""
    if readable(x, *vectors) is None or not x.numel():
        return False
    call, _alive = norm_call(outputs, x, vectors, settings, target.dtype)
    return _fused(call, None, x.dtype, x.shape, outputs[0], buffers, target)


def activation_quantize_(
    y: Tensor | None,
    buffers: Sequence[Tensor],
    x: Tensor,
    kind: str,
    target: Target,
    clamp: Clamp | None = None,
) -> bool:
    """Write the buffers of the activation in slot order (and the amax of delayed scaling), and ``y`` where it is kept."""
    if readable(x) is None or not x.numel():
        return False
    call, _alive = activation_call(y, x, kind, None, clamp)
    shape = torch.Size((*x.shape[:-1], x.shape[-1] // (2 if kind in _GATED else 1)))
    return _fused(None, call, x.dtype, shape, y, buffers, target)


def _fused(
    norm: _NormCall | None,
    activation: _ActivationCall | None,
    dtype: torch.dtype,
    shape: torch.Size,
    kept: Tensor | None,
    buffers: Sequence[Tensor],
    target: Target,
) -> bool:
    handle = readable()
    if handle is None or native.supports(target.codec, target.dtype) is not None:
        return False
    scale, amax, _ = target.given
    tensor_wide = scale is None and not amax and _is_tensor_wide(target.codec, shape)
    if kept is None and activation is not None and tensor_wide:
        # Memory for the tensor between costs less than to activate twice, but more than a second norm.
        kept = torch.empty(shape, dtype=target.dtype)
    arguments = native.quantize_arguments(
        target.codec, buffers, shape, target.given, kept, target.dtype
    )
    if arguments is None:
        return False
    status = handle.qt_fused(
        None if norm is None else ctypes.byref(norm),
        None if activation is None else ctypes.byref(activation),
        _SIZE(_DTYPES[dtype]),
        arguments,
    )
    return bool(status == 0)


def _is_tensor_wide(codec: Any, shape: torch.Size) -> bool:
    """Whether a maximum of the whole tensor is behind the factors."""
    return any(math.prod(size) == 1 for size in codec.amax_shapes(shape))


KERNELS: dict[str, Callable[..., bool]] = {
    "norm": norm_,
    "norm_backward": norm_backward_,
    "bias_grad": bias_grad_,
    "activation": activation_,
    "norm_quantize": norm_quantize_,
    "activation_quantize": activation_quantize_,
}
"""Op -> its kernel."""
