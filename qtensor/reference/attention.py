"""Attention over rows of keys and values, in the order of sums that docs/numerics.md states.

Shapes: B sequences, H heads of keys and values, G heads of queries for each of them, M queries of a
head, R = M * G rows, S tokens, D the head size of queries and keys, E that of values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qtensor.core.row_format import RowFormat
from qtensor.reference.arithmetic import exp2, fused_multiply_add
from qtensor.reference.elements import decode, decode_pairs, unpack_quads
from qtensor.reference.scaling import e8m0_decode_factor, quotient

CHUNK = 256
"""Consecutive tokens, from a multiple of it, whose scores share a maximum."""
SEGMENT = 4
"""Chunks, from a multiple of it, whose results are merged first."""
LANES = 16
LEAST = 2.0**-96
"""Queries and weights below this count as 0 beside codes: no sum is then a subnormal number."""
LEAST_BESIDE_PLAIN = 2.0**-48
"""The same beside plain keys or values, of which numbers below ``LEAST_PLAIN`` count as 0."""
LEAST_PLAIN = 2.0**-64
LOG2_E = 1.4426950408889634
_MOST = 1 << 22
"""Scores that are computed at once."""


class Rows(NamedTuple):
    """Rows of keys or values in the order of their tokens.

    Attributes:
        values: float32 (B, H, S, size), without factors.
        factors: float32 (B, H, S, blocks), or None.
        wide: float32 scalar, the factor of the whole cache; or None.
        format: how the rows were stored.
    """

    values: Tensor
    factors: Tensor | None
    wide: Tensor | None
    format: RowFormat

    @property
    def least(self) -> float:
        """Return the least number beside these rows that does not count as 0."""
        return LEAST_BESIDE_PLAIN if self.format.element is None else LEAST


class Scoring(NamedTuple):
    """What turns sums of products into scores, and scores into weights.

    Attributes:
        scale: multiplies the products of queries and keys.
        soft_cap: scores are ``soft_cap * tanh(score / soft_cap)``; 0 for none.
        seen: bool (B, 1 or G * H, M, S): the tokens that a query sees.
        added: float32 that is added to the scores, broadcastable to (B, G * H, M, S), or None.
        sinks: float32 (B, G * H, M) of scores without a value, or None.
    """

    scale: float
    soft_cap: float
    seen: Tensor
    added: Tensor | None
    sinks: Tensor | None


class Partial(NamedTuple):
    """The result over some tokens.

    Attributes:
        most: (B, H, R), the largest score.
        sum: (B, H, R), of weights.
        values: (B, H, R, E), the weighted sum.
        some: bool (B, H, R): whether there is a score above -inf; the others count only then.
    """

    most: Tensor
    sum: Tensor
    values: Tensor
    some: Tensor


def decode_stored(
    codes: Tensor, factors: Tensor | None, wide: Tensor | None, form: RowFormat
) -> Rows:
    """Return the rows of buffers.

    Args:
        codes: (B, H, S, entries).
        factors: (B, H, S, blocks) or None.
        wide: float32 (1,), the value of the whole cache, or None.
        form: describes the buffers.
    """
    size = form.size(codes.shape[-1])
    if form.element is None:
        values = codes.float()
        values = torch.where(values.abs() < LEAST_PLAIN, 0.0, values)
    elif form.four_bits:
        values = decode_pairs(codes, form.element, size)
    else:
        codes = unpack_quads(codes, size) if form.group == (4, 3) else codes
        values = decode(codes, form.element)
    decoded = factors
    if factors is not None and form.factor is torch.uint8:
        nv = form.divisor > 0
        decoded = factors.view(torch.float8_e4m3fn).float() if nv else e8m0_decode_factor(factors)
    if wide is not None and form.divisor:
        wide = quotient(wide.reshape(()), form.divisor)
    return Rows(values, decoded, wide if form.divisor else None, form)


def order_of_piece(form: RowFormat) -> tuple[int, ...]:
    """Return the order in which the elements of a piece are multiplied."""
    if form.four_bits:
        eights = range(0, form.piece, 8)
        return tuple(
            start + i // 2 + (4 if i % 2 == 0 else 0) for start in eights for i in range(8)
        )
    return tuple(i ^ 1 for i in range(form.piece))


def attention(q: Tensor, k: Rows, v: Rows, scoring: Scoring) -> Tensor:
    """Return the attention of queries, float32 (B, G * H, M, E).

    Args:
        q: (B, G * H, M, D); weights are rounded to bfloat16 if it is bfloat16.
        k: keys.
        v: values.
        scoring: what the queries see, and how their scores follow.
    """
    return _finished(_partial(q, k, v, scoring), scoring.sinks, v.wide)


def attention_part(q: Tensor, k: Rows, v: Rows, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Return the weighted values (B, G * H, M, E) over some tokens, and (B, G * H, M, 2).

    The latter are the largest score, -inf without any, and the sum of weights, 0 without any score.
    Sinks are left out.
    """
    part = _partial(q, k, v, scoring)
    values = part.values if v.wide is None else part.values * v.wide
    sums = torch.stack([part.most, part.sum], -1)
    absent = ~part.some.unsqueeze(-1)
    least = sums.new_tensor([-math.inf, 0.0])
    return torch.where(absent, 0.0, values + 0.0), torch.where(absent, least, sums)


