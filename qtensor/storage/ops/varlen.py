"""Compute attention over sequences of different lengths, with the arguments of ``varlen_attn``."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from qtensor.core.errors import check
from qtensor.library.attention import ATTENTION
from qtensor.library.cache import check_indices, check_shape
from qtensor.storage.base import TensorOrStorage
from qtensor.storage.ops.attention import Stored, refuse_gradient, stored


def varlen_attention(
    query: Tensor,
    key: TensorOrStorage,
    value: TensorOrStorage,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """Return the attention of N sequences, as ``torch.nn.attention.varlen.varlen_attn`` has it.

    Keys and values may be quantized, and all devices serve. The last query of a sequence is at the
    position of its last token. The result has no gradient, and its bits depend on no other
    sequence, so there is no ``num_splits``.

    Args:
        query: (Tq, Hq, D), the queries of all sequences, one after the other.
        key: (Tk, H, D), or (pages, page, H, D) with a block table.
        value: (Tk, H, E), or (pages, page, H, E).
        cu_seq_q: (N + 1,) integers: the queries of sequence i are ``cu_seq_q[i]`` to
            ``cu_seq_q[i + 1]``.
        cu_seq_k: the same for keys; None with a block table.
        max_q: at least the most queries of a sequence.
        max_k: at least the most keys of a sequence that are used.
        scale: ``1 / sqrt(D)`` if None.
        window_size: how many tokens before and after its own a query sees; -1 for all.
        enable_gqa: allow fewer heads of keys than of queries.
        seqused_k: (N,) integers: only so many keys of each sequence are used; at most those that
            it has.
        block_table: (N, pages of a sequence) int64 or int32; needs ``seqused_k``.

    Returns:
        (Tq, Hq, E) in the dtype of ``query``.

    Raises:
        QTensorError: shapes, heads, lengths or ``max_q`` and ``max_k`` do not fit each other.
        UnsupportedError: a gradient is needed.
    """
    op = "varlen_attention"
    refuse_gradient(op, query=query, key=key, value=value)
    check(query.ndim == 3, op, "query must be (tokens, heads, size)", tuple(query.shape), "Fix it")
    k, v = stored("key", key), stored("value", value)
    paged = block_table is not None
    rule = "a block table needs seqused_k and (pages, page, heads, size), else keys need cu_seq_k"
    fits = (seqused_k if paged else cu_seq_k) is not None
    fits = fits and len(key.shape) == len(value.shape) == (4 if paged else 3)
    check(fits, op, rule, f"{tuple(key.shape)}, {tuple(value.shape)}", "Pass them")
    rule, got = "heads differ only with enable_gqa=True", f"{query.shape[1]} and {key.shape[-2]}"
    check(enable_gqa or query.shape[1] == key.shape[-2], op, rule, got, "Pass it")
    starts = _bounds("cu_seq_q", cu_seq_q, query.shape[0])
    ends = None if cu_seq_k is None or paged else _bounds("cu_seq_k", cu_seq_k, key.shape[0])
    _check_sequences(starts, ends, max_q, max_k, seqused_k)
    if block_table is not None and seqused_k is not None:
        block_table = _used_pages(block_table, seqused_k, key.shape[1])
    results = []
    for i in range(len(starts) - 1):
        part = query[starts[i] : starts[i + 1]].transpose(0, 1).unsqueeze(0)
        used = None if seqused_k is None else seqused_k[i : i + 1].to(torch.int64)
        table = None if block_table is None else block_table[i : i + 1]
        sides = (_by_heads(k), _by_heads(v))
        if ends is not None:
            sides = (_tokens(k, ends[i], ends[i + 1]), _tokens(v, ends[i], ends[i + 1]))
            if used is None:
                used = torch.tensor([ends[i + 1] - ends[i]], device=query.device)
        results.append(_one(part, sides, used, table, scale, window_size))
    if not results:
        return query.new_empty(0, query.shape[1], v.codes.shape[-1])
    return torch.cat([y[0].transpose(0, 1) for y in results])


def _bounds(name: str, cumulative: Tensor, rows: int) -> list[int]:
    """Return cumulative lengths that end with the number of rows."""
    op = "varlen_attention"
    check_indices(op, **{name: cumulative})
    rule = f"{name} must be a vector that begins with 0, never falls and ends with the {rows} rows"
    found: list[int] = cumulative.tolist() if cumulative.ndim == 1 else []
    fits = len(found) > 0 and found[0] == 0 and found[-1] == rows and found == sorted(found)
    got = f"{found[:8]}{', ...' * (len(found) > 8)}" if found else tuple(cumulative.shape)
    check(fits, op, rule, got, "Pass 0 and the cumsum(0) of the lengths")
    return found


def _check_sequences(
    starts: list[int], ends: list[int] | None, max_q: int, max_k: int, seqused_k: Tensor | None
) -> None:
    """Refuse numbers of sequences that differ, and lengths that are out of range."""
    op, count = "varlen_attention", len(starts) - 1
    longest = max((b - a for a, b in pairwise(starts)), default=0)
    rule = f"max_q must be at least the {longest} queries of the longest sequence"
    check(max_q >= longest, op, rule, max_q, "Pass that number")
    used: list[int] = []
    if ends is not None:
        rule = "cu_seq_q and cu_seq_k must have the same number of sequences"
        check(len(ends) == len(starts), op, rule, f"{count} and {len(ends) - 1}", "Fix one of them")
        used = [b - a for a, b in pairwise(ends)]
    if seqused_k is not None:
        check_indices(op, seqused_k=seqused_k)
        check_shape(op, "seqused_k", seqused_k, f"({count},)", seqused_k.shape == (count,))
        own, used = used, seqused_k.tolist()
        rule = "seqused_k must be at least 0, and at most the keys of the sequence"
        fits = min(used, default=0) >= 0 and all(n <= m for n, m in zip(used, own, strict=False))
        check(fits, op, rule, f"{used[:8]} of {own[:8] or 'pages'}", "Pass smaller lengths")
    longest = max(used, default=0)
    rule = f"max_k must be at least the {longest} keys of the longest sequence"
    check(max_k >= longest, op, rule, max_k, "Pass that number")


def _used_pages(block_table: Tensor, seqused_k: Tensor, page: int) -> Tensor:
    """Return the columns of a block table that the longest sequence uses."""
    op, count = "varlen_attention", len(seqused_k)
    check_indices(op, block_table=block_table)
    fits = block_table.ndim == 2 and block_table.shape[0] == count
    check_shape(op, "block_table", block_table, f"({count}, pages of a sequence)", fits)
    capacity, longest = block_table.shape[1] * page, max(seqused_k.tolist(), default=0)
    rule = f"seqused_k must be at most the {capacity} keys that a row of block_table names"
    check(longest <= capacity, op, rule, longest, "Pass more pages")
    return block_table[:, : max(-(-longest // max(page, 1)), 1)]


def _tokens(side: Stored, start: int, end: int) -> Stored:
    """Return the tokens of a sequence of packed ones (tokens, H, ...), as (1, H, tokens, ...)."""
    factors = None if side.factors is None else side.factors[None, start:end]
    return _by_heads(side._replace(codes=side.codes[None, start:end], factors=factors))


def _by_heads(side: Stored) -> Stored:
    """Return (..., H, tokens, size) of (..., tokens, H, size)."""
    factors = None if side.factors is None else side.factors.transpose(-3, -2)
    return side._replace(codes=side.codes.transpose(-3, -2), factors=factors)


def _one(
    q: Tensor,
    sides: tuple[Stored, Stored],
    used: Tensor | None,
    block_table: Tensor | None,
    scale: float | None,
    window: tuple[int, int],
) -> Tensor:
    """Return the attention of one sequence, (1, Hq, M, E)."""
    (k, v), (before, after) = sides, window
    lengths = torch.zeros(1, dtype=torch.int64, device=q.device) if used is None else used
    mask, causal = None, after == 0
    if not causal and (before >= 0 or after > 0):
        tokens = torch.arange(int(lengths), device=q.device)
        own = torch.arange(q.shape[2], device=q.device) + (lengths - q.shape[2])
        distance = tokens - own.unsqueeze(1)
        mask = (distance <= after) if after >= 0 else torch.ones_like(distance, dtype=torch.bool)
        mask = (mask & (distance >= -before) if before >= 0 else mask)[None, None]
    return ATTENTION(
        *(q, k.codes, k.factors, v.codes, v.factors, k.format, v.format, lengths),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        causal=causal,
        window=before + 1 if causal and before >= 0 else 0,
        mask=mask,
        block_table=block_table,
        k_global=k.wide,
        v_global=v.wide,
    )
