"""Norms, activations and sums over rows by the CPU kernels.

A function that ends in `_` returns False if the kernels do not serve a call, or if they ran out of
memory. The caller then uses the reference, which writes every element of the result. Below, x is
(..., K) of float32, bfloat16 or float16, and M is the number of its rows.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qtensor.kernels.cpu import native
from qtensor.kernels.cpu.buffers import has_memory
from qtensor.kernels.cpu.structs import ActivationCall, NormCall
from qtensor.kernels.fusion import Clamp, Target

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


def readable(*tensors: Tensor | None) -> Any:
    """Return the loaded kernels, or None if there are none or they cannot read a tensor."""
    for t in tensors:
        if t is not None and not has_memory(t):
            return None
    kernels = native.library()
    return None if isinstance(kernels, str) else kernels.handle


def _rows(t: Tensor) -> tuple[Tensor, int, int, int]:
    """Return a tensor (..., K) with contiguous rows, the number of rows, K, and the stride of rows.

    The stride counts elements. The tensor must not be empty. It is copied only if its rows are not
    contiguous.
    """
    cols = t.shape[-1]
    rows = t.numel() // cols
    if t.is_contiguous():
        return t, rows, cols, cols
    matrix = t if t.ndim == 2 else t.reshape(rows, cols)
    if matrix.stride(1) != 1 or matrix.stride(0) < cols:
        matrix = matrix.contiguous()
    return matrix, rows, cols, matrix.stride(0)


def _vector(t: Tensor | None) -> tuple[Tensor | None, int | None, int]:
    """Return a contiguous vector (K,), its address and its dtype's number; or (None, None, 0)."""
    if t is None:
        return None, None, 0
    t = t.contiguous()
    return t, t.data_ptr(), native.DTYPES[t.dtype]


def _all_sized(count: int, *tensors: Tensor | None) -> bool:
    """Return whether each tensor is absent or has `count` elements."""
    return all(t is None or t.numel() == count for t in tensors)


def _threads(count: int) -> int:
    return torch.get_num_threads() if count > native.ONE_THREAD else 1


def _rows_call(x: Tensor, **fields: Any) -> tuple[NormCall, Tensor]:
    """Return arguments about the rows of x, with more fields, and the tensor that they read."""
    matrix, rows, cols, stride = _rows(x)
    at, threads = matrix.data_ptr(), _threads(rows * cols)
    call = NormCall(x=at, rows=rows, cols=cols, stride=stride, threads=threads, **fields)
    return call, matrix


