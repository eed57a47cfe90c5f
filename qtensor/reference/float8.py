"""FP8 with one scale factor per tensor, row or column, and with 1x128 and 128x128 blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtensor.core.formats import Element
from qtensor.reference.blocks import as_matrix, block_amax, scale_blocks, to_blocks, write_padded_
from qtensor.reference.elements import decode, encode_fp8_
from qtensor.reference.scaling import fp8_scale

BLOCK = 128


def amax_tensor(x: Tensor) -> Tensor:
    """Return the largest magnitude of ``x``, float32 (1,): 0 if ``x`` is empty, NaN for NaN."""
    if not x.numel():
        return x.new_zeros(1, dtype=torch.float32)
    return x.abs().amax().float().reshape(1)


def amax_axis(x: Tensor, axis: int) -> Tensor:
    """Return the largest magnitude of each row or column of the (M, K) view, float32.

    ``axis`` -1: rows, (M, 1). ``axis`` 0: columns, (1, K).
    """
    matrix = as_matrix(x)
    if not matrix.numel():
        shape = (matrix.shape[0], 1) if axis == -1 else (1, matrix.shape[1])
        return matrix.new_zeros(shape, dtype=torch.float32)
    return matrix.abs().amax(axis, keepdim=True).float()


def encode_scaled_(out: dict[str, Tensor], x: Tensor, scale: Tensor, element: Element) -> None:
    """Write cast(x * scale) into ``_data``, ``_transpose`` or both; 1 / scale into ``_scale_inv``.

    Args:
        out: ``_data`` uint8 (logical shape), ``_transpose`` uint8 (K, *leading), ``_scale_inv``
            float32 like ``scale``.
        x: any shape, float32, bfloat16 or float16.
        scale: float32, (1,), (M, 1) or (1, K).
        element: e4m3 or e5m2.
    """
    torch.reciprocal(scale, out=out["_scale_inv"])
    codes = out.get("_data")
    if codes is None:
        codes = out["_transpose"].new_empty(x.shape)
    # The product with a float32 tensor is float32. A scale of one element broadcasts.
    values = x * scale if scale.ndim == 1 else as_matrix(x) * scale
    encode_fp8_(codes, values.reshape(x.shape), element)
    if "_transpose" in out:
        out["_transpose"].copy_(codes.movedim(-1, 0) if x.ndim else codes.reshape(1))


def decode_codes(buffers: dict[str, Tensor], element: Element) -> Tensor:
    """Return element values, float32 of the logical shape ((1,) for a 0-d tensor).

    Reads the rowwise buffer ``_data`` if present, otherwise ``_transpose``.
    """
    if "_data" in buffers:
        return decode(buffers["_data"], element)
    return decode(buffers["_transpose"], element).movedim(0, -1)


def decode_scaled(buffers: dict[str, Tensor], shape: tuple[int, ...], element: Element) -> Tensor:
    """Return float(code) * scale_inv, float32 of ``shape``."""
    values, scale_inv = decode_codes(buffers, element), buffers["_scale_inv"]
    scaled = values * scale_inv if scale_inv.ndim == 1 else as_matrix(values) * scale_inv
    return scaled if scaled.shape == shape else scaled.reshape(shape)


def block_scale(
    blocks: Tensor, element: Element, force_pow_2: bool, epsilon: float, overflow: float
) -> Tensor:
    """Return encode scales, float32 (m, k), of blocks (m, r, k, c)."""
    if not blocks.numel():
        return blocks.new_ones((blocks.shape[0], blocks.shape[2]), dtype=torch.float32)
    return fp8_scale(block_amax(blocks), element.max, force_pow_2, epsilon, overflow)


def encode_blocks_(
    codes: Tensor, scale_inv: Tensor, blocks: Tensor, scale: Tensor, element: Element
) -> None:
    """Write codes and decode scales of blocks.

    Args:
        codes: uint8 (M, K), written.
        scale_inv: float32 (blocks along M, blocks along K), possibly padded; written.
        blocks: (m, r, k, c), the blocks of an (M, K) matrix.
        scale: float32 (m, k), encode scales.
        element: e4m3 or e5m2.
    """
    encode_fp8_(codes, scale_blocks(blocks, scale, *codes.shape), element)
    write_padded_(scale_inv, scale.reciprocal())


def quantize_blocks_(
    codes: Tensor,
    scale_inv: Tensor,
    x: Tensor,
    rows: int,
    element: Element,
    force_pow_2: bool,
    epsilon: float,
    overflow: float,
) -> None:
    """Quantize an (M, K) matrix in blocks of ``rows`` x 128.

    ``codes`` is uint8 (M, K); ``scale_inv`` is float32 (blocks along M, blocks along K), padded.
    """
    blocks = to_blocks(x, rows, BLOCK)
    encode_blocks_(
        codes,
        scale_inv,
        blocks,
        block_scale(blocks, element, force_pow_2, epsilon, overflow),
        element,
    )


def decode_blocks(codes: Tensor, scale_inv: Tensor, rows: int, element: Element) -> Tensor:
    """Return float32 values (M, K) of blockwise codes.

    ``codes`` is uint8 (M, K); ``scale_inv`` is float32 (ceil(M / rows), ceil(K / 128)) or larger.
    """
    return scale_blocks(to_blocks(decode(codes, element), rows, BLOCK), scale_inv, *codes.shape)


def roll_history(history: Tensor) -> Tensor:
    """Return ``history`` (length, n) rolled by -1 along dim 0, with row 0 set to zero."""
    history = history.roll(-1, 0)
    history[0].zero_()
    return history


def delayed_scale(amax: Tensor, scale: Tensor, margin: int, element_max: float) -> Tensor:
    """Return ``((1 / amax) * element_max) / 2^margin``, or ``scale`` for an unusable ``amax``.

    An ``amax`` of 0, inf or NaN is unusable.

    ``amax`` and ``scale`` are float32 of the same shape. The two roundings are those of the golden
    files, where torch divides a number by a tensor.
    """
    new = (amax.reciprocal() * element_max) / 2.0**margin
    new = torch.where(new.isinf(), torch.finfo(torch.float32).max, new)
    return torch.where((amax > 0) & amax.isfinite(), new, scale)


def delayed_scales(amax: Tensor, scale: Tensor, margin: int, largest: Sequence[float]) -> Tensor:
    """Return ``delayed_scale`` of each column, float32 (n,) like ``amax`` and ``scale``.

    ``largest`` holds the largest code value of each column.
    """
    columns = [
        delayed_scale(amax[i : i + 1], scale[i : i + 1], margin, value)
        for i, value in enumerate(largest)
    ]
    return torch.cat(columns)
