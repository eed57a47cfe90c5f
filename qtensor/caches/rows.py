"""Hold the rows of keys, or of values, in the buffers of a quantized tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtensor.api import Format, parsed, quantizer
from qtensor.core.errors import check, fail
from qtensor.core.row_format import PLAIN_FORMATS, RowFormat, row_format
from qtensor.quantizers import Quantizer

Shape = tuple[int, int, int, int]


def form_of(fmt: Format) -> RowFormat:
    """Return the description of a format of rows, or of a plain dtype such as ``"bfloat16"``.

    Raises:
        QTensorError: no such format, or one with factors that belong to several rows.
    """
    plain = isinstance(fmt, str) and fmt in PLAIN_FORMATS
    return row_format(fmt if plain else quantizer(fmt).canonical)


class Rows:
    """Rows (places, H, tokens, size): a place is a sequence, or a page of one.

    Attributes:
        form: describes the buffers.
        quantizer: of the rows; None for a plain dtype.
        codes: (places, H, tokens, entries).
        table: the factors as a quantized tensor holds them, with padding; None without factors.
        wide: float32 (1,), the factor or the maximum of all rows; None if the format has none.
    """

    codes: Tensor
    table: Tensor | None
    wide: Tensor | None
    factors: Tensor | None
    """(places, H, tokens, factors), a view of ``table``."""

    def __init__(self, fmt: Format, shape: Shape, device: torch.device) -> None:
        """Make rows of zeros.

        Args:
            fmt: a format, or the name of a plain dtype, such as ``"bfloat16"``.
            shape: (places, H, tokens, size).
            device: of the buffers.

        Raises:
            QTensorError: the format has factors that belong to several rows, or blocks that do not
                divide ``size``.
        """
        self.form = form_of(fmt)
        plain = self.form.text in PLAIN_FORMATS
        self.quantizer: Quantizer | None = None if plain else parsed(self.form.text)
        if shape[3] % (self.form.block or 1):
            rule = f"the head size must be a multiple of {self.form.block} for {self.form.text}"
            fail("KVCache", rule, shape[3], "Take another format, such as fp8_rowwise")
        self._set(shape, self._zeros(shape, device))
        if self.wide is not None:
            self.wide.fill_(1.0)

    def _zeros(self, shape: Shape, device: torch.device) -> list[Tensor]:
        if self.quantizer is None:
            return [torch.zeros(shape, dtype=self.form.dtype, device=device)]
        described = self.quantizer._describe_buffers(shape).values()
        return [torch.zeros(size, dtype=dtype, device=device) for size, dtype in described]

    def _set(self, shape: Shape, buffers: list[Tensor]) -> None:
        """Take over buffers, in the order of the slots of the quantizer."""
        self.shape = shape
        self.codes, *others = buffers
        self.wide = others.pop() if self.form.divisor else None
        self.table = others.pop() if others else None
        self.factors = None
        if self.table is not None:
            lead = shape[:3]
            used = self.table[: lead[0] * lead[1] * lead[2], : self.form.factors(shape[3])]
            self.factors = used.unflatten(0, lead)

    def buffers(self) -> list[Tensor]:
        """Return the buffers that exist, in the order of the slots of the quantizer."""
        return [t for t in (self.codes, self.table, self.wide) if t is not None]

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """Return all rows as a tensor of ``shape`` that shares the buffers.

        Args:
            dtype: the nominal dtype of a quantized tensor.
        """
        if self.quantizer is None:
            return self.codes
        return self.quantizer._assemble(self.buffers(), self.shape, dtype)

    def named_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that exist by name."""
        named = {"codes": self.codes, "factors": self.table, "global": self.wide}
        return {name: t for name, t in named.items() if t is not None}

    def set_wide(self, name: str, value: float | Tensor) -> None:
        """Set the factor or the maximum of all rows, before there are any.

        Raises:
            QTensorError: the format has no such value, or it is not one number.
        """
        given = torch.as_tensor(value, dtype=torch.float32)
        if self.wide is None:
            rule = f"{self.form.text} has no value of the whole cache"
            fail("KVCache", rule, f"{name}={value}", f"Leave {name} out")
        rule = f"{name} must be one number above 0"
        fits = given.numel() == 1 and bool(given > 0)
        check(fits, "KVCache", rule, given.tolist(), "Pass its maximum or factor")
        self.wide.copy_(given.reshape(1))

    def resize(self, batch: int, each: int, tokens: int) -> None:
        """Change the number of places of each sequence and their tokens; neither gets smaller.

        Args:
            batch: number of sequences.
            each: places of a sequence.
            tokens: rows of a place.
        """
        _, heads, before, size = self.shape
        old = (self.codes, self.factors)
        shape, wide = (batch * each, heads, tokens, size), self.wide
        self._set(shape, self._zeros(shape, self.codes.device))
        for to, t in zip((self.codes, self.factors), old, strict=True):
            if to is not None and t is not None:
                had = t.unflatten(0, (batch, -1))
                to.unflatten(0, (batch, each))[:, : had.shape[1], :, :before] = had
        self.wide = wide

    def select(self, index: Tensor) -> None:
        """Put the rows of place ``index[i]`` in place i; buffers stay where they are if they fit.

        Args:
            index: (places,) int64.
        """
        codes = self.codes[index]
        factors = None if self.factors is None else self.factors[index]
        if index.shape[0] != self.shape[0]:
            wide, shape = self.wide, (index.shape[0], *self.shape[1:])
            self._set(shape, self._zeros(shape, codes.device))
            self.wide = wide
        self.codes.copy_(codes)
        if self.factors is not None and factors is not None:
            self.factors.copy_(factors)

    def to(self, device: torch.device) -> None:
        """Move the buffers."""
        self._set(self.shape, [t.to(device) for t in self.buffers()])

    def __getstate__(self) -> dict[str, Any]:
        return {"text": self.form.text, "shape": self.shape, "buffers": self.buffers()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.form = row_format(state["text"])
        self.quantizer = None if self.form.element is None else parsed(self.form.text)
        self._set(state["shape"], state["buffers"])
