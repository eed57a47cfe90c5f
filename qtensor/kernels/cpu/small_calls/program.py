"""Several CPU kernels in one call, for tensors so small that calls take longer than numbers.

A program is what kernels do one after the other: a list of steps over a table of addresses. It is made once for operands of
a kind and shape; a call brings addresses alone. What lies between the steps stays in memory of the program's own.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from qtensor.kernels.cpu import native
from qtensor.kernels.cpu.native import DTYPES, SHARED, Site, site_of

SMALL = 1 << 16
"""Elements of a matrix up to which a program serves; above, threads and tiles count."""
_STEP_WORDS = 25
_MOST_PLACES = 96
_ALIGNED = 64
_QUANTIZE, _DECODE, _WIDEN, _MULTIPLY, _FINISH, _SUM_ROWS, _CLEAR = range(7)
_NOTHING, _ONE, _FIRST = range(3)
"""Places of the table: no address, the factor 1, the first address that a call brings."""


class Program:
    """Steps, ready to run over addresses in the order of ``Builder.given``, 0 for none."""

    __slots__ = ("_header", "_offsets", "_pack", "_plans", "_steps", "address", "run")

    def __init__(
        self, steps: array[int], given: int, scratch: Sequence[int], plans: list[Any]
    ) -> None:
        offsets, end = [], 0
        for size in scratch:
            offsets.append(end)
            end += -(-size // _ALIGNED) * _ALIGNED
        self._steps, self._offsets, self._plans = steps, array("q", offsets), plans
        self._header = array(
            "q",
            (
                len(steps) // _STEP_WORDS,
                given,
                len(scratch),
                end,
                _sgemm() if _MULTIPLY in steps[::_STEP_WORDS] else 0,
                self._offsets.buffer_info()[0],
                steps.buffer_info()[0],
            ),
        )
        self._pack = pack = struct.Struct(f"={given}q").pack
        self.address = address = self._header.buffer_info()[0]

        def run(*addresses: int) -> bool:
            kernels = native.library()
            return type(kernels) is not str and kernels.run(address, pack(*addresses)) == 0  # type: ignore[union-attr]

        self.run: Callable[..., bool] = run
        """Run the steps; False, with nothing of the call's written, where there are no kernels."""


