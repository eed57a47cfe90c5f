"""Report the error of a quantization: signal to noise, saturation and the worst blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.api import quantizer_of
from qtensor.core.buffer_shapes import rows_cols
from qtensor.core.errors import DtypeError, check
from qtensor.core.texts import html_table
from qtensor.reference.blocks import to_blocks
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.storage.numbers import factors_of_elements
from qtensor.storage.rebuild import tensor_of

WORST = 5
CHUNK = 1 << 18
"""Number of elements that are compared at a time."""


@dataclass(frozen=True)
class BlockError:
    """Describe the error inside one block of the (M, K) view."""

    row: int
    """First row."""
    col: int
    """First column."""
    sqnr_db: float
    max_abs_error: float


@dataclass(frozen=True)
class ErrorReport:
    """Hold the result of ``error_report``; ``str()`` gives a table.

    Errors are measured only for values that are finite before and after quantization.
    """

    quantizer: str
    """Canonical string of the quantizer."""
    shape: tuple[int, ...]
    bits_per_value: float
    """Bits of all buffers, with factors and padding, divided by the number of values."""
    sqnr_db: float
    """10 log10(sum x^2 / sum (x - q)^2).

    It is inf if there is no error, and NaN if no value is finite before and after.
    """
    max_abs_error: float
    """Largest absolute error; NaN if no value is finite before and after."""
    max_rel_error: float
    """Largest relative error of non-zero values; NaN if no value is finite before and after."""
    saturated: float
    """Share of values beyond the largest code of their block.

    It is NaN for rotated data, because no factor belongs to one element.
    """
    flushed_to_zero: float
    """Share of non-zero values that became zero."""
    not_finite: int
    """Values that are NaN or inf, before or after."""
    scale_min: float
    """Smallest decode factor of an element, multiplied by the tensor-wide factor."""
    scale_max: float
    worst_blocks: tuple[BlockError, ...]
    """The blocks with the lowest signal to noise ratio, worst first."""

    def __str__(self) -> str:
        return "\n".join(f"{name:<16} {value}" for name, value in self._rows())

    def _repr_html_(self) -> str:
        """Return the table as HTML, for notebooks."""
        return html_table([("error_report", ""), *self._rows()])

    def _rows(self) -> list[tuple[str, str]]:
        """Return the names and values of the table."""
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
        return rows + [
            (
                "worst block" if i == 0 else "",
                f"[{b.row}, {b.col}] {b.sqnr_db:.2f} dB, max error {b.max_abs_error:.4g}",
            )
            for i, b in enumerate(self.worst_blocks)
        ]


@dataclass
class RunningErrors:
    """Keep running totals of errors over chunks of rows; ``ChunkErrors`` describes them."""

    signal: float = 0.0
    noise: float = 0.0
    max_abs: float = 0.0
    max_rel: float = 0.0
    saturated: float = 0
    flushed: int = 0
    not_finite: int = 0
    scale_min: float = math.inf
    scale_max: float = -math.inf

    def add(self, x: Tensor, decoded: Tensor, factor: Tensor, largest: float) -> Tensor:
        """Add a chunk of rows to the totals and return its absolute errors, (rows, K) float64.

        ``compare_chunk`` explains the arguments. Errors of values that are not finite are 0.
        """
        chunk = compare_chunk(x, decoded, factor, largest)
        self.signal += chunk.signal.item()
        self.noise += chunk.noise.item()
        self.max_abs = max(self.max_abs, chunk.error.max().item())
        self.max_rel = max(self.max_rel, chunk.max_rel.item())
        self.saturated += int(chunk.saturated)
        self.flushed += int(chunk.flushed)
        self.not_finite += int(chunk.not_finite)
        self.scale_min = min(self.scale_min, chunk.scale_min.item())
        self.scale_max = max(self.scale_max, chunk.scale_max.item())
        return chunk.error


class ChunkErrors(NamedTuple):
    """Errors of a chunk of rows. All but ``error`` are scalars on the device of the chunk."""

    error: Tensor
    """Absolute errors, (rows, K) float64; 0 for values that are not finite."""
    signal: Tensor
    """Sum of the squared values, over values that are finite before and after."""
    noise: Tensor
    """Sum of the squared errors."""
    max_rel: Tensor
    """Largest relative error of the non-zero values."""
    saturated: Tensor
    """Number of values beyond the largest code of their block."""
    flushed: Tensor
    """Number of non-zero values that became zero."""
    not_finite: Tensor
    """Number of values that are NaN or inf, before or after."""
    scale_min: Tensor
    """Smallest finite decode factor; inf if there is none."""
    scale_max: Tensor
    """Largest finite decode factor; -inf if there is none."""


def kl_divergences(reference: Tensor, output: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of two softmaxes at each position (...,), in nats.

    ``sum p (log p - log q)`` over the last dim, in float64; p of the reference, q of the output.
    """
    log_p, log_q = (t.double().log_softmax(-1) for t in (reference, output))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def compare_chunk(x: Tensor, decoded: Tensor, factor: Tensor, largest: float) -> ChunkErrors:
    """Return the errors of a chunk of rows without reading any of them on the host.

    ``x`` has the original values, (rows, K), at least one. The ``decoded`` values and the decode
    ``factor`` of each element are (rows, K) float32. ``largest`` is the element's magnitude.
    """
    finite = x.isfinite() & decoded.isfinite()
    values = torch.where(finite, x, 0).double()
    error = (values - torch.where(finite, decoded, 0)).abs_()
    magnitude = values.abs()
    nonzero = magnitude > 0
    # The factor itself is rounded, so a value within that rounding is not saturated.
    bound = factor.double() * (largest * (1 + 2.0**-20))
    known = factor.isfinite()
    return ChunkErrors(
        error=error,
        signal=values.square().sum(),
        noise=error.square().sum(),
        max_rel=torch.where(nonzero, error / magnitude, 0).max(),
        saturated=(x.double().abs() > bound).sum(),
        flushed=(nonzero & (decoded == 0)).sum(),
        not_finite=(~finite).sum(),
        scale_min=torch.where(known, factor, math.inf).min(),
        scale_max=torch.where(known, factor, -math.inf).max(),
    )


