"""Several CPU kernels in one call, for tensors so small that calling takes longer than computing.

A program is a list of kernel steps over a table of addresses (`src/program.cpp`). It is built once
for operands of a format and shape; each call passes only addresses. Intermediate results stay in
scratch memory of the program.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from qtensor.kernels.cpu import native
from qtensor.kernels.cpu.buffers import POSITIONS, SHARED, BufferLayout, buffer_layout
from qtensor.kernels.cpu.native import DTYPES
from qtensor.kernels.cpu.small_calls.library import load

SMALL = 1 << 16
"""Most elements of a matrix in a program; larger ones profit from threads and tiles."""
_STEP_WORDS = 25
_MAX_ADDRESSES = 96
_ALIGNED = 64
_QUANTIZE, _DECODE, _WIDEN, _MULTIPLY, _FINISH, _SUM_ROWS, _CLEAR, _FEW_ROWS = range(8)
_NOTHING, _ONE, _FIRST = range(3)
"""Indices in the table: no address, the factor 1, the first address that a call passes."""


class Program:
    """Steps to run over addresses in the order of `Builder.call_address`; 0 is an absent tensor.

    `address` is that of the header, which C++ reads.
    """

    __slots__ = ("_c_quantizers", "_header", "_offsets", "_steps", "address")

    def __init__(
        self, steps: array[int], passed: int, scratch: Sequence[int], c_quantizers: list[Any]
    ) -> None:
        offsets, end = [], 0
        for size in scratch:
            offsets.append(end)
            end += -(-size // _ALIGNED) * _ALIGNED
        self._steps, self._offsets, self._c_quantizers = steps, array("q", offsets), c_quantizers
        self._header = array(
            "q",
            (
                len(steps) // _STEP_WORDS,
                passed,
                len(scratch),
                end,
                _sgemm() if _MULTIPLY in steps[::_STEP_WORDS] else 0,
                self._offsets.buffer_info()[0],
                steps.buffer_info()[0],
            ),
        )
        self.address = self._header.buffer_info()[0]


@functools.cache
def _sgemm() -> int:
    """Return the address of `qt_sgemm`, which computes `torch.mm`; 0 where it is not built."""
    handle = load()
    return 0 if handle is None else ctypes.cast(handle.qt_sgemm, ctypes.c_void_p).value or 0


class Source(NamedTuple):
    """A contiguous plain matrix or vector: the index of its address, and its dtype."""

    at: int
    dtype: torch.dtype


class ProgramMatrix(NamedTuple):
    """A quantized matrix: the indices of its buffers' addresses, in the order of native.py."""

    quantizer: Any
    layout: BufferLayout
    at: Sequence[int]


class Result(NamedTuple):
    """A product (M, N) over K in a layout of the `gemm` op."""

    layout: str
    sizes: tuple[int, int, int]
    out: Source
    bias: Source | None = None
    """N values."""


def serves(quantizer: Any, shape: tuple[int, ...]) -> BufferLayout | None:
    """Return the layout of a quantized matrix (rows, columns), or None if no program takes it."""
    if len(shape) != 2 or shape[0] * shape[1] > SMALL:
        return None
    return buffer_layout(quantizer, torch.Size(shape))


def can_multiply() -> bool:
    """Return whether programs can multiply: they need the library that is built against torch."""
    return _sgemm() != 0


