"""Attention in the order of sums of docs/numerics.md, one query at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

F = np.float32
LOG2_E = 1.4426950408889634
COEFFICIENTS = [
    F(c)
    for c in (
        0.6931471824645996,
        0.24022647738456726,
        0.055503323674201965,
        0.009618437848985195,
        0.0013398876180872321,
        0.00015353356138803065,
    )
]


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 a * b + c, rounded once.

    The exact product is two float32 numbers (Dekker's splitting, in float64); math.fsum would do
    the rest for single numbers. Here the float64 sum is moved towards its error where it is even.
    """
    a, b, c = np.broadcast_arrays(a, b, c)
    product = a.astype(np.float64) * b.astype(np.float64)
    c = c.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        total = product + c
        rest = total - product
        error = (product - (total - rest)) + (c - rest)
        even = np.frexp(total)[0] * 2.0**53 % 2 == 0
        move = (error != 0) & even & np.isfinite(total)
        total = np.where(move, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
        # Away from an even number in the direction of the error: the neighbour is odd.
        return total.astype(F)


def exp2(x: np.ndarray) -> np.ndarray:
    """2^x for float32 x <= 0; 0 below -96."""
    x = np.asarray(x, F)
    clamped = np.maximum(x, F(-200))  # NaN stays
    n = np.rint(clamped)
    f = (clamped - n).astype(F)
    y = np.full_like(f, COEFFICIENTS[-1])
    for c in (*COEFFICIENTS[-2::-1], F(1)):
        y = fma(y, f, c)
    power = np.ldexp(1.0, np.nan_to_num(n).astype(np.int64))
    return np.where(x < F(-96), F(0), (y.astype(np.float64) * power).astype(F))


def bfloat16(v: np.ndarray) -> np.ndarray:
    """Rounded to nearest, ties to even."""
    quantum = np.ldexp(1.0, np.frexp(v.astype(np.float64))[1] - 8)
    return np.where(np.isfinite(v), np.rint(v / quantum) * quantum, v).astype(F)


@dataclass
class Stored:
    """Keys or values of one sequence and head.

    `values` (S, D) are those of codes; `factors` (S, blocks), (S, 1) or None; `block` is the number
    of values that share a factor, 0 for a row; `wide` the factor of the whole cache; `four_bits`
    and `plain` say how they were stored.
    """

    values: np.ndarray
    factors: np.ndarray | None = None
    block: int = 0
    wide: float = 1.0
    four_bits: bool = False
    plain: bool = False

    def kept(self) -> np.ndarray:
        small = self.plain & (np.abs(self.values) < F(2.0**-64))
        return np.where(small, F(0), self.values).astype(F)

    def least(self) -> np.float32:
        return F(2.0**-48) if self.plain else F(2.0**-96)


@dataclass
class Query:
    """One query: `q` (D,), the tokens `first` .. `last` that it sees, and how it is scored.

    `mask` (S,) is added to the scores, -inf hides a token; `round_weights` for bfloat16 queries.
    """

    q: np.ndarray
    first: int
    last: int
    scale: float
    soft_cap: float = 0.0
    sink: float | None = None
    mask: np.ndarray | None = None
    round_weights: bool = False


def scores(query: Query, k: Stored, tokens: np.ndarray) -> np.ndarray:
    """The scores of tokens, times log2(e)."""
    q = np.where(np.abs(query.q) < k.least(), F(0), query.q).astype(F)
    keys, size, piece = k.kept()[tokens], len(q), k.block or 32
    total = np.zeros(len(tokens), F)
    for index, start in enumerate(range(0, size, piece)):
        order = [4, 0, 5, 1, 6, 2, 7, 3] if k.four_bits else [1, 0, 3, 2, 5, 4, 7, 6]
        part = np.zeros(len(tokens), F)
        for e in [start + eight + i for eight in range(0, piece, 8) for i in order]:
            if e < size:
                part = fma(q[e], keys[:, e], part)
        total = fma(part, k.factors[tokens, index], total) if k.block else (total + part).astype(F)
    if k.factors is not None and not k.block:
        total = (total * k.factors[tokens, 0]).astype(F)
    factor = LOG2_E * query.scale
    if query.soft_cap:
        factor = 2.0 * factor / query.soft_cap
    total = (total * F(factor * np.float64(k.wide))).astype(F)
    if query.soft_cap:
        z = exp2(np.maximum(-np.abs(total), F(-96)))
        tanh = ((F(1) - z) / (F(1) + z)).astype(F)
        total = (np.where(total < 0, -tanh, tanh) * F(query.soft_cap * LOG2_E)).astype(F)
    if query.mask is not None:
        total = fma(query.mask[tokens].astype(F), F(LOG2_E), total)
    return total


def chunk(query: Query, k: Stored, v: Stored, start: int):
    """The largest score, the sum of weights and the weighted sum of 256 tokens, or None."""
    tokens = np.arange(start, start + 256)
    seen = (tokens >= query.first) & (tokens <= query.last)
    inside = np.where(seen, tokens, query.last)
    s = np.where(seen, scores(query, k, inside), F(-np.inf)).astype(F)
    if np.all(s == -np.inf):
        return None
    numbers = s[~np.isnan(s)]
    most = numbers.max() if len(numbers) else F(-np.inf)
    with np.errstate(invalid="ignore"):
        weights = exp2((s - most).astype(F))
    lanes = np.zeros(16, F)
    for i in range(0, 256, 16):
        lanes = (lanes + weights[i : i + 16]).astype(F)
    for half in (8, 4, 2, 1):
        lanes = (lanes[:half] + lanes[half : 2 * half]).astype(F)
    values, size = v.kept()[inside], v.values.shape[1]
    out = np.zeros(size, F)
    for i in range(256):
        t = i ^ 1
        w = np.full(size, weights[t], F)
        if v.factors is not None and weights[t] != 0:
            w = (w * np.repeat(v.factors[inside[t]], v.block or size)).astype(F)
        w = np.where(w < v.least(), F(0), w).astype(F)
        out = fma(bfloat16(w) if query.round_weights else w, values[t], out)
    return most, lanes[0], out


def merged(parts):
    """Partial results in order, those without a score left out."""
    parts = [p for p in parts if p is not None]
    if not parts:
        return None
    (most, total, values), *rest = parts
    for most2, total2, values2 in rest:
        top = max(most, most2)
        a, b = exp2(F(most - top)), exp2(F(most2 - top))
        total = fma(total, a, (total2 * b).astype(F))
        values = fma(values, a, (values2 * b).astype(F))
        most = top
    return most, total, values


def part(query: Query, k: Stored, v: Stored):
    """The largest score, the sum of weights and the weighted sum of all tokens, or None."""
    segments = []
    if query.last >= query.first:
        for segment in range(query.first // 1024, query.last // 1024 + 1):
            starts = range(segment * 1024, segment * 1024 + 1024, 256)
            inside = [s for s in starts if s + 255 >= query.first and s <= query.last]
            segments.append(merged([chunk(query, k, v, s) for s in inside]))
    return merged(segments)


def attend(query: Query, k: Stored, v: Stored) -> np.ndarray:
    """The attention of one query, float32 (E,)."""
    return finished(part(query, k, v), query.sink, v.values.shape[1], v.wide)


def attend_both(queries, sides) -> np.ndarray:
    """The attention of one query over the tokens of two caches, sides (k, v)."""
    parts = [part(query, *side) for query, side in zip(queries, sides, strict=True)]
    wide = [v.wide for _, v in sides]
    scaled = [
        None if p is None else (p[0], p[1], (p[2] * F(w)).astype(F) + F(0))
        for p, w in zip(parts, wide, strict=True)
    ]
    return finished(merged(scaled), queries[0].sink, sides[0][1].values.shape[1], 1.0)


def finished(done, sink: float | None, size: int, wide: float) -> np.ndarray:
    """A result divided by its sum of weights."""
    if done is None:
        return np.zeros(size, F)
    most, total, values = done
    if sink is not None:
        sink = F(F(sink) * F(LOG2_E))
        top = max(most, sink)
        scale = exp2(F(most - top))
        values = (values * scale).astype(F)
        total = fma(total, scale, exp2(F(sink - top)))
    with np.errstate(invalid="ignore"):
        return ((values / total).astype(F) * F(wide)).astype(F) + F(0)
