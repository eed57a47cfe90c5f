"""Quantize matrices to one format and measure the error."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

import qtensor


@dataclass(frozen=True)
class LayerResult:
    """One matrix in one format."""

    name: str
    shape: tuple[int, ...]
    sqnr_db: float
    """Signal to quantization noise in dB; infinite if every value is exact."""
    not_finite: int
    """Number of values that are NaN or infinite, before or after; the dB leaves them out."""
    nbytes: int


@dataclass(frozen=True)
class FormatResult:
    """Every matrix in one format."""

    format: str
    bits_per_value: float
    """8 * nbytes / values, with codes, scales and padding."""
    sqnr_mean_db: float
    """Mean of the finite values; infinite if every matrix is exact, NaN if one has NaN."""
    sqnr_worst_db: float
    worst_layer: str
    nbytes: int
    seconds: float
    """Time in ``qtensor.quantize`` alone, summed over the matrices."""
    layers: tuple[LayerResult, ...]


def call_options(x_hp: Tensor, fmt: str) -> dict[str, Tensor]:
    """Return further arguments that ``qtensor.quantize(x_hp, fmt)`` needs.

    Delayed scaling takes its scale from earlier steps. The demo uses the scale after one step that
    has seen ``x_hp``.
    """
    if fmt != "fp8_delayed":
        return {}
    history, scale = qtensor.delayed_scaling_state(1, 1)
    qtensor.record_amax_(history, x_hp.detach().abs().amax().float().reshape(1))
    return {"scale": qtensor.delayed_scaling_update(history, scale)[1]}


def sweep(weights: Mapping[str, Tensor], fmt: str) -> tuple[FormatResult, dict[str, Tensor]]:
    """Quantize every matrix to ``fmt``; return measurements, and the quantized tensors by name."""
    layers: list[LayerResult] = []
    quantized: dict[str, Tensor] = {}
    seconds = 0.0
    for name, weight in weights.items():
        options = call_options(weight, fmt)
        start = time.perf_counter()
        q = qtensor.quantize(weight, fmt, **options)
        seconds += time.perf_counter() - start
        errors = qtensor.error_report(weight, q)
        shape = tuple(weight.shape)
        layers.append(LayerResult(name, shape, errors.sqnr_db, errors.not_finite, q.nbytes))
        quantized[name] = q
    return summary(fmt, layers, seconds), quantized


def summary(fmt: str, layers: list[LayerResult], seconds: float) -> FormatResult:
    """Return the result of a format from the results of its matrices."""
    # A matrix with NaN is the worst.
    worst = min(layers, key=lambda layer: (not math.isnan(layer.sqnr_db), layer.sqnr_db))
    inexact = [layer.sqnr_db for layer in layers if layer.sqnr_db != math.inf]
    nbytes = sum(layer.nbytes for layer in layers)
    return FormatResult(
        format=fmt,
        bits_per_value=8 * nbytes / sum(math.prod(layer.shape) for layer in layers),
        sqnr_mean_db=sum(inexact) / len(inexact) if inexact else math.inf,
        sqnr_worst_db=worst.sqnr_db,
        worst_layer=worst.name,
        nbytes=nbytes,
        seconds=seconds,
        layers=tuple(layers),
    )
