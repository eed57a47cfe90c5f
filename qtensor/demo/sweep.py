"""Quantize matrices to one format and measure the error."""

import math
import time
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

import qtensor
from qtensor.demo.report import FormatResult, LayerResult
from qtensor.errors import check

Tick = Callable[[str], None]
"""Called with a label after each step of the work."""


def choose_formats(asked: str | None) -> tuple[str, ...]:
    """Return the formats of ``--formats a,b`` in that order, or all formats for None.

    Raises:
        QTensorError: a name is not a format, or none was given.
    """
    known = tuple(qtensor.formats())
    if asked is None:
        return known
    names = tuple(dict.fromkeys(name.strip() for name in asked.split(",") if name.strip()))
    unknown = [name for name in names if name not in known]
    check(
        bool(names) and not unknown,
        op="demo",
        rule="--formats must name formats of qtensor, separated by commas",
        got=", ".join(unknown) if unknown else f"'{asked}'",
        fix=f"Choose from {', '.join(known)}",
    )
    return names


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


def sweep(
    weights: Mapping[str, Tensor], fmt: str, tick: Tick
) -> tuple[FormatResult, dict[str, Tensor]]:
    """Quantize every matrix to ``fmt``.

    Args:
        weights: name to (rows, columns) tensor.
        fmt: a name of ``qtensor.formats()``.
        tick: called after each matrix.

    Returns:
        The measurements, and the quantized tensors by name.
    """
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
        tick(f"{fmt}  {name}")
    return _summary(fmt, layers, seconds), quantized


def _summary(fmt: str, layers: list[LayerResult], seconds: float) -> FormatResult:
    worst = min(layers, key=lambda layer: _rank(layer.sqnr_db))
    nbytes = sum(layer.nbytes for layer in layers)
    return FormatResult(
        format=fmt,
        bits_per_value=8 * nbytes / sum(math.prod(layer.shape) for layer in layers),
        sqnr_mean_db=_mean(layer.sqnr_db for layer in layers),
        sqnr_worst_db=worst.sqnr_db,
        worst_layer=worst.name,
        nbytes=nbytes,
        seconds=seconds,
        layers=tuple(layers),
    )


def _rank(sqnr_db: float) -> float:
    """Return a sort key that puts NaN (a matrix with NaN in it) first, as the worst."""
    return -math.inf if math.isnan(sqnr_db) else sqnr_db


def _mean(values: Iterable[float]) -> float:
    """Return the mean of the finite values; inf if every matrix is exact, NaN if one has NaN."""
    finite = [value for value in values if value != math.inf]
    return sum(finite) / len(finite) if finite else math.inf
