"""The sums of few rows in the order of docs/numerics.md, step by step in numpy.

It shares no code with the kernels: codes and factors are decoded from the stored bytes here, and a
fused multiply-add is computed from exact float64 parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]

GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
LANES = 16


def fused(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float32, rounded once.

    The product has at most 48 bits. The float64 sum is rounded to odd, so that rounding it again
    gives the float32 number next to the exact sum.
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    other = total - product
    error = (product - (total - other)) + (addend - other)
    inexact = np.isfinite(total) & (error != 0) & np.isfinite(error)
    even = (total.view(np.int64) & 1) == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    total = np.where(inexact & even, np.nextafter(total, toward), total)
    return total.astype(np.float32)


def narrow_values(codes: Array, element: str) -> Array:
    """Values of element codes, one a byte."""
    if element == "e2m1":
        return np.array(GRID + [-v for v in GRID], np.float32)[codes]
    if element in ("e4m3", "e5m2"):
        dtype = torch.float8_e4m3fn if element == "e4m3" else torch.float8_e5m2
        return torch.from_numpy(codes.copy()).view(dtype).float().numpy()
    mantissa = int(element[-1])
    bias = 1 if element == "e2m3" else 3
    field, fraction = (codes & 31) >> mantissa, (codes & 31) % (1 << mantissa) / (1 << mantissa)
    value = np.where(field == 0, fraction * 2.0, 1.0 + fraction) * np.exp2(field - float(bias))
    return np.where(codes & 32, -value, value).astype(np.float32)


def unpacked(codes: Array, cols: int, each: int) -> Array:
    """Codes (N, cols), one a byte: two to a byte, four to three bytes, or as they are."""
    if each == 2:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
    if each == 4:
        three = codes.reshape(len(codes), -1, 3).astype(np.uint32)
        word = three[..., 0] | three[..., 1] << 8 | three[..., 2] << 16
        codes = np.stack([word >> 6 * i & 63 for i in range(4)], -1).reshape(len(codes), -1)
    return codes[:, :cols].astype(np.uint8)


def block_factors(w: Any, quantizer: Any, block: int) -> Array:
    """float32 (N, blocks)."""
    rows, cols = w.shape
    blocks = -(-cols // block)
    stored = w._rowwise_scale_inv.view(torch.uint8) if block != 128 else w._rowwise_scale_inv
    line, of = np.arange(rows)[:, None], np.arange(blocks)[None, :]
    if block == 128:
        square = quantizer.two_dimensional
        return stored.numpy()[line // 128, of] if square else stored.numpy()[of, line]
    if quantizer.scale_layout.startswith("swizzled"):
        tiles = -(-blocks // 4)
        at = (line // 128 * tiles + of // 4) * 512 + line % 32 * 16 + line // 32 % 4 * 4 + of % 4
        codes = stored.numpy().reshape(-1)[at]
    else:
        codes = stored.numpy()[line, of]
    if block == 16:
        return narrow_values(codes, "e4m3")
    return np.where(codes == 255, np.nan, np.exp2(codes.astype(np.float64) - 127)).astype(
        np.float32
    )


def places(block: int, bits: int) -> tuple[int, Array]:
    """Return (span, elements): elements[step, lane] of a span are what a lane takes in order."""
    lane = np.arange(LANES)
    steps = []
    if bits == 4:
        for eight in range(block // 8):
            for offset in (4, 0, 5, 1, 6, 2, 7, 3):
                steps.append(lane * block + eight * 8 + offset)
        return LANES * block, np.array(steps)
    part = 32 if block == 32 else 16
    span = 128 if block else 64
    for first in range(0, span, 4 * part):
        for eight in range(part // 8):
            for odd in (1, 0):
                steps.append(first + lane // 4 * part + eight * 8 + lane % 4 * 2 + odd)
    return span, np.array(steps)


def weight_parts(w: Any) -> tuple[Array, Array | None, Array | None, int, int]:
    """Return code values (N, K), block factors, factors after the sum, the block, bits a code."""
    quantizer = w.quantizer
    element = quantizer.element.name
    block = quantizer.spec.block[1] if quantizer.spec.block else 0
    if not block:
        codes = w._data.view(torch.uint8).numpy()
        return narrow_values(codes, element), None, w._scale_inv.numpy().reshape(-1), 0, 8
    each = 2 if element == "e2m1" else 4 if getattr(quantizer, "packed", False) else 1
    codes = unpacked(w._rowwise_data.view(torch.uint8).numpy(), w.shape[1], each)
    factors = None
    if block == 16:
        factors = w._amax_rowwise.numpy().reshape(-1) / np.float32(6.0 * quantizer.e4m3_max)
    bits = 4 if each == 2 else 8
    return narrow_values(codes, element), block_factors(w, quantizer, block), factors, block, bits


def product(x: Tensor, w: Any, bias: Tensor | None = None, own: Tensor | None = None) -> Tensor:
    """Return x @ w.T as float32 (M, N), to be rounded to the dtype of a result.

    Args:
        x: (M, K) floats, or the values of a quantized matrix without the factors `own`.
        w: quantized (N, K).
        bias: (N,), or None.
        own: float32 factors of x that follow the sums: (1,) or (M,).
    """
    values, scales, factors, block, bits = weight_parts(w)
    span, steps = places(block, bits)
    spans = -(-w.shape[1] // span)
    pad = ((0, 0), (0, spans * span - w.shape[1]))
    left = np.pad(x.detach().float().numpy(), pad).reshape(len(x), 1, spans, span)
    right = np.pad(values, pad).reshape(1, len(values), spans, span)
    lanes = np.zeros((len(x), len(values), LANES), np.float32)
    with np.errstate(all="ignore"):
        for i in range(spans):
            part = np.zeros_like(lanes) if block else lanes
            for at in steps:
                part = fused(left[:, :, i, at], right[:, :, i, at], part)
            if scales is None:
                lanes = part
                continue
            of = (i * span + steps[0]) // block
            known = np.where(
                of < scales.shape[1], scales[:, np.minimum(of, scales.shape[1] - 1)], 0
            )
            lanes = fused(part, known[None].astype(np.float32), lanes)
        for half in (8, 4, 2, 1):
            lanes = lanes[..., :half] + lanes[..., half:]
        total = lanes[..., 0]
        factor = np.ones((1, 1), np.float32) if own is None else own.numpy().reshape(-1, 1)
        if factors is not None:
            factor = factor * factors[None]
        total = total * factor
        if bias is not None:
            total = total + bias.float().numpy()
    return torch.from_numpy(total.astype(np.float32))
