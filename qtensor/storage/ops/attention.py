"""Compute attention over quantized or plain keys and values."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.compile_constants import compile_constant
from qtensor.core.errors import ArgumentTypeError, UnsupportedError, check, fail
from qtensor.core.quantizer_registry import usage_part
from qtensor.core.row_format import PLAIN_FORMATS, row_format
from qtensor.library.attention import ATTENTION
from qtensor.storage.base import QuantizedTensorStorage, TensorOrStorage

_NAMES = {dtype: name for name, dtype in PLAIN_FORMATS.items()}


def attention(
    q: Tensor,
    k: TensorOrStorage,
    v: TensorOrStorage,
    *,
    lengths: Tensor | None = None,
    positions: Tensor | None = None,
    first: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return ``softmax(q @ k.mT * scale) @ v`` over quantized or plain keys and values.

    The codes of ``k`` and ``v`` are read as they are; nothing is decoded to memory. The result has
    no gradient. docs/numerics.md states the order of sums.

    Args:
        q: (B, Hq, M, D), float32, bfloat16 or float16.
        k: (B, H, S, D); H divides Hq. The format must give each row its own factors, or the whole
            tensor one: "fp8", "fp8_rowwise", "mxfp8", "mxfp6", "mxfp4", "nvfp4", or plain.
        v: (B, H, S, E), of the same or another format.
        lengths: (B,) int64: the tokens of each sequence; None for S. Later tokens are not read.
        positions: (B, M) int64: the position of each query, for ``causal``; None for the last M.
        first: (B,) int64: tokens before it are not seen (left padding).
        mask: (B or 1, Hq or 1, M or 1, S), bool (True: seen) or floating (added to the scores).
        causal: let each query see tokens up to its position alone.
        window: let each query see that many tokens, its own the last; 0 for all. Needs ``causal``.
        soft_cap: replace scores s by ``soft_cap * tanh(s / soft_cap)``; 0 for none.
        sinks: (Hq,) or (B, Hq, M): a score for each query that has no value, as in gpt-oss.
        scale: ``1 / sqrt(D)`` if None.

    Returns:
        (B, Hq, M, E) in the dtype of ``q``; 0 for a query that sees no token.

    Raises:
        QTensorError: a shape, dtype, format, length or option is wrong.
        UnsupportedError: grad mode is on, and ``q``, ``k``, ``v``, ``mask`` or ``sinks`` requires
            grad.
    """
    refuse_gradient("attention", q=q, k=k, v=v, mask=mask, sinks=sinks)
    for name, t in (("k", k), ("v", v)):
        rule, got = f"{name} must be (B, heads, tokens, head size)", tuple(t.shape)
        check(len(t.shape) == 4, "attention", rule, got, "Reshape it")
    keys, k_factors, k_global, k_format = stored("k", k)
    values, v_factors, v_global, v_format = stored("v", v)
    if lengths is None:
        lengths = torch.full((q.shape[0],), keys.shape[2], dtype=torch.int64, device=q.device)
    return ATTENTION(
        *(q, keys, k_factors, values, v_factors, k_format, v_format, lengths),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        positions=positions,
        first=first,
        mask=mask,
        sinks=sinks,
        k_global=k_global,
        v_global=v_global,
    )


def refuse_gradient(op: str, **operands: TensorOrStorage | None) -> None:
    """Refuse operands whose gradient would be lost.

    Raises:
        UnsupportedError: grad mode is on, and an operand requires grad; the message names it.
    """
    if not torch.is_grad_enabled():
        return
    for name, t in operands.items():
        if isinstance(t, Tensor) and t.requires_grad:
            fix = "Call it in torch.no_grad(), detach the operands, or use DotProductAttention"
            got = f"{name} that requires grad"
            fail(op, "there is no gradient", got, fix, UnsupportedError)


class Stored(NamedTuple):
    """Rows (..., size) as the op takes them: codes, factors, the global value and the format."""

    codes: Tensor
    factors: Tensor | None
    wide: Tensor | None
    format: str


def stored(name: str, t: TensorOrStorage) -> Stored:
    """Return the buffers of a quantized or plain tensor (..., size).

    Raises:
        QTensorError: the dtype, or factors that belong to several rows.
    """
    if not isinstance(t, QuantizedTensorStorage):
        if t.dtype not in _NAMES:
            rule = f"{name} must be quantized, float32, bfloat16 or float16"
            fail("attention", rule, t.dtype, "Convert it", ArgumentTypeError)
        rows = t if t.stride(-1) == 1 else t.contiguous()
        return Stored(rows, None, None, _NAMES[t.dtype])
    rows, buffers = _rowwise(t._quantizer.canonical, name), t.buffers()
    codes, *others = [buffers[i] for i in rows.slots]
    wide = others.pop() if rows.has_wide else None
    if not rows.has_factors:
        return Stored(codes, None, wide, rows.format)
    lead, size = t.shape[:-1], t.shape[-1]
    factors = others[0][: math.prod(lead), : size // rows.block if rows.block else 1]
    return Stored(codes, factors.unflatten(0, lead), wide, rows.format)


class _Rowwise(NamedTuple):
    """Which buffers of a quantizer hold its rows, and what they are."""

    slots: tuple[int, ...]
    format: str
    has_factors: bool
    has_wide: bool
    block: int


@compile_constant
def _rowwise(canonical: str, name: str) -> _Rowwise:
    slots, text = usage_part(canonical, "rowwise")
    rule, fix = f"{name} must have rowwise data", "Quantize it with rowwise=True"
    check(bool(slots), "attention", rule, canonical, fix)
    form = row_format(text)
    return _Rowwise(slots, form.text, form.factor is not None, form.divisor > 0, form.block)