def join(parts: Sequence[tuple[Tensor, Tensor]], sinks: Tensor | None) -> Tensor:
    """Return the attention over the tokens of all parts, (B, G * H, M, E).

    Args:
        parts: results of ``attention_part`` over different tokens.
        sinks: float32 (B, G * H, M) of scores without a value, or None.
    """
    partials = [
        Partial(sums[..., 0], sums[..., 1], values, sums[..., 1] != 0) for values, sums in parts
    ]
    return _finished(_merged(partials), sinks, None)


def _partial(q: Tensor, k: Rows, v: Rows, scoring: Scoring) -> Partial:
    """Return the attention without sinks before the division, (B, G * H, M) and with E."""
    heads, groups = k.values.shape[1], q.shape[1] // max(k.values.shape[1], 1)
    rows = q.float().unflatten(1, (heads, groups)).flatten(2, 3)
    rows = torch.where(rows.abs() < k.least, 0.0, rows)
    seen, added = (
        None if t is None else _by_rows(t, heads, groups, q.shape[2])
        for t in (scoring.seen, scoring.added)
    )
    count = max(1, _MOST // max(1, q.shape[0] * heads * k.values.shape[2]))
    parts = []
    for start in range(0, max(1, rows.shape[2]), count):
        part = slice(start, start + count)
        scores = _scores(rows[:, :, part], k, scoring)
        if added is not None:
            log2_e = scores.new_tensor(LOG2_E)
            scores = fused_multiply_add(added[:, :, part], log2_e, scores)
        scores = torch.where(seen[:, :, part], scores, -math.inf)  # type: ignore[index]
        parts.append(_weighted(scores, v, q.dtype is torch.bfloat16))
    by_heads = (torch.cat(ts, 2).unflatten(2, (groups, -1)) for ts in zip(*parts, strict=True))
    return Partial(*(t.flatten(1, 2) for t in by_heads))


def _by_rows(t: Tensor, heads: int, groups: int, queries: int) -> Tensor:
    """Return (B, H, R, S) of a tensor that broadcasts to (B, H * G, M, S)."""
    full = t.expand(t.shape[0], heads * groups, queries, t.shape[3])
    return full.unflatten(1, (heads, groups)).flatten(2, 3)


def _scores(q: Tensor, k: Rows, scoring: Scoring) -> Tensor:
    """Return the scores (B, H, R, S) of rows (B, H, R, D), times the logarithm of e to base 2."""
    piece, order = k.format.piece, order_of_piece(k.format)
    padding = (0, -q.shape[-1] % piece)
    q, keys = F.pad(q, padding), F.pad(k.values, padding)
    total = q.new_zeros(*q.shape[:3], keys.shape[2])
    for index, start in enumerate(range(0, q.shape[-1], piece)):
        part = torch.zeros_like(total)
        for i in order:
            one_q, one_k = q[..., start + i, None], keys[..., start + i].unsqueeze(2)
            part = fused_multiply_add(one_q, one_k, part)
        if k.format.block and k.factors is not None:
            total = fused_multiply_add(part, k.factors[..., index].unsqueeze(2), total)
        else:
            total = total + part
    if k.factors is not None and not k.format.block:
        total = total * k.factors[..., 0].unsqueeze(2)
    factor = LOG2_E * scoring.scale
    factor = 2.0 * factor / scoring.soft_cap if scoring.soft_cap else factor
    wide = 1.0 if k.wide is None else k.wide.double()
    total = total * total.new_tensor(factor, dtype=torch.float64).mul(wide).float()
    if not scoring.soft_cap:
        return total
    z = exp2((-total.abs()).clamp(min=-96.0))
    tanh = quotient(1.0 - z, 1.0 + z)
    return torch.where(total < 0, -tanh, tanh) * total.new_tensor(scoring.soft_cap * LOG2_E)


def _weighted(scores: Tensor, v: Rows, round_weights: bool) -> Partial:
    """Return the values (B, H, R, E), weighted by the exponentials of scores (B, H, R, S)."""
    whole = -scores.shape[-1] % CHUNK
    chunks = F.pad(scores, (0, whole), value=-math.inf).unflatten(-1, (-1, CHUNK))
    most = chunks.masked_fill(chunks.isnan(), -math.inf).amax(-1)
    some = (chunks != -math.inf).any(-1)
    weights = exp2(chunks - most.masked_fill(~some, 0.0).unsqueeze(-1))
    lanes = weights.unflatten(-1, (-1, LANES))
    sums = torch.zeros_like(lanes[..., 0, :])
    for i in range(lanes.shape[-2]):
        sums = sums + lanes[..., i, :]
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    values = F.pad(v.values, (0, 0, 0, whole)).unflatten(2, (-1, CHUNK))
    factors = None
    if v.factors is not None:
        factors = F.pad(v.factors, (0, 0, 0, whole)).unflatten(2, (-1, CHUNK))
    total = values.new_zeros(*chunks.shape[:4], values.shape[-1])
    for i in range(CHUNK):
        token = i ^ 1
        weight = weights[..., token, None]
        if factors is not None:
            # A weight of 0 stays 0 beside a factor that is NaN or inf.
            scaled = weight * factors[:, :, None, :, token]
            weight = torch.where(weight == 0, 0.0, scaled)
        weight = torch.where(weight < v.least, 0.0, weight)
        weight = weight.bfloat16().float() if round_weights else weight
        if v.format.block:
            weight = weight.repeat_interleave(v.format.block, -1)
        total = fused_multiply_add(weight, values[:, :, None, :, token], total)
    parts = [
        Partial(most[..., i], sums[..., 0][..., i], total[..., i, :], some[..., i])
        for i in range(chunks.shape[3])
    ]
    segments = [_merged(parts[i : i + SEGMENT]) for i in range(0, len(parts), SEGMENT)]
    if not segments:
        none = sums.new_zeros(scores.shape[:3])
        return Partial(none, none, total.sum(3), none > 0)
    return _merged(segments)


def _merged(parts: Sequence[Partial]) -> Partial:
    """Merge results in order; those without a score above -inf are left out."""
    done = parts[0]
    for part in parts[1:]:
        most = torch.maximum(done.most, part.most)
        a, b = exp2(done.most - most), exp2(part.most - most)
        both = Partial(
            most,
            fused_multiply_add(done.sum, a, part.sum * b),
            fused_multiply_add(done.values, a[..., None], part.values * b[..., None]),
            done.some | part.some,
        )
        done = Partial(
            *(
                torch.where(
                    _like(done.some & part.some, x), x, torch.where(_like(part.some, x), y, z)
                )
                for x, y, z in zip(both, part, done, strict=True)
            )
        )
    return done


def _like(flags: Tensor, t: Tensor) -> Tensor:
    return flags.unsqueeze(-1) if t.ndim > flags.ndim else flags


def _finished(done: Partial, sinks: Tensor | None, wide: Tensor | None) -> Tensor:
    """Return the weighted values divided by the sum of weights; 0 where there is no score."""
    values, total = done.values, done.sum
    if sinks is not None:
        log2_sinks = sinks * sinks.new_tensor(LOG2_E)
        most = torch.maximum(done.most, log2_sinks)
        scale = exp2(done.most - most)
        values = values * scale.unsqueeze(-1)
        total = fused_multiply_add(total, scale, exp2(log2_sinks - most))
    result = quotient(values, total.unsqueeze(-1))
    result = result if wide is None else result * wide
    # Adding +0 makes -0 to +0, whose sign could depend on tokens that are not seen.
    return torch.where(done.some.unsqueeze(-1), result + 0.0, 0.0)