@functools.cache
def _sgemm() -> int:
    """The address of the ``sgemm`` behind ``torch.mm``, or 0: what it gives must be what ``torch.mm`` gives, bit for bit."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(path)).sgemm_
    except (OSError, AttributeError):
        return 0
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    return (
        address if all(_multiplies(function, size) for size in ((33, 17, 31), (64, 64, 64))) else 0
    )


def _multiplies(sgemm: Any, sizes: tuple[int, int, int]) -> bool:
    m, n, k = sizes
    # The first call may happen below a fake tensor mode, or with another default device.
    with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd(), torch.device("cpu"):
        a, b = (
            torch.arange(rows * cols, dtype=torch.float32).mul_(0.37).sin_().view(rows, cols)
            for rows, cols in ((m, k), (n, k))
        )
        expected, found = torch.mm(a, b.t()), torch.zeros(m, n)
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
    number = [ctypes.byref(ctypes.c_int64(size)) for size in (n, m, k)]
    at = [ctypes.c_void_p(t.data_ptr()) for t in (b, a, found)]
    sgemm(
        ctypes.c_char_p(b"t"),
        ctypes.c_char_p(b"n"),
        *number,
        ctypes.byref(one),
        at[0],
        number[2],
        at[1],
        number[2],
        ctypes.byref(zero),
        at[2],
        number[0],
    )
    return bytes(found.untyped_storage()) == bytes(expected.untyped_storage())


class Source(NamedTuple):
    """A contiguous plain matrix or vector: its place and dtype."""

    at: int
    dtype: torch.dtype


class ProgramMatrix(NamedTuple):
    """A quantized matrix: the places of its buffers, in the order of native.py."""

    codec: Any
    site: Site
    at: Sequence[int]


class Result(NamedTuple):
    """A product (M, N) over K in a layout of the ``gemm`` op."""

    layout: str
    sizes: tuple[int, int, int]
    out: Source
    bias: Source | None = None
    """N values."""


def serves(codec: Any, shape: tuple[int, ...]) -> Site | None:
    """The site of a quantizer and a matrix, or None where programs do not take it."""
    if len(shape) != 2 or shape[0] < 2 or shape[1] < 2 or shape[0] * shape[1] > SMALL:
        return None
    return site_of(codec, torch.Size(shape))


def available() -> bool:
    """Whether programs can multiply: the ``sgemm`` of torch is at hand."""
    return _sgemm() != 0


class Builder:
    """Collects the steps of a program."""

    def __init__(self) -> None:
        self._given = 0
        self._steps: list[list[int]] = []
        self._scratch: list[int] = []
        self._plans: list[Any] = []
        self._decoded: dict[tuple[int, ...], int] = {}

    def given(self) -> int:
        """Place of the next address that a call brings."""
        self._given += 1
        return _FIRST + self._given - 1

    def _own(self, size: int, clear: bool = False) -> int:
        """Place of ``size`` bytes of the program's own; below zero until all that is given is known."""
        self._scratch.append(size)
        at = -len(self._scratch)
        if clear:
            self._step(_CLEAR, at, size)
        return at

    def _step(self, *words: int) -> None:
        self._steps.append([*words])

    def _plan(self, site: Site) -> int:
        self._plans.append(site.quantizer)
        return site.address

    def operand(self, codec: Any, site: Site) -> ProgramMatrix:
        """A quantized matrix whose buffers the call brings, in slot order."""
        at = [_NOTHING] * 9
        for _, place, _, _ in site.slots:
            at[place] = self.given()
        return ProgramMatrix(codec, site, at)

    def quantize(
        self, codec: Any, site: Site, x: Source, kept: dict[str, int], call: dict[str, int]
    ) -> ProgramMatrix:
        """Quantize a matrix.

        Args:
            codec: the quantizer.
            site: of the quantizer and the matrix's shape.
            x: the matrix.
            kept: name of a buffer -> its place, for those that the call brings; others are the program's own.
            call: places of "scale", "amax" and "seed", where there are any.
        """
        at = [_NOTHING] * 9
        for i, place, size, dtype in site.slots:
            slot = codec.slots[i]
            known = kept.get(slot.name)
            at[place] = (
                self._own(size.numel() * dtype.itemsize, slot.padded) if known is None else known
            )
        seed = call.get("seed", _NOTHING) if getattr(codec, "stochastic_rounding", False) else 0
        self._step(
            _QUANTIZE,
            self._plan(site),
            x.at,
            DTYPES[x.dtype],
            site.rows,
            site.cols,
            *at,
            call.get("scale", _NOTHING),
            call.get("amax", _NOTHING),
            seed,
        )
        return ProgramMatrix(codec, site, at)

    def _values(
        self, operand: ProgramMatrix | Source, count: int, columnwise: bool | None
    ) -> tuple[int, int]:
        """Places of an operand's float32 values, and of a factor that is kept out of them.

        Args:
            operand: a matrix.
            count: its elements.
            columnwise: the direction whose blocks run along the contraction, where it matters.
        """
        if isinstance(operand, Source):
            if operand.dtype is torch.float32:
                return operand.at, _NOTHING
            y = self._own(4 * count)
            self._step(_WIDEN, operand.at, DTYPES[operand.dtype], count, y)
            return y, _NOTHING
        codec, site, at = operand
        side = site.side
        if columnwise is not None and site.scale_inv is None:
            side = int(codec.side(columnwise) == "_columnwise")
        none = [_NOTHING] * 3
        row, column = (none, at[4:7]) if side else (at[:3], none)
        kept_out = at[SHARED] if codec.per_tensor else _NOTHING
        known = self._decoded.get((*row, *column))
        if known is not None:
            return known, kept_out
        y = self._decoded[*row, *column] = self._own(4 * count)
        factor = _ONE if codec.per_tensor else at[SHARED]
        self._decode(site, Source(y, torch.float32), row, column, factor)
        return y, kept_out

    def _decode(
        self, site: Site, y: Source, row: Sequence[int], column: Sequence[int], factor: int
    ) -> None:
        self._step(_DECODE, self._plan(site), y.at, DTYPES[y.dtype], site.rows, site.cols)
        self._steps[-1] += (*row, *column, factor)

    def decode(self, site: Site, at: Sequence[int], y: Source) -> None:
        """The values of a quantized matrix, in the dtype of ``y``.

        Args:
            site: of the quantizer and the matrix's shape.
            at: places of the buffers of ``native.read_slots``; others may be missing.
            y: where to.
        """
        none = [_NOTHING] * 3
        row, column = (none, at[4:7]) if site.side else (at[:3], none)
        self._decode(site, y, row, column, at[SHARED])

    def clear(self, at: int, size: int) -> None:
        """Zeros in ``size`` bytes."""
        self._step(_CLEAR, at, size)

    def multiply(
        self, a: ProgramMatrix | Source, b: ProgramMatrix | Source, result: Result
    ) -> None:
        """A product, accumulated in float32 and rounded to the dtype of the result."""
        layout, (m, n, k), out, bias = result
        both = isinstance(a, ProgramMatrix) and isinstance(b, ProgramMatrix)
        left, left_factor = self._values(a, m * k, layout == "NT" if both else None)
        right, right_factor = self._values(b, n * k, layout != "TN" if both else None)
        plain = out.dtype is torch.float32
        c = out.at if plain else self._own(4 * m * n)
        left_turned, right_turned = layout == "NT", layout == "TN"
        # BLAS counts columns first: in its words this is the transposed result, b.T @ a.T.
        self._step(_MULTIPLY, right_turned, left_turned, n, m, k)
        self._steps[-1] += (right, k if right_turned else n, left, m if left_turned else k, c, n)
        if plain and bias is None and left_factor == right_factor == _NOTHING:
            return
        added, kind = (_NOTHING, torch.float32) if bias is None else bias
        line = self._own(4 * n)
        self._step(_FINISH, c, m, n, left_factor, right_factor, added, DTYPES[kind], line)
        self._steps[-1] += (out.at, DTYPES[out.dtype])

    def sum_rows(self, x: Source, rows: int, cols: int, out: int) -> None:
        """The sums of the rows of a matrix, rounded to its dtype."""
        self._step(_SUM_ROWS, x.at, DTYPES[x.dtype], rows, cols, out)

    def build(self) -> Program:
        """The program."""
        first = _FIRST + self._given
        if first + len(self._scratch) > _MOST_PLACES:
            raise ValueError(f"{first + len(self._scratch)} places, of {_MOST_PLACES}")
        words = array("q")
        for step in self._steps:
            placed = [first - word - 1 if word < 0 else int(word) for word in step]
            words.extend([*placed, *[0] * (_STEP_WORDS - len(placed))])
        return Program(words, self._given, self._scratch, self._plans)