class Builder:
    """Collects the steps of a program."""

    def __init__(self) -> None:
        self._call_addresses = 0
        self._steps: list[list[int]] = []
        self._scratch: list[int] = []
        self._c_quantizers: list[Any] = []
        self._decoded: dict[tuple[int, ...], int] = {}

    def call_address(self) -> int:
        """Return the index of the next address that a call passes."""
        self._call_addresses += 1
        return _FIRST + self._call_addresses - 1

    def scratch_memory(self, size: int, clear: bool = False) -> int:
        """Return the index of `size` bytes of scratch memory; `build` makes it positive."""
        self._scratch.append(size)
        at = -len(self._scratch)
        if clear:
            self._step(_CLEAR, at, size)
        return at

    def _step(self, *words: int) -> None:
        self._steps.append([*words])

    def _address_of(self, matrix_layout: BufferLayout) -> int:
        self._c_quantizers.append(matrix_layout.c_quantizer)
        return matrix_layout.address

    def operand(self, quantizer: Any, matrix_layout: BufferLayout) -> ProgramMatrix:
        """Return a quantized matrix whose buffers the call passes, in slot order."""
        at = [_NOTHING] * POSITIONS
        for _, position, _, _ in matrix_layout.slots:
            at[position] = self.call_address()
        return ProgramMatrix(quantizer, matrix_layout, at)

    def quantize(
        self,
        quantizer: Any,
        matrix_layout: BufferLayout,
        x: Source,
        outputs: dict[str, int],
        call: dict[str, int],
    ) -> ProgramMatrix:
        """Quantize a matrix.

        Args:
            quantizer: the quantizer.
            matrix_layout: for the quantizer and the matrix's shape; programs do not write stored
                tensor-wide factors.
            x: the matrix.
            outputs: name of a buffer -> index of its address, for buffers that the call passes; the
                others are scratch memory.
            call: indices of the addresses of "scale", "amax" and "seed", if there are any.
        """
        at = [_NOTHING] * POSITIONS
        for i, position, size, dtype in matrix_layout.slots:
            slot = quantizer.slots[i]
            output = outputs.get(slot.name)
            if output is None:
                output = self.scratch_memory(size.numel() * dtype.itemsize, slot.padded)
            at[position] = output
        seed = call.get("seed", _NOTHING) if getattr(quantizer, "stochastic_rounding", False) else 0
        self._step(
            _QUANTIZE,
            self._address_of(matrix_layout),
            x.at,
            DTYPES[x.dtype],
            matrix_layout.rows,
            matrix_layout.cols,
            *at[: SHARED + 1],
            call.get("scale", _NOTHING),
            call.get("amax", _NOTHING),
            seed,
        )
        return ProgramMatrix(quantizer, matrix_layout, at)

    def _values(
        self, operand: ProgramMatrix | Source, count: int, columnwise: bool | None
    ) -> tuple[int, int]:
        """Return the addresses' indices of an operand's float32 values and of a separate factor.

        Args:
            operand: a matrix.
            count: its elements.
            columnwise: the direction whose blocks run along the contraction, or None if either will
                do.
        """
        if isinstance(operand, Source):
            if operand.dtype is torch.float32:
                return operand.at, _NOTHING
            y = self.scratch_memory(4 * count)
            self._step(_WIDEN, operand.at, DTYPES[operand.dtype], count, y)
            return y, _NOTHING
        quantizer, matrix_layout, at = operand
        from_columns = matrix_layout.reads_columnwise
        if columnwise is not None and matrix_layout.scale_inv is None:
            from_columns = quantizer.side(columnwise) == "_columnwise"
        none = [_NOTHING] * 3
        read = [at[i] for i in matrix_layout.read_positions(from_columns)]
        row, column = (none, read) if from_columns else (read, none)
        separate = at[SHARED] if quantizer.per_tensor else _NOTHING
        decoded = self._decoded.get((*row, *column))
        if decoded is not None:
            return decoded, separate
        y = self._decoded[*row, *column] = self.scratch_memory(4 * count)
        factor = _ONE if quantizer.per_tensor else at[SHARED]
        self._decode(matrix_layout, Source(y, torch.float32), row, column, factor)
        return y, separate

    def _decode(
        self,
        matrix_layout: BufferLayout,
        y: Source,
        row: Sequence[int],
        column: Sequence[int],
        factor: int,
    ) -> None:
        self._step(
            _DECODE,
            self._address_of(matrix_layout),
            y.at,
            DTYPES[y.dtype],
            matrix_layout.rows,
            matrix_layout.cols,
        )
        self._steps[-1] += (*row, *column, factor)

    def decode(self, matrix_layout: BufferLayout, at: Sequence[int], y: Source) -> None:
        """Decode a quantized matrix, to the dtype of `y`.

        Args:
            matrix_layout: for the quantizer and the matrix's shape.
            at: indices of the buffers' addresses; only those that are read must be present.
            y: the result.
        """
        none = [_NOTHING] * 3
        columnwise = matrix_layout.reads_columnwise
        read = [at[i] for i in matrix_layout.read_positions(columnwise)]
        row, column = (none, read) if columnwise else (read, none)
        self._decode(matrix_layout, y, row, column, at[SHARED])

    def decoded(self, matrix_layout: BufferLayout, at: Sequence[int]) -> Source:
        """Return the float32 values of a quantized matrix in scratch memory; `at` as `decode`."""
        y = Source(self.scratch_memory(4 * matrix_layout.rows * matrix_layout.cols), torch.float32)
        self.decode(matrix_layout, at, y)
        return y

    def clear(self, at: int, size: int) -> None:
        """Write zeros to `size` bytes."""
        self._step(_CLEAR, at, size)

    def multiply(
        self, a: ProgramMatrix | Source, b: ProgramMatrix | Source, result: Result
    ) -> None:
        """Compute a product in float32 and round it to the dtype of the result."""
        layout, (m, n, k), out, bias = result
        both_quantized = isinstance(a, ProgramMatrix) and isinstance(b, ProgramMatrix)
        left, left_factor = self._values(a, m * k, layout == "NT" if both_quantized else None)
        right, right_factor = self._values(b, n * k, layout != "TN" if both_quantized else None)
        plain = out.dtype is torch.float32
        c = out.at if plain else self.scratch_memory(4 * m * n)
        left_turned, right_turned = layout == "NT", layout == "TN"
        self._step(_MULTIPLY, left_turned, right_turned, m, n, k, left, right, c)
        if plain and bias is None and left_factor == right_factor == _NOTHING:
            return
        added, kind = (_NOTHING, torch.float32) if bias is None else bias
        line = self.scratch_memory(4 * n)
        self._step(_FINISH, c, m, n, left_factor, right_factor, added, DTYPES[kind], line)
        self._steps[-1] += (out.at, DTYPES[out.dtype])

    def multiply_few_rows(
        self,
        x: ProgramMatrix | Source,
        weight: ProgramMatrix,
        rows: int,
        out: Source,
        bias: Source | None,
    ) -> None:
        """Compute `x @ weight.T + bias` in the order of sums of few rows.

        Args:
            x: (rows, K).
            weight: (N, K), rowwise.
            rows: at most `native.MOST_ROWS`.
            out: (rows, N).
            bias: N values, or None.
        """
        _, matrix_layout, at = weight
        added = _NOTHING
        if bias is not None:
            added, _ = self._values(bias, matrix_layout.rows, None)
        quantized = [0] * 6
        if isinstance(x, ProgramMatrix):
            quantized = [
                self._address_of(x.layout),
                *(x.at[i] for i in x.layout.read_positions(columnwise=False)),
                x.at[SHARED],
                self.scratch_memory(4 * rows),
            ]
            x = Source(self.scratch_memory(4 * rows * matrix_layout.cols), torch.float32)
        threaded = matrix_layout.rows * matrix_layout.cols > native.ONE_THREAD
        self._step(
            _FEW_ROWS,
            self._address_of(matrix_layout),
            x.at,
            DTYPES[x.dtype],
            rows,
            matrix_layout.cols,
            matrix_layout.rows,
            *(at[i] for i in matrix_layout.read_positions(columnwise=False)),
            at[SHARED],
            added,
            out.at,
            DTYPES[out.dtype],
            threaded,
            *quantized,
        )

    def sum_rows(self, x: Source, rows: int, cols: int, out: int) -> None:
        """Add up the rows of a matrix, and round the sums to its dtype."""
        self._step(_SUM_ROWS, x.at, DTYPES[x.dtype], rows, cols, out)

    def build(self) -> Program:
        """Return the program.

        Raises:
            ValueError: it uses too many addresses.
        """
        first = _FIRST + self._call_addresses
        if first + len(self._scratch) > _MAX_ADDRESSES:
            count = first + len(self._scratch)
            raise ValueError(f"a program has at most {_MAX_ADDRESSES} addresses; got {count}")
        words = array("q")
        for step in self._steps:
            indices = [first - word - 1 if word < 0 else int(word) for word in step]
            words.extend([*indices, *[0] * (_STEP_WORDS - len(indices))])
        return Program(words, self._call_addresses, self._scratch, self._c_quantizers)
