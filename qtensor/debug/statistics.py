"""Compute the statistics of one tensor on its device, without reading any of them on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qtensor.core.buffer_shapes import rows_cols
from qtensor.debug.error_report import ChunkErrors, compare_chunk, decibel
from qtensor.quantizers import Quantizer
from qtensor.reference.blocks import to_blocks
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.storage.numbers import factors_of_elements

OUTLIER = 10.0
"""A column is an outlier channel if its maximum is above this multiple of the median column's.

The median is over the columns whose maximum is not zero.
"""

Number = float | Tensor
_CHUNK_ON_CPU, _CHUNK = 1 << 18, 1 << 24
"""Elements that are compared at a time: small chunks stay in the cache of a CPU."""


class Totals(NamedTuple):
    """Statistics of one tensor, or of several calls together; each is a number."""

    numel: float
    nan: float
    inf: float
    amax: float
    """Largest finite magnitude."""
    signal: float
    """Sum of the squared values; NaN without a comparison."""
    noise: float
    """Sum of the squared errors; NaN without a comparison."""
    saturated: float
    """Number of values beyond the largest code of their block; NaN if unknown."""
    flushed: float
    """Number of non-zero values that became zero; NaN without a comparison."""
    scale_min: float
    """Smallest decode factor; inf if there is none."""
    scale_max: float
    blocks: float
    zero_blocks: float
    """Number of blocks whose values are all zero after quantization."""
    columns: float
    dead_columns: float
    """Number of columns without a non-zero value, in this call and those before."""
    outlier_channels: float
    """Number of outlier channels, by the maxima over this call and those before."""

    @property
    def sqnr_db(self) -> float:
        """10 log10(signal / noise); NaN without a comparison or without a value to compare."""
        if math.isnan(self.noise) or self.numel == self.nan + self.inf:
            return math.nan
        return decibel(self.signal, self.noise)

    def plus(self, later: Totals) -> Totals:
        """Return the statistics of both.

        The columns of ``later`` were counted together with the calls before.
        """
        sums = [a + b for a, b in zip(self, later, strict=True)]
        return Totals(*sums)._replace(
            amax=max(self.amax, later.amax),
            scale_min=min(self.scale_min, later.scale_min),
            scale_max=max(self.scale_max, later.scale_max),
            columns=later.columns,
            dead_columns=later.dead_columns,
            outlier_channels=later.outlier_channels,
        )


class Columns(NamedTuple):
    """The columns of a tensor, over one or several calls."""

    maxima: Tensor
    """Largest finite magnitude of each column, (columns,), in the dtype of the tensor."""
    used: Tensor
    """Whether each column has a value that is not zero, (columns,)."""

    def joined(self, other: Columns) -> Columns:
        """Return the columns of both, on the device of the first, as many as the wider has."""
        count = max(self.used.numel(), other.used.numel())
        parts = [
            [pad(t.to(self.used.device), (0, count - t.numel())) for t in columns]
            for columns in (self, other)
        ]
        (maxima_a, used_a), (maxima_b, used_b) = parts
        return Columns(torch.maximum(maxima_a, maxima_b), used_a | used_b)


def totals_of(vectors: Sequence[Tensor]) -> list[Totals]:
    """Return the statistics in vectors of ``measure``; each device is read once."""
    rows: dict[int, Totals] = {}
    for device in dict.fromkeys(v.device for v in vectors):
        chosen = [i for i, v in enumerate(vectors) if v.device == device]
        values = torch.stack([vectors[i] for i in chosen]).tolist()
        rows.update({i: Totals(*row) for i, row in zip(chosen, values, strict=True)})
    return [rows[i] for i in range(len(vectors))]


def measure(
    x: Tensor | QuantizedTensorStorage,
    quantizer: Quantizer | None = None,
    scale: Tensor | None = None,
    reference: Tensor | None = None,
    before: Columns | None = None,
) -> tuple[Tensor, Columns]:
    """Return the statistics of a tensor, as the fields of ``Totals``, and its columns.

    The statistics are float64 on the tensor's device. The columns, and the statistics of columns,
    include the calls ``before``.

    Args:
        x: a floating tensor of any shape, or a quantized one.
        quantizer: quantizes a plain ``x`` for the comparison; None compares nothing. Stochastic
            rounding uses a seed of its own; no random state changes.
        scale: float32 (1,), the encode factor of delayed scaling.
        reference: the high-precision values of a quantized ``x``, of its shape.
        before: the columns of earlier calls.
    """
    if isinstance(x, QuantizedTensorStorage):
        return _vector(reference, x, before)
    x = x.detach()
    if quantizer is None:
        return _vector(x, None, before)
    seed = None
    if quantizer.stochastic_rounding:
        seed = torch.zeros(1, dtype=torch.int64, device=x.device)
    return _vector(x, quantizer.quantize(x, scale=scale, generator=seed), before)


def _vector(x: Tensor | None, q: Any, before: Columns | None) -> tuple[Tensor, Columns]:
    """Return the statistics of ``x``, of its quantized form ``q``, or of both."""
    values = q.dequantize(torch.float32).detach() if x is None else x
    rows, cols = rows_cols(values.shape)
    values = values.reshape(rows, cols)
    decoded = factor = None
    if q is not None:
        decoded = values if x is None else q.dequantize(torch.float32).detach().reshape(rows, cols)
        factor = factors_of_elements(q).reshape(rows, cols)
    block = (1, max(cols, 1)) if q is None else q._quantizer.value_block or (1, max(cols, 1))
    sums = _Sums(cols, values)
    limit = _CHUNK_ON_CPU if values.device.type == "cpu" else _CHUNK
    step = max(block[0], limit // max(cols, 1) // block[0] * block[0])
    for start in range(0, rows if cols else 0, step):
        part = slice(start, start + step)
        finite = sums.add(values[part])
        if decoded is not None and factor is not None:
            chunk = values[part], decoded[part], factor[part], q._quantizer.element.max
            local = q._quantizer.factors_are_local
            if not (finite and local and sums.compare_finite(*chunk)):
                sums.compare(compare_chunk(*chunk))
            largest = to_blocks(decoded[part].abs(), *block).amax(3).amax(1)
            sums.count("zero_blocks", largest.numel() - largest.count_nonzero())
            sums.count("blocks", largest.numel())
    unknown = []
    if x is None or q is None:
        unknown = ["signal", "noise", "saturated", "flushed"]
    elif not q._quantizer.factors_are_local:
        unknown = ["saturated"]
    columns = Columns(sums.column_max, sums.used)
    columns = columns if before is None else columns.joined(before)
    return sums.vector(values.numel(), columns, unknown), columns


class _Sums:
    """Add up chunks of rows in float64 scalars on the device."""

    def __init__(self, columns: int, x: Tensor) -> None:
        self.device = device = x.device
        self.on_cpu = device.type == "cpu"
        # On a CPU these are numbers, elsewhere scalars on the device, which nothing waits for.
        self.total: dict[str, Number] = dict.fromkeys(_ADDED, 0.0)
        self.scale_min: Any = math.inf
        self.scale_max: Any = -math.inf
        if not self.on_cpu:
            kind: dict[str, Any] = {"dtype": torch.float64, "device": device}
            self.total = {name: torch.zeros((), **kind) for name in _ADDED}
            self.scale_min = torch.full((), math.inf, **kind)
            self.scale_max = -self.scale_min
        self.column_max = torch.zeros(columns, dtype=x.dtype, device=device)
        self.used = torch.zeros(columns, dtype=torch.bool, device=device)

    def count(self, name: str, value: Number) -> None:
        """Add a number, or a scalar on the device."""
        self.total[name] += float(value) if self.on_cpu else value

    def add(self, x: Tensor) -> bool:
        """Add the counts and maxima of values (rows, K); True if all are known to be finite."""
        if self.on_cpu:
            # Usually all values are finite, which the maxima show. Elsewhere reading them waits.
            largest = x.abs().amax(0)
            if math.isfinite(largest.double().sum()):
                self.used |= largest > 0
                self.column_max = torch.maximum(self.column_max, largest)
                return True
        self.count("nan", x.isnan().sum())
        self.count("inf", x.isinf().sum())
        self.used |= (x != 0).any(0)
        magnitudes = torch.where(x.isfinite(), x, 0).abs().amax(0)
        self.column_max = torch.maximum(self.column_max, magnitudes)
        return False

    def compare_finite(self, x: Tensor, decoded: Tensor, factor: Tensor, largest: float) -> bool:
        """Add the errors of a chunk of finite values on a CPU, as ``compare_chunk`` defines them.

        It makes no masks (hot path). If a decoded value or a factor is not finite, it adds nothing
        and returns False.
        """
        values = x.double().reshape(-1)
        error = decoded.double().reshape(-1).sub_(values)
        noise = float(error.dot(error))
        smallest, highest = (float(value) for value in factor.aminmax())
        if not (math.isfinite(noise) and math.isfinite(smallest) and math.isfinite(highest)):
            return False
        self.total["noise"] += noise
        self.total["signal"] += float(values.dot(values))
        # A zero is decoded to zero, because each element has a factor of its own.
        self.total["flushed"] += float(x.count_nonzero() - decoded.count_nonzero())
        # The rounding of the quotient is smaller than the tolerance of the bound.
        quotient = max(abs(float(value)) for value in (x / factor).aminmax())
        if not quotient <= largest * (1 + 2.0**-21):
            bound = factor.double().reshape(-1).mul_(largest * (1 + 2.0**-20))
            self.total["saturated"] += float(
                values.abs_().sub_(bound).clamp_(min=0).count_nonzero()
            )
        self.scale_min = min(self.scale_min, smallest)
        self.scale_max = max(self.scale_max, highest)
        return True

    def compare(self, chunk: ChunkErrors) -> None:
        """Add the errors of a chunk."""
        for name in ("signal", "noise", "saturated", "flushed"):
            self.count(name, getattr(chunk, name))
        if self.on_cpu:
            self.scale_min = min(self.scale_min, float(chunk.scale_min))
            self.scale_max = max(self.scale_max, float(chunk.scale_max))
        else:
            self.scale_min = torch.minimum(self.scale_min, chunk.scale_min)
            self.scale_max = torch.maximum(self.scale_max, chunk.scale_max)

    def vector(self, numel: int, columns: Columns, unknown: Sequence[str]) -> Tensor:
        """Return the fields of ``Totals`` (fields,); ``unknown`` names those that are NaN."""
        maxima = columns.maxima.double()
        found: dict[str, Any] = dict(self.total)
        found |= dict.fromkeys(unknown, math.nan)
        found |= {"numel": numel, "columns": maxima.numel()}
        found |= {"scale_min": self.scale_min, "scale_max": self.scale_max}
        found["dead_columns"] = (~columns.used).sum()
        if maxima.numel():
            found["amax"] = maxima.max()
            usual = torch.where(maxima > 0, maxima, math.nan).nanmedian()
            found["outlier_channels"] = (maxima > OUTLIER * usual).sum()
        kind: dict[str, Any] = {"dtype": torch.float64, "device": self.device}
        ordered = [found.get(name, 0.0) for name in Totals._fields]
        if self.on_cpu:
            return torch.tensor([float(value) for value in ordered], **kind)
        # torch.full fills on the device; a copy from the host would wait for it.
        return torch.stack([
            value.to(torch.float64) if isinstance(value, Tensor) else torch.full((), value, **kind)
            for value in ordered
        ])


_ADDED = ("nan", "inf", "signal", "noise", "saturated", "flushed", "blocks", "zero_blocks")
