"""Hold the contents of a report: sizes, errors, codes and worst blocks of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from qtensor.debug.viewer import View
from qtensor.reporting.measuring import Codes, Statistics
from qtensor.reporting.recorded import Recorded
from qtensor.weights.search_result import SearchResult


@dataclass(frozen=True)
class TensorReport:
    """Describe one tensor of the model.

    Attributes:
        name: name in the model or checkpoint.
        kind: canonical text of the quantizer, "plain", or "dense" for a quantized weight that no
            format of qtensor holds.
        shape: the logical shape.
        dtype: the nominal dtype, without "torch.".
        nbytes: stored bytes, factors included.
        statistics: numbers about the values; None for tensors without floating values.
        codes: counts of codes and factors; None for tensors that are not quantized.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    statistics: Statistics | None
    codes: Codes | None

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def bits(self) -> float:
        """Stored bits of a value; NaN without values."""
        return 8 * self.nbytes / self.numel if self.numel else math.nan

    @property
    def sqnr_db(self) -> float:
        """SQNR against the original; NaN without a comparison."""
        return self.statistics.sqnr_db if self.statistics else math.nan

    @property
    def cosine(self) -> float:
        """Cosine similarity to the original; NaN without a comparison."""
        return self.statistics.cosine if self.statistics else math.nan


@dataclass(frozen=True)
class WorstBlock:
    """One of the worst blocks of the model.

    Attributes:
        name: name of its tensor.
        badness: minus the SQNR of the block in dB, or its crest factor in dB without originals.
        view: a region of the block.
    """

    name: str
    badness: float
    view: View


@dataclass(frozen=True, repr=False)
class Findings:
    """Describe the weights of a model. ``ModelReport`` explains the attributes."""

    title: str
    layout: str
    against: str | None
    tensors: tuple[TensorReport, ...]
    worst: tuple[WorstBlock, ...]
    notes: tuple[str, ...]
    recorded: tuple[Recorded, ...] = ()
    search: SearchResult | None = None

    @property
    def quantized(self) -> tuple[TensorReport, ...]:
        """The quantized tensors."""
        return tuple(t for t in self.tensors if t.kind != "plain")

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors)

    def formats(self) -> dict[str, list[TensorReport]]:
        """Return the tensors by kind."""
        found: dict[str, list[TensorReport]] = {}
        for tensor in self.tensors:
            found.setdefault(tensor.kind, []).append(tensor)
        return found

    def __str__(self) -> str:
        lines = [f"{self.title}: {len(self.tensors)} tensors, {self.nbytes:,} bytes"]
        for kind, tensors in self.formats().items():
            values = sum(t.numel for t in tensors)
            bits = 8 * sum(t.nbytes for t in tensors) / values if values else math.nan
            text = f"  {kind}: {len(tensors)} tensors, {values:,} values, {bits:.3f} bits a value"
            sqnr = mean(t.sqnr_db for t in tensors)
            if kind != "plain" and not math.isnan(sqnr):
                text += f", mean SQNR {sqnr:.2f} dB"
            lines.append(text)
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__


def mean(values: Iterable[float]) -> float:
    """Return the mean of the finite numbers; NaN if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan
