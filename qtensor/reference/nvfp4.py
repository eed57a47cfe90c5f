"""NVFP4: E2M1 elements, E4M3 factors for blocks of 16, a float32 factor for the tensor or a row (docs/numerics.md)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import threshold

from qtensor.formats import E2M1, E4M3
from qtensor.reference.blocks import block_amax, from_blocks, scale_blocks, to_blocks
from qtensor.reference.constants import constant
from qtensor.reference.elements import decode as decode_codes
from qtensor.reference.elements import encode_narrow
from qtensor.reference.scaling import FLOAT32_MAX, quotient

BLOCK = 16
_STEP_BOUNDS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Recipe:
    """The options that one direction of NVFP4 quantization reads."""

    rows: int = 1
    """Block rows: 1, or 16 for 2D blocks."""
    e4m3_max: float = 448.0
    use_4over6: bool = False
    err_mode: str = "mae"
    row_scaled: bool = False


def amax(x: Tensor, per_row: bool = False) -> Tensor:
    """Largest magnitude of a float32 (M, K) matrix without NaN or inf: (1,), or (M,) per row."""
    if not x.numel():
        return x.new_zeros(x.shape[0] if per_row else 1)
    return x.abs().amax(1) if per_row else x.abs().amax().reshape(1)


def global_scale(amax_tensor: Tensor, e4m3_max: float) -> Tensor:
    """The encode factor of the second level, ``min(e4m3_max * 6 / A, FLT_MAX)``; 1 where it or A is 0."""
    # The quotient is never 0, since amax is finite.
    return quotient(e4m3_max * 6.0, threshold(amax_tensor, 0.0, e4m3_max * 6.0)).clamp_(
        max=FLOAT32_MAX
    )


def _round_e4m3(values: Tensor) -> Tensor:
    return values.clamp_(max=E4M3.max).to(torch.float8_e4m3fn)


def _encode_factor(scale: Tensor, global_enc: Tensor) -> Tensor:
    """Multiplier of a block, ``min(1 / (float(scale) * S_dec), FLT_MAX)``."""
    return (scale.float() * global_enc.reciprocal()).reciprocal_().clamp_(max=FLOAT32_MAX)


def stochastic_codes(values: Tensor, noise: Tensor) -> Tensor:
    """E2M1 codes of ``values`` rounded up with probability equal to the distance from the lower neighbour.

    Args:
        values: float32, any shape, already multiplied by the encode factor.
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
    x: Tensor, recipe: Recipe, amax_tensor: Tensor | None = None, noise: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a float32 (M, K) matrix without NaN or inf.

    Args:
        x: the matrix; padded with zeros here where blocks need it.
        recipe: options.
        amax_tensor: (1,) or, row-scaled, (M,); found here if None.
        noise: uint8 (M, K) random bytes for stochastic rounding, or None for nearest even.

    Returns:
        Codes (M, K) uint8, one a byte; E4M3 codes (ceil(M / rows), ceil(K / 16)) uint8; the maxima.
    """
    rows, cols = x.shape
    blocks = to_blocks(x, recipe.rows, BLOCK)
    if not blocks.numel():
        scales = x.new_zeros((blocks.shape[0], blocks.shape[2]), dtype=torch.uint8)
        return x.new_zeros((rows, cols), dtype=torch.uint8), scales, amax(x, recipe.row_scaled)
    maxima = block_amax(blocks)
    if amax_tensor is None:
        amax_tensor = maxima.amax(1) if recipe.row_scaled else maxima.amax().reshape(1)
    global_enc = global_scale(amax_tensor, recipe.e4m3_max)[:, None]
    if recipe.use_4over6:
        codes, scale = _encode_4over6(blocks, maxima, amax_tensor[:, None], global_enc, recipe)
        return from_blocks(codes, rows, cols), scale.view(torch.uint8), amax_tensor
    multiplier = global_enc * constant(1 / 6, x.device)
    scale = _round_e4m3(maxima * multiplier)
    values = scale_blocks(blocks, _encode_factor(scale, global_enc), rows, cols)
    codes = encode_narrow(values, E2M1, False) if noise is None else stochastic_codes(values, noise)
    return codes, scale.view(torch.uint8), amax_tensor


def _encode_4over6(
    blocks: Tensor, amax_block: Tensor, amax_tensor: Tensor, global_enc: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """Each block with its maximum mapped to 6 or to 4, whichever has the smaller error (6 on a tie)."""
    base = quotient(amax_block, 6.0) * global_enc
    candidates = [_round_e4m3(base), _round_e4m3(base * 1.5)]
    codes, errors = [], []
    for scale in candidates:
        factor = _encode_factor(scale, global_enc)[:, None, :, None]
        code = encode_narrow(blocks * factor, E2M1, False)
        decoded = decode_codes(code, E2M1) * scale.float()[:, None, :, None]
        difference = quotient(decoded * amax_tensor[:, None, :, None], 6 * recipe.e4m3_max) - blocks
        codes.append(code)
        errors.append(
            _block_error(difference.abs() if recipe.err_mode == "mae" else difference * difference)
        )
    to_4 = errors[1] < errors[0]
    scale = torch.where(to_4, candidates[1].view(torch.uint8), candidates[0].view(torch.uint8))
    return torch.where(to_4[:, None, :, None], codes[1], codes[0]), scale


def _block_error(terms: Tensor) -> Tensor:
    """Sum of (m, r, k, 16) terms a block, in a fixed order: 16 columns one by one, then rows by halves 8/4/2/1."""
    row_errors = terms[..., 0]
    for column in range(1, BLOCK):
        row_errors = row_errors + terms[..., column]
    while row_errors.shape[1] > 1:
        half = row_errors.shape[1] // 2
        row_errors = row_errors[:, :half] + row_errors[:, half:]
    return row_errors[:, 0]


def decode(
    values: Tensor, scales: Tensor, amax_tensor: Tensor, rows: int, e4m3_max: float
) -> Tensor:
    """``fp4 * float(s) * (A / (6 * e4m3_max))``.

    Args:
        values: E2M1 values, float32 (M, K).
        scales: uint8 E4M3 codes, (ceil(M / rows), ceil(K / 16)) or more.
        amax_tensor: (1,) or (M,).
        rows: block rows.
        e4m3_max: 448 or 256.
    """
    factors = decode_codes(scales, E4M3)
    scaled = scale_blocks(to_blocks(values, rows, BLOCK), factors, *values.shape)
    return scaled.mul_(quotient(amax_tensor, 6 * e4m3_max).unsqueeze(1))
