"""Compare the logits of two models."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from qtensor.core.buffer_shapes import rows_cols
from qtensor.debug.error_report import kl_divergences

_CHUNK = 1 << 18
"""Values that are compared at a time, in float64: a few MiB, whatever the vocabulary."""


def rows_in_chunks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows of two tensors (..., K) as float64 (rows, K), a few rows at a time."""
    shape = rows_cols(a.shape)
    rows = max(1, _CHUNK // max(1, shape[1]))
    for x, y in zip(a.reshape(shape).split(rows), b.reshape(shape).split(rows), strict=True):
        yield x.double(), y.double()


class Scores:
    """Agreement and divergence of logits over all positions."""

    def __init__(self) -> None:
        self.count, self.agreed, self.divergence = 0, 0, 0.0

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add logits (..., classes) of both models; logits of different shapes are left out."""
        if a.shape != b.shape or not a.numel():
            return
        for x, y in rows_in_chunks(a, b):
            self.agreed += int((x.argmax(-1) == y.argmax(-1)).sum())
            self.divergence += float(kl_divergences(x, y).sum())
            self.count += x.shape[0]

    @property
    def top1(self) -> float:
        """Share of positions whose largest logit is at the same class."""
        return self.agreed / self.count if self.count else math.nan

    @property
    def kl(self) -> float:
        """Mean of KL(softmax(a) || softmax(b)) over positions, in nats."""
        return self.divergence / self.count if self.count else math.nan
