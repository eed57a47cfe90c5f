"""Compute buffer shapes from logical shapes.

The functions take ints or SymInts. They read no data and do not branch on sizes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from qtensor.core.formats import LEAD, Dim, K, Slot

Shape = Sequence[int]


def ceil_div(n: int, d: int) -> int:
    """Return ``ceil(n / d)`` for non-negative integers."""
    return n if d == 1 else (n + d - 1) // d


def round_up(n: int, multiple: int) -> int:
    """Return ``n`` rounded up to a multiple of ``multiple``."""
    return n if multiple == 1 else (n + multiple - 1) // multiple * multiple


def contiguous_strides(size: Shape) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor; as in torch, an empty dim counts as one."""
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def is_empty(shape: Shape) -> bool:
    """Return True if a size is zero; a symbolic one counts as not zero, to keep graphs general."""
    count = math.prod(shape)
    if isinstance(count, int):
        return count == 0
    return any(isinstance(n, int) and n == 0 for n in shape)


def rows_cols(shape: Shape) -> tuple[int, int]:
    """Return the (M, K) view of a shape: M = product of the leading dims, K = the last.

    The shape () gives (1, 1).
    """
    rows = 1
    for n in shape[:-1]:
        rows = rows * n
    return rows, (shape[-1] if len(shape) else 1)


def dim_size(dim: Dim, rows: int, cols: int) -> int:
    """Return the entries of a buffer dimension (not ``lead``) for M = ``rows``, K = ``cols``."""
    n = rows if dim.axis == "m" else cols if dim.axis == "k" else 1
    return round_up(ceil_div(n, dim.per) * dim.units, dim.pad)


def has_padding(slot: Slot, shape: Shape) -> bool:
    """Return True if a buffer of a tensor of ``shape`` has entries or bits without an element."""
    rows, cols = rows_cols(shape)
    for dim in slot.dims:
        n = {"m": rows, "k": cols}.get(dim.axis, 0)
        if n % dim.per or n // dim.per * dim.units % dim.pad:
            return True
    return False


def buffer_shapes(slots: Sequence[Slot], shape: Shape) -> list[tuple[int, ...]]:
    """Return the shapes of the inner buffers ``slots`` of a tensor of logical ``shape``."""
    logical = tuple(shape)
    rows, cols = rows_cols(shape)
    return [logical if slot.logical else _sizes(slot.dims, logical, rows, cols) for slot in slots]


def _sizes(dims: tuple[Dim, ...], shape: tuple[int, ...], rows: int, cols: int) -> tuple[int, ...]:
    sizes: list[int] = []
    for dim in dims:
        if dim.axis == "lead":
            sizes.extend(shape[:-1])
        else:
            sizes.append(dim_size(dim, rows, cols))
    return tuple(sizes)


def buffer_shape(dims: tuple[Dim, ...], shape: Shape) -> tuple[int, ...]:
    """Return the shape of an inner buffer with ``dims`` for a tensor of logical ``shape``."""
    return tuple(shape) if dims == (LEAD, K) else _sizes(dims, tuple(shape), *rows_cols(shape))


# ---- buffers of ragged groups, one after another


def flat_sizes(slots: Sequence[Slot], sizes: Shape, cols: int) -> list[int]:
    """Return the entries of each flat buffer for groups of ``sizes`` rows."""
    totals: list[int] = [0] * len(slots)
    for rows in sizes:
        for i, shape in enumerate(buffer_shapes(slots, (rows, cols))):
            totals[i] = totals[i] + math.prod(shape)
    return totals


def flat_bound(slot: Slot, rows: int, cols: int, groups: int) -> int:
    """Return the entries of a flat buffer that suffice for any split of ``rows`` into ``groups``.

    Each period of P rows adds the same number of entries to a dimension, and fewer than P rows add
    at most as many. So sum(ceil(m_i / P)) <= floor((M + groups * (P - 1)) / P) periods suffice.
    """
    count, ragged = 1, False
    for dim in slot.dims:
        if dim.axis in ("m", "lead"):
            period = dim.per * dim.pad // math.gcd(dim.units, dim.pad)
            entries = dim_size(dataclasses.replace(dim, axis="m"), period, cols)
            count = count * ((rows + groups * (period - 1)) // period * entries)
            ragged = True
        else:
            count = count * dim_size(dim, rows, cols)
    return count if ragged else count * groups


def normalize(dim: int, rank: int) -> int:
    """Return a dim index counted from the front.

    Raises:
        IndexError: ``dim`` is out of range.
    """
    if not -rank <= dim < rank:
        raise IndexError(f"dim {dim} is out of range for a tensor with {rank} dims")
    return dim % rank


def unsqueezed(shape: Shape, dim: int) -> tuple[int, ...]:
    """Return a shape with a dim of size 1 put at ``dim``."""
    dim = normalize(dim, len(shape) + 1)
    return (*shape[:dim], 1, *shape[dim:])


def squeezed(shape: Shape, dims: int | Sequence[int] | None = None) -> tuple[int, ...]:
    """Return a shape without its dims of size 1; if ``dims`` is given, only these are dropped."""
    rank = len(shape)
    if dims is None:
        dims = range(rank)
    named = dims if isinstance(dims, Sequence) else [dims]
    dropped = {normalize(dim, max(rank, 1)) for dim in named}
    return tuple([n for i, n in enumerate(shape) if i not in dropped or n != 1])
