"""NVFP4: E2M1 elements, E4M3 scales of 16-element blocks, float32 scales per tensor or row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import threshold

from qtensor.core.formats import E2M1, E4M3
from qtensor.reference.blocks import block_amax, from_blocks, scale_blocks, to_blocks
from qtensor.reference.constants import constant
from qtensor.reference.elements import decode as decode_codes
from qtensor.reference.elements import encode_narrow
from qtensor.reference.scaling import FLOAT32_MAX, quotient

BLOCK = 16
_STEP_BOUNDS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class NVFP4Options:
    """The options of NVFP4 quantization in one direction."""

    rows: int = 1
    """Rows of a block: 1, or 16 for 2D blocks."""
    e4m3_max: float = 448.0
    use_4over6: bool = False
    err_mode: str = "mae"
    row_scaled: bool = False


def amax(x: Tensor, per_row: bool = False) -> Tensor:
    """Return the largest magnitude of a float32 (M, K) matrix without NaN or inf: (1,) or (M,)."""
    if not x.numel():
        return x.new_zeros(x.shape[0] if per_row else 1)
    return x.abs().amax(1) if per_row else x.abs().amax().reshape(1)


def global_scale(amax_tensor: Tensor, e4m3_max: float) -> Tensor:
    """Return the encode scale of the second level: ``min(e4m3_max * 6 / A, FLT_MAX)``.

    ``amax_tensor`` (A) is float32 (1,) or (M,). The result has its shape, and is 1 where the
    quotient or A is 0.
    """
    # The quotient is never 0, since amax is finite.
    return quotient(e4m3_max * 6.0, threshold(amax_tensor, 0.0, e4m3_max * 6.0)).clamp_(
        max=FLOAT32_MAX
    )


def _round_e4m3(values: Tensor) -> Tensor:
    return values.clamp_(max=E4M3.max).to(torch.float8_e4m3fn)


def encode_factor(scale: Tensor, global_enc: Tensor) -> Tensor:
    """Return the multipliers of blocks, float32: ``min(1 / (float(scale) * S_dec), FLT_MAX)``."""
    return (scale.float() * global_enc.reciprocal()).reciprocal_().clamp_(max=FLOAT32_MAX)


def stochastic_codes(values: Tensor, noise: Tensor) -> Tensor:
    """Return E2M1 codes (uint8) of ``values`` with stochastic rounding.

    A value is rounded up with the probability that equals its distance from the lower neighbour.

    Args:
        values: float32, any shape, already multiplied by the encode scale.
        noise: uint8 random bytes, same shape.
    """
    magnitude = values.abs().clamp_(max=E2M1.max)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    raised = magnitude + noise.float() / 256 * step
    codes = torch.bucketize(
        raised.contiguous(), constant(_STEP_BOUNDS, values.device), right=True, out_int32=True
    )
    return codes.to(torch.uint8).bitwise_or_((values < 0).to(torch.uint8) << 3)


def encode(
    x: Tensor, options: NVFP4Options, amax_tensor: Tensor | None = None, noise: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a float32 (M, K) matrix without NaN or inf.

    Args:
        x: (M, K) float32; padded with zeros to whole blocks.
        options: options of this direction.
        amax_tensor: float32 (1,), or (M,) with ``row_scaled``; computed from ``x`` if None.
        noise: uint8 (M, K) random bytes for stochastic rounding; None rounds to nearest even.

    Returns:
        Codes, uint8 (M, K), one a byte; E4M3 codes of the block scales, uint8
        (ceil(M / rows), ceil(K / 16)); the maxima, float32 (1,) or (M,).
    """
    rows, cols = x.shape
    blocks = to_blocks(x, options.rows, BLOCK)
    if not blocks.numel():
        scales = x.new_zeros((blocks.shape[0], blocks.shape[2]), dtype=torch.uint8)
        return x.new_zeros((rows, cols), dtype=torch.uint8), scales, amax(x, options.row_scaled)
    maxima = block_amax(blocks)
    if amax_tensor is None:
        amax_tensor = maxima.amax(1) if options.row_scaled else maxima.amax().reshape(1)
    global_enc = global_scale(amax_tensor, options.e4m3_max)[:, None]
    if options.use_4over6:
        codes, scale = _encode_4over6(blocks, maxima, amax_tensor[:, None], global_enc, options)
        return from_blocks(codes, rows, cols), scale.view(torch.uint8), amax_tensor
    multiplier = global_enc * constant(1 / 6, x.device)
    scale = _round_e4m3(maxima * multiplier)
    values = scale_blocks(blocks, encode_factor(scale, global_enc), rows, cols)
    codes = encode_narrow(values, E2M1, False) if noise is None else stochastic_codes(values, noise)
    return codes, scale.view(torch.uint8), amax_tensor


