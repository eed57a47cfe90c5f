"""Device functions of attention: stored rows of keys and values, pages, and what queries see."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from qtensor.kernels.triton.common import to_float32
from qtensor.kernels.triton.elements import decode, e8m0_factor


class RowConstants(NamedTuple):
    """How rows are stored, known when a kernel is compiled.

    Attributes:
        pack: codes of a group (2 in a byte, 4 in 3 bytes), or 1.
        exponent: exponent bits of a code, 0 for plain values.
        mantissa: mantissa bits of a code.
        block: values that share a factor, or 0.
        factor: "float32", "e8m0", "e4m3", or "" for none.
        divisor: the value of the whole cache, divided by this, decodes.
        least: numbers beside these rows whose magnitude is smaller count as 0.
    """

    pack: int
    exponent: int
    mantissa: int
    block: int
    factor: str
    divisor: float
    least: float


class StoredRows(NamedTuple):
    """Keys or values as they are stored; strides count entries.

    Attributes:
        codes: pointer to codes, or to plain values (int16 for bfloat16).
        factors: pointer to factors, or None.
        wide: pointer to the value of the whole cache, or None.
        outer: stride of the sequences or pages of ``codes``.
        head: stride of its heads.
        token: stride of its tokens.
        factor_outer: strides of ``factors``.
        factor_head: see ``factor_outer``.
        factor_token: see ``factor_outer``.
        size: values of a row.
        form: constexpr of ``RowConstants``.
    """

    codes: Any
    factors: Any
    wide: Any
    outer: int
    head: int
    token: int
    factor_outer: int
    factor_head: int
    factor_token: int
    size: int
    form: tl.constexpr


class Pages(NamedTuple):
    """The block table.

    Attributes:
        table: pointer to (B, width) indices of pages, or None.
        width: pages of a sequence.
        page: tokens of a page.
        pages: of the cache.
    """

    table: Any
    width: int
    page: int
    pages: int


def pages_of(buffer: Tensor, block_table: Tensor | None) -> Pages:
    """Return the pages of a buffer (B or pages, H, tokens, ...) of a cache."""
    table = None if block_table is None else block_table.contiguous()
    width = 1 if block_table is None else block_table.shape[1]
    return Pages(table, width, max(buffer.shape[2], 1), buffer.shape[0])


class Visible(NamedTuple):
    """What decides which tokens a query sees, apart from a mask.

    Attributes:
        lengths: pointer to (B,).
        positions: pointer to (B, queries), or None.
        first: pointer to (B,), or None.
        window: tokens that a query sees, or None for all.
        most: the largest legal length.
        causal: constexpr.
    """

    lengths: Any
    positions: Any
    first: Any
    window: int | None
    most: int
    causal: tl.constexpr


@triton.jit
def visible_tokens(visible, b, m, queries, inside):
    """Return the first and the last token (int64) that queries ``m`` of sequence ``b`` see.

    Where ``inside`` is false, and for a sequence whose length is not legal, last < first. The third
    result is whether the length is legal.
    """
    length = tl.load(visible.lengths + b).to(tl.int64)
    legal = (length >= 0) & (length <= visible.most)
    last = tl.zeros_like(m) + length - 1
    position = m + length - queries
    if visible.positions is not None:
        position = tl.load(visible.positions + b * queries + m, mask=inside, other=0).to(tl.int64)
    if visible.causal:
        last = tl.minimum(last, position)
    first = tl.zeros_like(m)
    if visible.window is not None:
        first = tl.maximum(first, position - visible.window + 1)
    if visible.first is not None:
        first = tl.maximum(first, tl.load(visible.first + b).to(tl.int64))
    return first, tl.where(inside & legal, last, -1), legal


@triton.jit
def seen_by_any(first, last):
    """Return the first and the last token (int64) that a query sees; last < first for none."""
    some = first <= last
    least = tl.min(tl.where(some, first, 0x7FFFFFFFFFFFFFFF), 0)
    return least, tl.max(tl.where(some, last, -1), 0)


@triton.jit
def find_rows(pages, b, token, inside):
    """Return sequence or page (int64) and row of tokens, and which of them are in the cache."""
    if pages.table is None:
        return tl.zeros_like(token) + b, token, inside
    else:
        entries = pages.table + b * pages.width + token // pages.page
        outer = tl.load(entries, mask=inside, other=0).to(tl.int64)
        return outer, token % pages.page, inside & (outer >= 0) & (outer < pages.pages)


@triton.jit
def load_values(rows, outer, h, token, inside, e0, N: tl.constexpr):
    """Return elements e0 .. e0 + N - 1 of rows, float32 (len(token), N), without factors.

    They are 0 outside the rows, where ``inside`` is false, and for plain values below 2^-64.
    ``e0`` is a multiple of the codes of a group.
    """
    L: tl.constexpr = token.shape[0]
    form: tl.constexpr = rows.form.value
    start = rows.codes + (outer * rows.outer + h * rows.head + token * rows.token)[:, None]
    if form.pack == 1:
        e = e0 + tl.arange(0, N)
        within = inside[:, None] & (e < rows.size)[None, :]
        codes = tl.load(start + e[None, :], mask=within, other=0)
    elif form.pack == 2:
        byte = e0 // 2 + tl.arange(0, N // 2)
        within = inside[:, None] & (byte < rows.size // 2)[None, :]
        pairs = tl.load(start + byte[None, :], mask=within, other=0).to(tl.int32)
        codes = tl.reshape(tl.join(pairs & 0xF, pairs >> 4), (L, N))
    else:
        group = e0 // 4 + tl.arange(0, N // 4)
        within = inside[:, None] & (group < rows.size // 4)[None, :]
        start = start + 3 * group[None, :]
        word = tl.load(start, mask=within, other=0).to(tl.int32)
        word = word | (tl.load(start + 1, mask=within, other=0).to(tl.int32) << 8)
        word = word | (tl.load(start + 2, mask=within, other=0).to(tl.int32) << 16)
        even = tl.join(word & 0x3F, (word >> 12) & 0x3F)
        odd = tl.join((word >> 6) & 0x3F, word >> 18)
        codes = tl.reshape(tl.join(even, odd), (L, N))
    if form.exponent == 0:
        return at_least(to_float32(codes), 2.0**-64)
    else:
        return decode(codes, form.exponent, form.mantissa)


@triton.jit
def load_factors(rows, outer, h, token, inside, block):
    """Return the factors ``block`` of rows, float32 (len(token),)."""
    at = outer * rows.factor_outer + h * rows.factor_head + token * rows.factor_token + block
    stored = tl.load(rows.factors + at, mask=inside, other=0)
    form: tl.constexpr = rows.form.value
    if form.factor == "e8m0":
        return e8m0_factor(stored.to(tl.int32))
    elif form.factor == "e4m3":
        return decode(stored, 4, 3)
    else:
        return stored


@triton.jit
def load_wide(rows):
    """Return the factor of the whole cache."""
    wide = tl.load(rows.wide)
    return tl.div_rn(wide, tl.zeros_like(wide) + rows.form.value.divisor)


@triton.jit
def at_least(values, least):
    """Replace values whose magnitude is below a number by 0; NaN stays NaN."""
    return tl.where(tl.abs(values) < least, 0.0, values)
