"""Measure one tensor of a model: its codes and factors, and its error if the original is known.

A tensor is read in parts of whole rows: memory does not grow with its size.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.api import quantizer_of
from qtensor.checkpoints.conversion.rows import our_values, parts_of, plain_values
from qtensor.core.buffer_shapes import rows_cols
from qtensor.core.formats import Element
from qtensor.core.operand import decodes_in_rows, row_parts
from qtensor.debug.error_report import RunningErrors, decibel
from qtensor.debug.statistics import OUTLIER
from qtensor.debug.viewer import View, show
from qtensor.quantizers import Quantizer
from qtensor.reference.blocks import to_blocks
from qtensor.reference.elements import code_values
from qtensor.storage.numbers import factors_of_elements
from qtensor.storage.rebuild import tensor_of
from qtensor.storage.tensor import QuantizedTensor

_SHOWN_ROWS, _SHOWN_COLS = 2, 32
"""Largest region of a block that is shown."""


@dataclass
class Statistics:
    """Describe the values of one tensor; a number that is not known is NaN."""

    values: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    amax: float = 0.0
    """Largest finite magnitude."""
    outlier_channels: int = 0
    """Columns whose maximum is more than 10 times the median of the columns' maxima."""
    dead_columns: int = 0
    """Columns without a non-zero value."""
    columns: int = 0
    compared: int = 0
    """Number of values that were compared: finite before and after."""
    errors: RunningErrors = field(default_factory=RunningErrors)
    """Errors of the values that were compared."""
    decoded: float = 0.0
    """Sum of the squared decoded values that were compared."""
    dot: float = 0.0
    """Sum of the products of originals and decoded values."""

    @property
    def sqnr_db(self) -> float:
        """10 log10(signal / noise); NaN without a comparison."""
        return decibel(self.errors.signal, self.errors.noise) if self.compared else math.nan

    @property
    def cosine(self) -> float:
        """Cosine similarity of the original and the decoded values; NaN without a comparison."""
        length = math.sqrt(self.errors.signal * self.decoded) if self.compared else 0.0
        return self.dot / length if length else math.nan

    def share(self, count: float) -> float:
        """Return a count as a share of the values."""
        return count / self.values if self.values else math.nan


@dataclass
class Codes:
    """Count the codes, factors and blocks of one quantized tensor, or of several."""

    element: Element
    counts: Tensor
    """How often each code occurs, int64 (2^bits,)."""
    factors: Counter[int] = field(default_factory=Counter)
    """floor(log2(factor)) -> number of blocks."""
    factor_min: float = math.inf
    factor_max: float = -math.inf
    blocks: int = 0
    zero_blocks: int = 0
    """Blocks whose values are all zero."""

    @classmethod
    def empty(cls, element: Element) -> Codes:
        """Return counts of nothing."""
        return cls(element, torch.zeros(1 << element.bits, dtype=torch.int64))

    @property
    def entropy(self) -> float:
        """Shannon entropy of a code, in bits; less than its width if some codes are rare."""
        shares = self.counts[self.counts > 0].double()
        shares /= shares.sum()
        return -float((shares * shares.log2()).sum()) if shares.numel() else math.nan

    @property
    def largest(self) -> float:
        """Share of the codes with the largest magnitude."""
        top = self.element.max
        chosen = [abs(value) == top for value in code_values(self.element)]
        return float(self.counts[torch.tensor(chosen)].sum()) / max(1, int(self.counts.sum()))

    def add(self, other: Codes) -> None:
        """Add the counts of a tensor with the same element."""
        self.counts += other.counts
        self.factors += other.factors
        self.factor_min = min(self.factor_min, other.factor_min)
        self.factor_max = max(self.factor_max, other.factor_max)
        self.blocks += other.blocks
        self.zero_blocks += other.zero_blocks


class Block(NamedTuple):
    """Locate the worst block of a tensor.

    Attributes:
        badness: greater is worse; minus the SQNR in dB, or the crest factor in dB.
        row: row of its largest error or value.
        col: column of its largest error or value.
        first: first column of the block.
        stop: end of its columns.
    """

    badness: float
    row: int
    col: int
    first: int
    stop: int


class Measured(NamedTuple):
    """The results for one tensor."""

    statistics: Statistics
    codes: Codes | None
    """None for a tensor that is not quantized."""
    worst: Block | None


