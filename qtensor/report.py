"""How much a quantization lost: signal to noise, errors, saturation, flushing, factors, worst blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtensor.errors import check
from qtensor.layout import rows_cols
from qtensor.reference.blocks import to_blocks
from qtensor.reference.elements import code_values
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.storage.rebuild import with_buffers

WORST = 5


@dataclass(frozen=True)
class BlockError:
    """The error inside one block of the (M, K) view."""

    row: int
    """First row."""
    col: int
    """First column."""
    sqnr_db: float
    max_abs_error: float


@dataclass(frozen=True)
class ErrorReport:
    """What ``error_report`` found; ``str()`` gives a table. Only values finite before and after count as errors."""

    quantizer: str
    """Canonical string."""
    shape: tuple[int, ...]
    bits_per_value: float
    """All buffers, factors and padding included."""
    sqnr_db: float
    """10 log10(sum x^2 / sum (x - q)^2); inf where nothing is lost."""
    max_abs_error: float
    max_rel_error: float
    """Over values that are not zero."""
    saturated: float
    """Share of values beyond the largest code of their block."""
    flushed_to_zero: float
    """Share of non-zero values that became zero."""
    not_finite: int
    """Values that are NaN or inf, before or after."""
    scale_min: float
    """Smallest decode factor of an element, tensor-wide factor included."""
    scale_max: float
    worst_blocks: tuple[BlockError, ...]
    """The blocks with the lowest signal to noise ratio, worst first."""

    def __str__(self) -> str:
        rows = [
            ("quantizer", self.quantizer),
            ("shape", "x".join(map(str, self.shape)) or "scalar"),
            ("bits per value", f"{self.bits_per_value:.2f}"),
            ("SQNR", f"{self.sqnr_db:.2f} dB"),
            ("max abs error", f"{self.max_abs_error:.4g}"),
            ("max rel error", f"{self.max_rel_error:.4g}"),
            ("saturated", f"{self.saturated:.4%}"),
            ("flushed to zero", f"{self.flushed_to_zero:.4%}"),
            ("not finite", str(self.not_finite)),
            ("scale range", f"{self.scale_min:.4g} to {self.scale_max:.4g}"),
        ]
        rows += [
            ("worst block" if i == 0 else "", f"[{b.row}, {b.col}] {b.sqnr_db:.2f} dB, max error {b.max_abs_error:.4g}")
            for i, b in enumerate(self.worst_blocks)
        ]
        return "\n".join(f"{name:<16} {value}" for name, value in rows)


def error_report(x: Tensor, q: Any) -> ErrorReport:
    """Compare a tensor with its quantized form.

    Args:
        x: the original, floating, any shape.
        q: the quantized tensor or storage, of the same shape.

    Raises:
        QTensorError: ``q`` is not quantized, or the shapes differ.
    """
    check(
        isinstance(q, QuantizedTensorStorage),
        "error_report",
        "the second argument must be quantized",
        type(q).__name__,
        "Pass qtensor.quantize(x, fmt)",
    )
    check(
        tuple(x.shape) == tuple(q.shape),
        "error_report",
        "shapes must be equal",
        f"{tuple(x.shape)} and {tuple(q.shape)}",
        "Pass the tensor that was quantized",
    )
    source = (x.dequantize() if isinstance(x, QuantizedTensorStorage) else x).detach().double()
    decoded = q.dequantize(torch.float32).detach().double()
    finite = source.isfinite() & decoded.isfinite()
    values = torch.where(finite, source, 0)
    error = torch.where(finite, source - decoded, 0).abs()
    factor = decode_factors(q)
    numel = max(x.numel(), 1)
    nonzero = values != 0
    relative = torch.where(nonzero, error / values.abs(), 0)
    element = q._quantizer.element
    # The factor itself is rounded: a value beyond by less than that is not saturated.
    outside = source.abs() > factor.double() * element.max * (1 + 2.0**-20)
    known = factor[factor.isfinite()]
    return ErrorReport(
        quantizer=q._quantizer.canonical,
        shape=tuple(x.shape),
        bits_per_value=8 * q.nbytes / numel,
        sqnr_db=_decibel(values.square().sum(), error.square().sum()),
        max_abs_error=_largest(error),
        max_rel_error=_largest(relative),
        saturated=outside.sum().item() / numel,
        flushed_to_zero=(nonzero & (decoded == 0)).sum().item() / numel,
        not_finite=int((~finite).sum()),
        scale_min=known.min().item() if known.numel() else math.nan,
        scale_max=known.max().item() if known.numel() else math.nan,
        worst_blocks=_worst_blocks(values, error, q.spec.block or (1, rows_cols(x.shape)[1])),
    )


def decode_factors(q: Any) -> Tensor:
    """The product of all factors of each element, float32 of the logical shape: what a code of 1.0 would decode to."""
    element = q._quantizer.element
    buffers = []
    for slot, buffer in zip(q._quantizer.slots, q.buffers(), strict=True):
        is_codes = slot.name.endswith(("_data", "_transpose"))
        buffers.append(_fill_with_ones(buffer, slot.dims, element) if is_codes else buffer)
    plain = q._quantizer
    if getattr(plain, "with_rht", False) and not plain.rowwise:
        # The factors are those before the rotation back, which mixes elements.
        return torch.full(q.shape, math.nan, device=q.device)
    return with_buffers(q, buffers).dequantize(torch.float32)


def _fill_with_ones(buffer: Tensor, dims: tuple[Any, ...], element: Any) -> Tensor:
    """Codes of 1.0 in the packing of ``buffer``."""
    if element.dtype is not None:
        one = torch.ones((), dtype=torch.float32).to(element.dtype).view(torch.uint8)
        return torch.full_like(buffer, one.item())
    one = code_values(element).index(1.0)
    packed = next((i for i, d in enumerate(dims) if d.units == 3), None)
    if packed is not None:
        word = one | one << 6 | one << 12 | one << 18
        pattern = torch.tensor([word & 0xFF, word >> 8 & 0xFF, word >> 16], dtype=torch.uint8, device=buffer.device)
        along = 0 if packed == 0 else buffer.ndim - 1
        tiled = pattern.repeat(buffer.shape[along] // 3)
        return (tiled[:, None] if along == 0 and buffer.ndim > 1 else tiled).expand(buffer.shape).contiguous()
    halves = any(d.per > 1 for d in dims)
    return torch.full_like(buffer, one | one << 4 if halves else one)


def _decibel(signal: Tensor, noise: Tensor) -> float:
    if noise.item() == 0:
        return math.inf
    return 10 * math.log10(signal.item() / noise.item()) if signal.item() else -math.inf


def _largest(values: Tensor) -> float:
    return values.max().item() if values.numel() else 0.0


def _worst_blocks(values: Tensor, error: Tensor, block: tuple[int, int]) -> tuple[BlockError, ...]:
    rows, cols = rows_cols(values.shape)
    if not values.numel():
        return ()
    signal = to_blocks(values.reshape(rows, cols), *block).square().sum((1, 3))
    errors = to_blocks(error.reshape(rows, cols), *block)
    noise = errors.square().sum((1, 3))
    ratio = torch.where(noise == 0, math.inf, signal / noise)
    count = min(WORST, ratio.numel())
    picked = ratio.flatten().topk(count, largest=False).indices.tolist()
    grid = ratio.shape[1]
    return tuple(
        BlockError(
            row=i // grid * block[0],
            col=i % grid * block[1],
            sqnr_db=_decibel(signal.flatten()[i], noise.flatten()[i]),
            max_abs_error=errors[i // grid, :, i % grid].max().item(),
        )
        for i in picked
        if noise.flatten()[i] > 0
    )
