"""Shape arithmetic: buffer shapes from logical shapes. Pure functions of ints or SymInts; no data, no branches on sizes."""

from __future__ import annotations

from collections.abc import Sequence

from qtensor.formats import K, LEAD, Dim

Shape = Sequence[int]


def ceil_div(n: int, d: int) -> int:
    """``ceil(n / d)`` for non-negative integers."""
    return n if d == 1 else (n + d - 1) // d


def round_up(n: int, multiple: int) -> int:
    """``n`` rounded up to a multiple of ``multiple``."""
    return n if multiple == 1 else (n + multiple - 1) // multiple * multiple


def rows_cols(shape: Shape) -> tuple[int, int]:
    """The (M, K) view of a logical shape: M = product of the leading dims, K = the last; () is (1, 1)."""
    rows = 1
    for n in shape[:-1]:
        rows = rows * n
    return rows, (shape[-1] if len(shape) else 1)


def dim_size(dim: Dim, rows: int, cols: int) -> int:
    """Entries of one buffer dimension (not ``lead``) for an (M, K) = (rows, cols) tensor."""
    n = {"m": rows, "k": cols, "one": 1}[dim.axis]
    return round_up(ceil_div(n, dim.per) * dim.units, dim.pad)


def buffer_shape(dims: tuple[Dim, ...], shape: Shape) -> tuple[int, ...]:
    """Shape of an inner buffer with ``dims`` for a tensor of logical ``shape``."""
    if not len(shape) and dims == (LEAD, K):
        return ()
    rows, cols = rows_cols(shape)
    sizes: list[int] = []
    for dim in dims:
        if dim.axis == "lead":
            sizes.extend(shape[:-1])
        else:
            sizes.append(dim_size(dim, rows, cols))
    return tuple(sizes)