class Part(NamedTuple):
    """Some rows of a tensor."""

    start: int
    tensor: Any
    """Plain or quantized, (rows, K)."""
    original: Tensor | None
    """Original values (rows, K)."""


def as_matrix(tensor: Tensor) -> Tensor:
    """Return the matrix that a quantized weight of a convolution holds, and others as they are."""
    return tensor_of(tensor) if isinstance(tensor, QuantizedTensor) else tensor


def bounds_of(tensor: Tensor) -> list[tuple[int, int]]:
    """Return (first row, end) of each part of the (M, K) view of a tensor."""
    tensor = as_matrix(tensor)
    if not tensor.numel():
        return []
    quantizer = quantizer_of(tensor) if isinstance(tensor, QuantizedTensor) else None
    if quantizer is not None and (quantizer.columnwise or not decodes_in_rows(quantizer)):
        return [(0, rows_cols(tensor.shape)[0])]
    return parts_of(tensor.shape)


def part_of(tensor: Tensor, original: Tensor | None, bounds: tuple[int, int]) -> Part:
    """Return some rows of a tensor and of its original."""
    start, stop = bounds
    if (matrix := as_matrix(tensor)) is not tensor:
        tensor = matrix
        original = None if original is None else original.reshape(matrix.shape)
    rows, cols = rows_cols(tensor.shape)
    base = None
    if original is not None:
        if isinstance(original, QuantizedTensor):
            source = our_values(original, torch.float32)
        else:
            source = plain_values(original)
        base = source.read(start, stop).detach()
    if not isinstance(tensor, QuantizedTensor):
        return Part(start, tensor.detach().reshape(rows, cols)[start:stop], base)
    if (start, stop) == (0, rows):
        return Part(start, tensor.detach(), base)
    quantizer = quantizer_of(tensor)
    buffers = row_parts(quantizer, tensor.buffers(), tensor.shape, bounds)
    buffers = [buffer.contiguous() for buffer in buffers]
    return Part(start, quantizer.assemble(buffers, (stop - start, cols), tensor.dtype), base)


def measure(tensor: Tensor, original: Tensor | None) -> Measured:
    """Return the statistics of a tensor.

    Without an original of its shape, nothing is compared.
    """
    quantizer = quantizer_of(tensor) if isinstance(tensor, QuantizedTensor) else None
    if (matrix := as_matrix(tensor)) is not tensor:
        tensor, original = matrix, None if original is None else original.reshape(matrix.shape)
    codes = None if quantizer is None else Codes.empty(quantizer.element)
    cols = rows_cols(tensor.shape)[1]
    found = Statistics(columns=cols)
    column_max = torch.zeros(cols, dtype=torch.float32, device=tensor.device)
    worst: Block | None = None
    for bounds in bounds_of(tensor):
        part = part_of(tensor, original, bounds)
        decoded = part.tensor
        factors = None
        if quantizer is not None:
            decoded = part.tensor.dequantize(torch.float32).detach().reshape(-1, cols)
            factors = factors_of_elements(part.tensor).reshape(-1, cols)
        decoded = decoded.float()
        _add_values(found, decoded, column_max)
        if part.original is not None:
            _compare(found, part.original, decoded, factors, quantizer)
        if quantizer is not None and codes is not None and factors is not None:
            block = quantizer.value_block or (1, cols)
            _add_codes(codes, part.tensor, decoded, factors, block)
            candidate = _worst(part, decoded, block)
            if candidate is not None and (worst is None or candidate.badness > worst.badness):
                worst = candidate
    if quantizer is not None and not quantizer.factors_are_local:
        found.errors.saturated = math.nan
    used = column_max[column_max > 0]
    if used.numel():
        found.amax = used.max().item()
        found.outlier_channels = int((used > OUTLIER * used.median()).sum())
    found.dead_columns = cols - used.numel()
    one_factor = codes is not None and codes.factor_min == codes.factor_max
    if codes is not None and one_factor and quantizer is not None and quantizer.value_block is None:
        # One factor for the tensor, seen once in each row.
        codes.factors = Counter(dict.fromkeys(codes.factors, 1))
    return Measured(found, codes, worst)