def norm_call(
    outputs: tuple[Tensor | None, Tensor, Tensor],
    x: Tensor,
    vectors: tuple[Tensor | None, Tensor | None],
    settings: tuple[str, float, bool],
    dtype: torch.dtype,
) -> tuple[NormCall, list[Tensor | None]]:
    """Return the arguments of a norm, and the tensors that must live as long as they do.

    Args:
        outputs: y (..., K), None if it is not kept; mean (M,) and rstd (M,), float32.
        x: (..., K), not empty.
        vectors: weight (K,) and bias (K,), or None.
        settings: the kind ("layernorm" or "rmsnorm"), eps, and whether the weight is centered at
            zero.
        dtype: of y.
    """
    y, mean, rstd = outputs
    kind, eps, zero_centered = settings
    weight, weight_at, weight_dtype = _vector(vectors[0])
    bias, bias_at, bias_dtype = _vector(vectors[1])
    call, matrix = _rows_call(
        x,
        y=None if y is None else y.data_ptr(),
        weight=weight_at,
        bias=bias_at,
        mean=mean.data_ptr() if kind == "layernorm" else None,
        rstd=rstd.data_ptr(),
        y_dtype=native.DTYPES[dtype],
        weight_dtype=weight_dtype,
        bias_dtype=bias_dtype,
        zero_centered=zero_centered,
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
    """Write y, mean and rstd. The arguments are those of `norm_call`."""
    handle = readable(x, weight, bias)
    if handle is None or not x.numel() or not _all_sized(x.shape[-1], weight, bias):
        return False
    call, _alive = norm_call(outputs, x, (weight, bias), settings, outputs[0].dtype)
    return bool(handle.qt_norm(ctypes.byref(call), native.DTYPES[x.dtype]) == 0)


def norm_backward_(
    outputs: tuple[Tensor, Tensor, Tensor],
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    stats: tuple[Tensor | None, Tensor],
    zero_centered: bool,
) -> bool:
    """Write the gradients of a norm.

    Args:
        outputs: dx (..., K), dweight (K,) and dbias (K,); the last two may be empty and are then
            skipped.
        dy: (..., K), the gradient of the output.
        x: (..., K), the input of the forward pass.
        weight: (K,), or None.
        stats: mean (M,), None for RMSNorm, and rstd (M,), float32.
        zero_centered: whether the weight is centered at zero.
    """
    mean, rstd = stats
    handle = readable(dy, x, weight, mean, rstd)
    if handle is None or not x.numel() or dy.shape != x.shape:
        return False
    if not _all_sized(x.shape[-1], weight) or not _all_sized(x.numel() // x.shape[-1], mean, rstd):
        return False
    if rstd.dtype is not torch.float32 or (mean is not None and mean.dtype is not torch.float32):
        return False
    dx, dweight, dbias = outputs
    grad, _, _, grad_stride = _rows(dy)
    weight, weight_at, weight_dtype = _vector(weight)
    mean = None if mean is None else mean.contiguous()
    rstd = rstd.contiguous()
    call, _alive = _rows_call(
        x,
        y=grad.data_ptr(),
        y_stride=grad_stride,
        weight=weight_at,
        mean=None if mean is None else mean.data_ptr(),
        rstd=rstd.data_ptr(),
        dx=dx.data_ptr(),
        dweight=dweight.data_ptr() if dweight.numel() else None,
        dbias=dbias.data_ptr() if dbias.numel() else None,
        y_dtype=native.DTYPES[dy.dtype],
        weight_dtype=weight_dtype,
        bias_dtype=native.DTYPES[dbias.dtype],
        zero_centered=zero_centered,
    )
    return bool(handle.qt_norm(ctypes.byref(call), native.DTYPES[x.dtype]) == 0)


def bias_grad_(out: Tensor, dy: Tensor) -> bool:
    """Write the sum of the rows of dy (..., K) to out (K,)."""
    handle = readable(dy)
    if handle is None or not dy.numel():
        return False
    call, _alive = _rows_call(dy, y=out.data_ptr())
    return bool(handle.qt_sum_rows(ctypes.byref(call), native.DTYPES[dy.dtype]) == 0)


def activation_call(
    out: Tensor | None, x: Tensor, kind: str, dy: Tensor | None, clamp: Clamp | None
) -> tuple[ActivationCall, list[Tensor | None]]:
    """Return the arguments of an activation, and the tensors that must live as long as they do.

    With dy (..., N), the arguments of the gradient of x. N is K, or K / 2 for gated kinds; out is
    (..., N), or (..., K) with dy.
    """
    alpha, limit, offset, bound = clamp or (0.0,) * 4
    matrix, rows, cols, stride = _rows(x)
    gated = kind in _GATED
    cols = cols // 2 if gated else cols
    grad, grad_at, grad_stride = None, None, 0
    if dy is not None:
        grad, _, _, grad_stride = _rows(dy)
        grad_at = grad.data_ptr()
    call = ActivationCall(
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
    """Write the activation of x; with dy, which must have the dtype of x, the gradient of x."""
    handle = readable(x, dy)
    if handle is None or not x.numel():
        return False
    if dy is not None:
        values = x.numel() // 2 if kind in _GATED else x.numel()
        if dy.dtype is not x.dtype or not _all_sized(values, dy):
            return False
    call, _alive = activation_call(out, x, kind, dy, clamp)
    return bool(handle.qt_activation(ctypes.byref(call), native.DTYPES[x.dtype]) == 0)


def norm_quantize_(
    outputs: tuple[Tensor | None, Tensor, Tensor],
    buffers: Sequence[Tensor],
    x: Tensor,
    vectors: tuple[Tensor | None, Tensor | None],
    settings: tuple[str, float, bool],
    target: Target,
) -> bool:
    """Write a norm quantized: mean, rstd, the buffers and, if it is kept, y.

    Args:
        outputs: y (..., K), None if it is not kept; mean (M,) and rstd (M,), float32.
        buffers: in slot order; then the amax (1,) float32 if delayed scaling returns one.
        x: (..., K).
        vectors: weight (K,) and bias (K,), or None.
        settings: as `norm_call` takes them.
        target: how to quantize y.
    """
    if readable(x, *vectors) is None or not x.numel() or not _all_sized(x.shape[-1], *vectors):
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
    """Write an activation quantized: the buffers and, if it is kept, y (..., N).

    The arguments are those of `norm_quantize_` and `activation_call`.
    """
    if readable(x) is None or not x.numel():
        return False
    call, _alive = activation_call(y, x, kind, None, clamp)
    shape = torch.Size((*x.shape[:-1], x.shape[-1] // (2 if kind in _GATED else 1)))
    return _fused(None, call, x.dtype, shape, y, buffers, target)


def _fused(
    norm: NormCall | None,
    activation: ActivationCall | None,
    dtype: torch.dtype,
    shape: torch.Size,
    y: Tensor | None,
    buffers: Sequence[Tensor],
    target: Target,
) -> bool:
    handle = readable()
    if handle is None or native.supports(target.quantizer, target.dtype) is not None:
        return False
    scale, amax, _ = target.factors
    needs_all = scale is None and not amax and _needs_all_rows(target.quantizer, shape)
    if y is None and activation is not None and needs_all:
        # To keep the result of an activation costs less than to compute it twice; for a norm it
        # costs more.
        y = torch.empty(shape, dtype=target.dtype)
    arguments = native.quantize_arguments(
        target.quantizer, buffers, shape, target.factors, y, target.dtype
    )
    if arguments is None:
        return False
    status = handle.qt_fused(
        None if norm is None else ctypes.byref(norm),
        None if activation is None else ctypes.byref(activation),
        native.DTYPES[dtype],
        arguments,
    )
    return bool(status == 0)


def _needs_all_rows(quantizer: Any, shape: torch.Size) -> bool:
    """Return whether scales depend on the maximum of the whole tensor, or of its columns."""
    if getattr(quantizer, "row_scaled", False):
        return bool(quantizer.columnwise)
    axis = getattr(quantizer, "axis", -1)
    return axis == 0 or any(math.prod(size) == 1 for size in quantizer.amax_shapes(shape))


KERNELS: dict[str, Callable[..., bool]] = {
    "norm": norm_,
    "norm_backward": norm_backward_,
    "bias_grad": bias_grad_,
    "activation": activation_,
    "norm_quantize": norm_quantize_,
    "activation_quantize": activation_quantize_,
}
"""The kernel of each op."""
