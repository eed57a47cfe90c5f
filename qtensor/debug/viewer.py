"""Show a region of a quantized tensor: codes, factors, values, the borders of blocks, and bits."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtensor.api import quantizer_of
from qtensor.core.buffer_shapes import rows_cols
from qtensor.core.errors import ArgumentTypeError, UnsupportedError, check, fail
from qtensor.core.formats import Element
from qtensor.reference.elements import code_values
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.storage.numbers import factors_of_elements
from qtensor.storage.rebuild import tensor_of

OP = "debug.show"
_ROWS, _COLS = 4, 16
"""Rows and columns that are shown by default."""
_MOST = 16384
"""Elements that are shown, at most."""
_ALIGNED = 128
"""Every format lets rows be sliced at multiples of this number."""

Region = int | slice | tuple[int, int] | None


@dataclass(frozen=True)
class View:
    """A region of the (M, K) view of a quantized tensor; ``str()`` shows it as text.

    A notebook shows it as an HTML table.
    """

    title: str
    element: Element
    rows: range
    cols: range
    block: tuple[int, int] | None
    """Rows and columns of a block; None if a whole row or the whole tensor has one factor."""
    codes: list[list[int]]
    values: list[list[float]]
    factors: list[list[float]]
    """Decode factor of each element; NaN for rotated data."""
    bits: tuple[int, int] | None = None
    """(row, column) of the element whose bits are shown."""
    originals: list[list[float]] | None = None
    """Values before the quantization, if they were given."""

    def __str__(self) -> str:
        numbers = [v for row in (*self.values, *(self.originals or ())) for v in row]
        width = max(8, *(len(f"{v:.4g}") + 1 for v in numbers))
        lines = [self.title, self._line("column", [str(c) for c in self.cols], width)]
        for i, row in enumerate(self.rows):
            if i == 0 or self._starts_block(row, 0):
                lines.append("-" * len(lines[1]))
            factors = enumerate(self.factors[i])
            shown = [f"{f:.4g}" if self._first_of_block(i, j) else "" for j, f in factors]
            if any(shown):
                lines.append(self._line("factor", shown, width))
            digits = (self.element.bits + 3) // 4
            codes = [f"{code:0{digits}x}" for code in self.codes[i]]
            lines.append(self._line(f"{row} codes", codes, width))
            lines.append(self._line("values", [f"{v:.4g}" for v in self.values[i]], width))
            if self.originals is not None:
                originals = [f"{v:.4g}" for v in self.originals[i]]
                lines.append(self._line("originals", originals, width))
        if self.bits is not None:
            lines += ["", self.bits_text()]
        return "\n".join(lines)

    __repr__ = __str__

    def _starts_block(self, index: int, axis: int) -> bool:
        """Return whether a row (axis 0) or column (axis 1) is the first of a block."""
        return self.block is not None and index % self.block[axis] == 0

    def _first_of_block(self, i: int, j: int) -> bool:
        """Return whether an element is the first of its block in the region."""
        first_row = i == 0 or self.block == (1, 1) or self._starts_block(self.rows[i], 0)
        if self.block is None:
            # A factor for each row, or one for the tensor.
            return j == 0 and (i == 0 or self.factors[i][0] != self.factors[i - 1][0])
        return first_row and (j == 0 or self._starts_block(self.cols[j], 1))

    def _line(self, label: str, cells: list[str], width: int) -> str:
        parts = [f"{label:>12} "]
        for col, cell in zip(self.cols, cells, strict=True):
            border = "|" if self._starts_block(col, 1) else " "
            parts.append(f"{border}{cell:>{width}}")
        return "".join(parts).rstrip()

    def bits_text(self) -> str:
        """Return the bits of the element ``bits``, and how they give its value."""
        check(self.bits is not None, OP, "an element must be chosen", "none", "Pass bits=(0, 0)")
        row, col = self.bits or (0, 0)
        i, j = row - self.rows.start, col - self.cols.start
        code, element = self.codes[i][j], self.element
        word = f"{code:0{element.bits}b}"
        split = 1 + element.exponent_bits
        value, factor = code_values(element)[code], self.factors[i][j]
        meaning = f"sign {word[0]}, exponent {word[1:split]}, mantissa {word[split:] or '-'}"
        if element.is_integer:
            kind = "two's complement" if element.signed else "unsigned"
            meaning = f"{kind} {word}"
        return (
            f"[{row}, {col}] {element.name} code 0x{code:x}: {meaning} -> {value:g}; "
            f"factor {factor:.9g}, value {self.values[i][j]:.9g}"
        )

    def _repr_html_(self) -> str:
        """Return the region as an HTML table, for notebooks."""
        edge = "border-{}:2px solid currentColor;"
        head = "".join(f"<th>{col}</th>" for col in self.cols)
        body = []
        for i, row in enumerate(self.rows):
            cells = []
            for j, col in enumerate(self.cols):
                style = edge.format("left") * self._starts_block(col, 1)
                style += edge.format("top") * (i == 0 or self._starts_block(row, 0))
                factor = f"{self.factors[i][j]:.4g}<br>" * self._first_of_block(i, j)
                text = f"{factor}<code>{self.codes[i][j]:x}</code><br>{self.values[i][j]:.4g}"
                if self.originals is not None:
                    text += f"<br><i>{self.originals[i][j]:.4g}</i>"
                cells.append(f'<td style="text-align:right;{style}">{text}</td>')
            body.append(f"<tr><th>{row}</th>{''.join(cells)}</tr>")
        bits = "" if self.bits is None else f"<p>{html.escape(self.bits_text())}</p>"
        return (
            f"<p>{html.escape(self.title)}</p>"
            '<table style="border-collapse:collapse">'
            f"<tr><th></th>{head}</tr>{''.join(body)}</table>{bits}"
        )


def show(
    q: Tensor | QuantizedTensorStorage,
    rows: Region = None,
    cols: Region = None,
    bits: bool | tuple[int, int] = False,
    original: Tensor | None = None,
) -> View:
    """Return a view of a region of a quantized tensor, with codes, factors and values.

    The tensor is seen as a matrix (M, K): all leading dims are its rows. ``print`` shows the view
    as text with a line for codes (hexadecimal) and one for values in each row; the borders of
    blocks are lines, and each block begins with its decode factor.

    Args:
        q: a quantized tensor or storage. Its data are read, on a GPU too.
        rows: an index, a slice or a pair (start, end); the first 4 rows by default.
        cols: the same for columns; the first 16 by default.
        bits: (row, column) of an element in the region whose bits are explained; True for the first
            one.
        original: the values before the quantization, of the shape of ``q``, which the view shows
            below those of ``q``.

    Raises:
        QTensorError: ``q`` is not quantized or has no data, ``original`` has another shape, or the
            region is empty, too large or outside of the tensor.
    """
    if not isinstance(q, QuantizedTensorStorage):
        rule, fix = "the tensor must be quantized", "Pass qtensor.quantize(x, fmt)"
        fail(OP, rule, type(q).__name__, fix, ArgumentTypeError)
    check(q.device.type != "meta", OP, "the tensor must have data", "a meta tensor", "Load it")
    name, own_shape = "x".join(map(str, q.shape)) or "scalar", q.shape
    # The blocks of a convolution's weight are those of a matrix.
    q = tensor_of(q)
    total = rows_cols(q.shape)
    row_range = _range("rows", rows, total[0], _ROWS)
    col_range = _range("cols", cols, total[1], _COLS)
    size = len(row_range) * len(col_range)
    rule = f"a region has from 1 to {_MOST} elements"
    check(0 < size <= _MOST, OP, rule, size, "Choose another part of the tensor")
    chosen: tuple[int, int] | None = None
    if bits is not False:
        chosen = (row_range.start, col_range.start) if bits is True else bits
        inside = chosen[0] in row_range and chosen[1] in col_range
        check(inside, OP, "bits must name an element of the region", bits, "Pass (row, column)")
    originals = None
    if original is not None:
        rule = f"original must have the shape of the tensor, {tuple(own_shape)}"
        got = getattr(original, "shape", type(original).__name__)
        fix = "Pass the tensor that was quantized"
        check(isinstance(original, Tensor) and original.shape == own_shape, OP, rule, got, fix)
        part = original.detach().reshape(total)[_slice(row_range), _slice(col_range)]
        originals = part.float().tolist()
    shown, first = _rows_of(q, row_range)
    quantizer = quantizer_of(q)
    shape = rows_cols(shown.shape)
    at = slice(row_range.start - first, row_range.stop - first), _slice(col_range)
    block = quantizer.value_block
    blocks = "" if block is None else f", blocks of {block[0]}x{block[1]}"
    return View(
        title=f"{quantizer.canonical} {name} {str(q.dtype).removeprefix('torch.')}{blocks}",
        element=quantizer.element,
        rows=row_range,
        cols=col_range,
        block=block,
        codes=shown.codes().reshape(shape)[at].tolist(),
        values=shown.dequantize(torch.float32).detach().reshape(shape)[at].tolist(),
        factors=factors_of_elements(shown).reshape(shape)[at].tolist(),
        bits=chosen,
        originals=originals,
    )


def _slice(indices: range) -> slice:
    return slice(indices.start, indices.stop)


def _range(name: str, region: Region, size: int, default: int) -> range:
    """Return the indices of a region along one axis of ``size``."""
    if region is None:
        region = slice(0, default)
    if isinstance(region, int) and not isinstance(region, bool):
        region = (region, region + 1)
        if region[0] < 0:
            region = (region[0] + size, region[1] + size)
        inside = 0 <= region[0] < size
        check(inside, OP, f"{name} must be from 0 to {size - 1}", region[0], "Choose another")
    if isinstance(region, slice):
        check(region.step in (None, 1), OP, f"{name} must have the step 1", region.step, "Drop it")
        return range(*region.indices(size))
    if not (isinstance(region, tuple) and len(region) == 2):
        rule = f"{name} must be an index, a slice or a pair (start, end)"
        fail(OP, rule, repr(region), "Pass slice(0, 8), for example", ArgumentTypeError)
    start, stop = region
    rule = f"{name} must lie in 0 to {size}"
    check(0 <= start < stop <= size, OP, rule, region, "Choose another part of the tensor")
    return range(start, stop)


def _rows_of(q: QuantizedTensorStorage, rows: range) -> tuple[Any, int]:
    """Return a tensor with some rows of ``q``, to decode no more than needed, and its first row."""
    start = rows.start // _ALIGNED * _ALIGNED
    stop = min(-(-rows.stop // _ALIGNED) * _ALIGNED, q.shape[0] if q.ndim else 1)
    if q.ndim != 2 or not isinstance(q, Tensor) or stop - start == q.shape[0]:
        return q, 0
    try:
        return q.detach().narrow(0, start, stop - start), start
    except UnsupportedError:
        # The format cannot be sliced there, for example because it stores columns.
        return q, 0