def _add_values(found: Statistics, decoded: Tensor, column_max: Tensor) -> None:
    """Add the counts of some rows (rows, K), and raise the maxima of columns (K,)."""
    finite = decoded.isfinite()
    found.values += decoded.numel()
    found.zeros += int((decoded == 0).sum())
    found.nan += int(decoded.isnan().sum())
    found.inf += decoded.numel() - int(finite.sum()) - int(decoded.isnan().sum())
    torch.maximum(column_max, torch.where(finite, decoded, 0).abs().amax(0), out=column_max)


def _compare(
    found: Statistics,
    x: Tensor,
    decoded: Tensor,
    factors: Tensor | None,
    quantizer: Quantizer | None,
) -> None:
    """Add the errors of some rows.

    ``x``, ``decoded`` and the decode factors are (rows, K); a plain tensor has no factors and no
    quantizer.
    """
    largest = math.inf if quantizer is None else quantizer.element.max
    bounds = torch.ones_like(decoded) if factors is None else factors
    found.errors.add(x, decoded, bounds, largest)
    finite = x.isfinite() & decoded.isfinite()
    after = torch.where(finite, decoded, 0).double()
    found.compared += int(finite.sum())
    found.decoded += after.square().sum().item()
    found.dot += (after * torch.where(finite, x, 0)).sum().item()


def _add_codes(
    codes: Codes, part: QuantizedTensor, decoded: Tensor, factors: Tensor, block: tuple[int, int]
) -> None:
    """Count the codes, factors and blocks of some rows."""
    size = codes.counts.numel()
    counted = torch.bincount(part.codes().reshape(-1).int(), minlength=size)
    codes.counts += counted.cpu()
    used = to_blocks(decoded != 0, *block).any(3).any(1)
    codes.blocks += used.numel()
    codes.zero_blocks += int((~used).sum())
    once = factors[:: block[0], :: block[1]]
    once = once[once.isfinite() & (once > 0)]
    if once.numel():
        codes.factor_min = min(codes.factor_min, once.min().item())
        codes.factor_max = max(codes.factor_max, once.max().item())
        exponents, counts = (torch.frexp(once).exponent - 1).unique(return_counts=True)
        codes.factors.update(dict(zip(exponents.tolist(), counts.tolist(), strict=True)))


def _worst(part: Part, decoded: Tensor, block: tuple[int, int]) -> Block | None:
    """Return the worst block of some rows.

    With originals it is the block with the lowest SQNR. Without, it is the one with the highest
    crest factor, peak over root mean square: there, one value makes all others small codes.
    """
    if part.original is None:
        peaks = torch.where(decoded.isfinite(), decoded, 0).abs()
        square = to_blocks(peaks, *block).square()
        ratio = square.amax((1, 3)) / square.mean((1, 3))
    else:
        finite = part.original.isfinite() & decoded.isfinite()
        x = torch.where(finite, part.original, 0).float()
        peaks = (x - torch.where(finite, decoded, 0)).abs()
        noise = to_blocks(peaks, *block).square().sum((1, 3))
        ratio = noise / to_blocks(x, *block).square().sum((1, 3))
    ratio = ratio.nan_to_num(nan=0.0, posinf=0.0)
    if not ratio.numel() or ratio.max() <= 0:
        return None
    down, right = divmod(int(ratio.argmax()), ratio.shape[1])
    top, left = down * block[0], right * block[1]
    inside = peaks[top : top + block[0], left : left + block[1]]
    row, col = divmod(int(inside.argmax()), inside.shape[1])
    stop = min(left + block[1], decoded.shape[1])
    badness = 10 * math.log10(ratio.max().item())
    return Block(badness, part.start + top + row, left + col, left, stop)


def view_of(tensor: Tensor, original: Tensor | None, block: Block) -> View:
    """Return a view of the worst block of a tensor, or of the part with its largest error."""
    width = min(_SHOWN_COLS, block.stop - block.first)
    first = max(block.first, min(block.col - width // 2, block.stop - width))
    bounds = next(pair for pair in bounds_of(tensor) if pair[0] <= block.row < pair[1])
    part = part_of(tensor, original, bounds)
    at = block.row - part.start
    region = (at, min(at + _SHOWN_ROWS, bounds[1] - part.start))
    original_part = part.original
    if original_part is not None:
        original_part = original_part.reshape(part.tensor.shape)
    view = show(part.tensor, region, (first, first + width), original=original_part)
    rows_shown = range(view.rows.start + part.start, view.rows.stop + part.start)
    return dataclasses.replace(view, rows=rows_shown, title="")
