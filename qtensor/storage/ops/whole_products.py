"""Receive ``linear`` and ``matmul`` of quantized operands before torch decomposes them.

torch computes these two from other ops. For a batch whose rows are not evenly spaced, such as
``hidden[:, -1:]``, it expands the weight, and an expanded weight is decoded. The functions below
are registered under a dispatch key that only quantized tensors have, so calls with other tensors
never reach them. torch looks at this key before autograd and autocast. A call that needs one of
these is passed on as ``mm`` or ``addmm`` of all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from qtensor.core.torch_state import (
    OWN_KEY,
    OWN_KEY_NAME,
    in_autocast,
    in_forward_mode,
    watched,
    without_own_key,
)
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.storage.ops import products
from qtensor.storage.ops.table import Op
from qtensor.storage.ops.whole_attention import attend

_LINEAR, _MATMUL = torch.ops.aten.linear.default, torch.ops.aten.matmul.default
_MATMUL_OUT = torch.ops.aten.matmul.out
_LIBRARY, _ALL_OPS = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")


def _computes_here(a: Tensor, b: Tensor, bias: Tensor | None = None) -> bool:
    """Return True if a call asks for the product alone: no gradient, no autocast, no record.

    The product is then one op instead of several.
    """
    if torch.is_grad_enabled() and (
        a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return False
    return (
        _is_known(a)
        and _is_known(b)
        and (bias is None or _is_known(bias))
        and not watched()
        and not in_autocast(a.device)
        and not in_forward_mode()
    )


def _is_known(t: Tensor) -> bool:
    """Return True for a plain tensor and a quantized one, False for any other subclass."""
    kind = type(t)
    return kind is Tensor or kind is Parameter or getattr(t, "_dispatches_here", False)


def _by_torch(op: Op, *args: Tensor | None, **kwargs: Tensor) -> Tensor:
    """Call ``op`` as if this module did not exist."""
    with without_own_key():
        return op(*args, **kwargs)


def _multiplied(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x`` (..., K) times a quantized ``matrix`` (K, N), as one product of all rows."""
    rows = x if x.ndim == 2 else x.unsqueeze(0) if x.ndim == 1 else x.flatten(0, -2)
    y = torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], y.shape[-1])


def _is_matrix(t: Tensor) -> bool:
    return t.ndim == 2 and isinstance(t, QuantizedTensorStorage)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.ndim and weight.ndim == 2 and _computes_here(x, weight, bias):
        return products.aten_product(x, weight, "TN", bias)
    if x.ndim and _is_matrix(weight):
        return _multiplied(x, weight.t(), bias)
    return _by_torch(_LINEAR, x, weight, bias)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.ndim and b.ndim == 2 and _computes_here(a, b):
        return products.matmul(_MATMUL, (a, b), {})
    if 2 < b.ndim <= a.ndim and b.shape[0] == 1 and isinstance(b, QuantizedTensorStorage):
        return torch.matmul(a, b.squeeze(0))
    if a.ndim and _is_matrix(b):
        return _multiplied(a, b, None)
    if b.ndim > 2 and _is_matrix(a):
        return torch.matmul(b.mT, a.t()).mT.contiguous()
    return _by_torch(_MATMUL, a, b)


def _matmul_out(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    return _by_torch(_MATMUL_OUT, a.contiguous() if _is_matrix(b) else a, b, out=out)


def install() -> None:
    """Register the functions; importing ``qtensor.storage.tensor`` calls this once."""
    if OWN_KEY is None:
        return
    # Without a kernel for every other op, each op of a quantized tensor would stop at the key.
    _ALL_OPS.fallback(torch.library.fallthrough_kernel, OWN_KEY_NAME)
    for name, function in (
        ("linear", _linear),
        ("matmul", _matmul),
        ("matmul.out", _matmul_out),
        ("scaled_dot_product_attention", attend),
    ):
        _LIBRARY.impl(name, function, OWN_KEY_NAME)