def _encode_4over6(
    blocks: Tensor,
    amax_block: Tensor,
    amax_tensor: Tensor,
    global_enc: Tensor,
    options: NVFP4Options,
) -> tuple[Tensor, Tensor]:
    """Quantize each block with its maximum mapped to 6 or to 4, and keep the one with less error.

    6 wins a tie. Shapes: ``blocks`` (m, r, k, 16), ``amax_block`` (m, k), ``amax_tensor`` and
    ``global_enc`` (1, 1) or (m, 1). Returns codes like ``blocks`` and scale codes (m, k), uint8.
    """
    base = quotient(amax_block, 6.0) * global_enc
    candidates = [_round_e4m3(base), _round_e4m3(base * 1.5)]
    codes, errors = [], []
    for scale in candidates:
        factor = encode_factor(scale, global_enc)[:, None, :, None]
        code = encode_narrow(blocks * factor, E2M1, False)
        decoded = decode_codes(code, E2M1) * scale.float()[:, None, :, None]
        difference = (
            quotient(decoded * amax_tensor[:, None, :, None], 6 * options.e4m3_max) - blocks
        )
        codes.append(code)
        errors.append(
            _block_error(difference.abs() if options.err_mode == "mae" else difference * difference)
        )
    to_4 = errors[1] < errors[0]
    scale = torch.where(to_4, candidates[1].view(torch.uint8), candidates[0].view(torch.uint8))
    return torch.where(to_4[:, None, :, None], codes[1], codes[0]), scale


def _block_error(terms: Tensor) -> Tensor:
    """Return the sum of each block, (m, k), of float32 (m, r, k, 16) terms, in a fixed order.

    The 16 columns are added one by one, then rows by halves: 8, 4, 2, 1.
    """
    row_errors = terms[..., 0]
    for column in range(1, BLOCK):
        row_errors = row_errors + terms[..., column]
    while row_errors.shape[1] > 1:
        half = row_errors.shape[1] // 2
        row_errors = row_errors[:, :half] + row_errors[:, half:]
    return row_errors[:, 0]


def decode_factor(amax_tensor: Tensor, e4m3_max: float) -> Tensor:
    """Return the factor of the second level that decodes: ``A / (6 * e4m3_max)``, rounded once.

    Args:
        amax_tensor: float32 (1,) or (M,).
        e4m3_max: 448 or 256.
    """
    return quotient(amax_tensor, 6 * e4m3_max)


def find_amax(global_scale_inv: Tensor) -> tuple[Tensor, float] | None:
    """Return an amax A and a limit L with ``decode_factor(A, L) == global_scale_inv``.

    With such a pair, an NVFP4 tensor decodes by the factor of a file without storing it. A factor
    that was computed as ``A / (6 * L)`` always has one. Of arbitrary factors, about 84% have one
    with L = 448, and 96 to 97% with 448 or 256.

    Args:
        global_scale_inv: the factor that multiplies, float32 (n,): one of a tensor, or one a row.

    Returns:
        A, float32 (n,), and L, 448 or 256, which is common to all n; L = 448 is tried first. None
        if there is no such pair, as for factors that are negative or not finite.
    """
    for e4m3_max in (E4M3.max, 256.0):
        found = nearest_amax(global_scale_inv, e4m3_max)
        if _equal_bits(decode_factor(found, e4m3_max), global_scale_inv).all():
            return found, e4m3_max
    return None


def nearest_amax(global_scale_inv: Tensor, e4m3_max: float) -> Tensor:
    """Return amaxes whose ``decode_factor`` is ``global_scale_inv``, or next to it if none is.

    Args:
        global_scale_inv: float32 (n,).
        e4m3_max: 448 or 256.

    Returns:
        float32 (n,), at least 0 and finite: ``global_scale_inv * 6 * e4m3_max``, or a neighbour of
        this product up to two units in the last place. Product and quotient round by at most half a
        unit each, so that no other amax of a normal factor can fit.
    """
    product = global_scale_inv * (6 * e4m3_max)
    found = product.nan_to_num(nan=0.0).clamp(0.0, FLOAT32_MAX).abs()
    for step in (2, -2, 1, -1):
        amax_tensor = (product.view(torch.int32) + step).clamp_(min=0).view(torch.float32)
        fits = _equal_bits(decode_factor(amax_tensor, e4m3_max), global_scale_inv)
        found = torch.where(fits & amax_tensor.isfinite(), amax_tensor, found)
    exact = _equal_bits(decode_factor(product, e4m3_max), global_scale_inv)
    return torch.where(exact & product.isfinite() & ~product.signbit(), product, found)


def _equal_bits(a: Tensor, b: Tensor) -> Tensor:
    return a.view(torch.int32) == b.view(torch.int32)


def decode(values: Tensor, scales: Tensor, factor: Tensor, rows: int) -> Tensor:
    """Return ``(fp4 * float(s)) * factor``, float32 (M, K).

    Args:
        values: E2M1 values, float32 (M, K).
        scales: uint8 E4M3 codes, (ceil(M / rows), ceil(K / 16)) or larger.
        factor: of the second level, float32 (1,) or (M,); see ``decode_factor``.
        rows: rows of a block.
    """
    factors = decode_codes(scales, E4M3)
    scaled = scale_blocks(to_blocks(values, rows, BLOCK), factors, *values.shape)
    return scaled.mul_(factor.unsqueeze(1))
