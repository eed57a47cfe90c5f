"""Measure the error between values and their decoded form, part by part."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.debug.error_report import decibel


class ErrorSums(NamedTuple):
    """Hold the sums of one part, or of several.

    Attributes:
        signal: sum of x^2.
        noise: sum of (x - q)^2.
        largest: largest |x - q|.
    """

    signal: float = 0.0
    noise: float = 0.0
    largest: float = 0.0

    @property
    def sqnr_db(self) -> float:
        """Return 10 log10(signal / noise): inf without noise, NaN if a value is not finite."""
        finite = math.isfinite(self.signal + self.noise)
        return decibel(self.signal, self.noise) if finite else math.nan

    @property
    def max_abs_error(self) -> float:
        """Return the largest absolute error, NaN if a value is not finite."""
        return self.largest if math.isfinite(self.signal + self.noise) else math.nan


def error_sums(x: Tensor, decoded: Tensor) -> ErrorSums:
    """Return the sums of a part.

    The dot products run in float32 over pieces of 2^17 elements, and their results are added in
    float64; the sums then hold five digits. ``decoded``, float32 of as many elements as ``x``,
    is overwritten.
    """
    values, error = x.reshape(-1).float(), decoded.reshape(-1)
    if not values.numel():
        return ErrorSums()
    error.sub_(values)
    low, high = torch.aminmax(error)
    return ErrorSums(_square_sum(values), _square_sum(error), max(high.item(), -low.item()))


_PIECE = 1 << 17


def _square_sum(x: Tensor) -> float:
    whole = x.numel() // _PIECE * _PIECE
    pieces = x[:whole].view(-1, _PIECE)
    total = sum(torch.dot(piece, piece).item() for piece in pieces)
    rest = x[whole:]
    total += torch.dot(rest, rest).item()
    if not math.isfinite(total) and bool(torch.isfinite(x).all()):
        return float(x.double().square().sum())  # the squares are beyond float32
    return total


def combined(parts: Iterable[ErrorSums]) -> ErrorSums:
    """Return the sums of several parts."""
    every = list(parts)
    return ErrorSums(
        math.fsum(p.signal for p in every) if _finite(every) else math.nan,
        math.fsum(p.noise for p in every) if _finite(every) else math.nan,
        max((p.largest for p in every), default=0.0),
    )


def _finite(parts: list[ErrorSums]) -> bool:
    return all(math.isfinite(p.signal) and math.isfinite(p.noise) for p in parts)