def error_report(x: Tensor, q: Any) -> ErrorReport:
    """Return the differences between a tensor and its quantized form.

    Args:
        x: the original floating tensor, of any shape.
        q: the quantized tensor or storage, of the same shape.

    Returns:
        The measured errors; ``str()`` of the report is a table.

    Raises:
        QTensorError: ``q`` is not quantized, or the shapes differ.
    """
    op, rule = "error_report", "the second argument must be quantized"
    fix = "Pass qtensor.quantize(x, fmt)"
    check(isinstance(q, QuantizedTensorStorage), op, rule, type(q).__name__, fix)
    rule = "the first argument must be the floating tensor that was quantized"
    right, got = isinstance(x, torch.Tensor), getattr(x, "dtype", type(x).__name__)
    check(right and x.is_floating_point(), op, rule, got, "Pass the original", DtypeError)
    same, got = tuple(x.shape) == tuple(q.shape), f"{tuple(x.shape)} and {tuple(q.shape)}"
    check(same, op, "shapes must be equal", got, "Pass the tensor that was quantized")
    # The blocks of a convolution's weight are those of a matrix.
    shape, quantizer, q = tuple(x.shape), quantizer_of(q), tensor_of(q)
    rows, cols = rows_cols(q.shape)
    source = (x.dequantize() if isinstance(x, QuantizedTensorStorage) else x).detach()
    source = source.reshape(rows, cols)
    decoded = q.dequantize(torch.float32).detach().reshape(rows, cols)
    factor = factors_of_elements(q).reshape(rows, cols)
    block = quantizer.value_block or (1, max(cols, 1))
    sums, worst = RunningErrors(), _Worst(block)
    # Small chunks stay in cache; full-size float64 temporaries cost more than the arithmetic.
    step = max(block[0], CHUNK // max(cols, 1) // block[0] * block[0])
    for start in range(0, rows if cols else 0, step):
        chunk = slice(start, start + step)
        error = sums.add(source[chunk], decoded[chunk], factor[chunk], quantizer.element.max)
        worst.add(source[chunk], error, start)
    numel = max(x.numel(), 1)
    nothing_compared = sums.not_finite == numel
    return ErrorReport(
        quantizer=quantizer.canonical,
        shape=shape,
        bits_per_value=8 * q.nbytes / numel,
        sqnr_db=math.nan if nothing_compared else decibel(sums.signal, sums.noise),
        max_abs_error=math.nan if nothing_compared else sums.max_abs,
        max_rel_error=math.nan if nothing_compared else sums.max_rel,
        saturated=sums.saturated / numel if quantizer.factors_are_local else math.nan,
        flushed_to_zero=sums.flushed / numel,
        not_finite=sums.not_finite,
        scale_min=sums.scale_min if sums.scale_min < math.inf else math.nan,
        scale_max=sums.scale_max if sums.scale_max > -math.inf else math.nan,
        worst_blocks=worst.report(),
    )


def decibel(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise); inf without noise, -inf for noise without signal."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


class _Worst:
    """Collect the blocks with the lowest signal to noise ratio."""

    def __init__(self, block: tuple[int, int]) -> None:
        self.block = block
        self.blocks: list[BlockError] = []

    def add(self, x: Tensor, error: Tensor, row: int) -> None:
        """Add the worst blocks of a chunk of rows.

        ``row`` is the first row of the chunk; ``x`` and ``error`` are (rows, K).
        """
        values = torch.where(x.isfinite(), x, 0).double()
        signal = to_blocks(values, *self.block).square().sum((1, 3))
        errors = to_blocks(error, *self.block)
        noise = errors.square().sum((1, 3))
        ratio = torch.where(noise == 0, math.inf, signal / noise).flatten()
        picked = ratio.topk(min(WORST, ratio.numel()), largest=False).indices.tolist()
        grid = noise.shape[1]
        for i in picked:
            down, right = divmod(i, grid)
            if noise[down, right] > 0:
                self.blocks.append(
                    BlockError(
                        row=row + down * self.block[0],
                        col=right * self.block[1],
                        sqnr_db=decibel(signal[down, right].item(), noise[down, right].item()),
                        max_abs_error=errors[down, :, right].max().item(),
                    )
                )
        self.blocks = sorted(self.blocks, key=lambda b: b.sqnr_db)[:WORST]

    def report(self) -> tuple[BlockError, ...]:
        """Return the blocks, worst first."""
        return tuple(self.blocks)
