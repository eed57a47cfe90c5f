"""The op of attention over sequences of different lengths that lie one after the other."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.errors import check
from qtensor.core.row_format import row_format
from qtensor.library.attention import ATTENTION
from qtensor.library.cache import CacheSide, check_indices, check_shape, check_side
from qtensor.library.define import SymInt, empty, leaf_op


class VarlenArgs(NamedTuple):
    """Arguments of the op ``varlen_attention``.

    Attributes:
        q: (Tq, Hq, D), the queries of all sequences, one after the other.
        k: codes of the keys, (Tk, H, entries), or (pages, page, H, entries) with a block table.
        k_factors: their factors, or None if the format has none.
        v: codes of the values.
        v_factors: as ``k_factors``.
        k_format: as in ``attention``.
        v_format: the same for the values.
        cu_seq_q: (N + 1,) integers: where the queries of each sequence start, and their number.
        cu_seq_k: the same for the keys; None with a block table.
        max_q: at least the most queries of a sequence.
        max_k: at least the most keys of a sequence that are used.
        scale: multiplies the products of queries and keys.
        before: how many tokens before its own a query sees; -1 for all.
        after: the same after its own.
        seqused_k: (N,) integers: the keys of each sequence that are used; None for all.
        block_table: (N, pages of a sequence), or None.
        k_global: as in ``attention``.
        v_global: the same for the values.
    """

    q: Tensor
    k: Tensor
    k_factors: Tensor | None
    v: Tensor
    v_factors: Tensor | None
    k_format: str
    v_format: str
    cu_seq_q: Tensor
    cu_seq_k: Tensor | None
    max_q: SymInt
    max_k: SymInt
    scale: float
    before: int = -1
    after: int = -1
    seqused_k: Tensor | None = None
    block_table: Tensor | None = None
    k_global: Tensor | None = None
    v_global: Tensor | None = None


def _sides(args: VarlenArgs) -> tuple[CacheSide, CacheSide]:
    """Return keys and values as (pages or 1, H, tokens, ...)."""
    sides = (
        CacheSide("k", args.k, args.k_factors, args.k_global, row_format(args.k_format)),
        CacheSide("v", args.v, args.v_factors, args.v_global, row_format(args.v_format)),
    )
    paged = args.block_table is not None
    for side in sides:
        for name, t in ((side.name, side.codes), (f"{side.name}_factors", side.factors)):
            shape = "(pages, page, heads, size)" if paged else "(tokens, heads, size)"
            fits = t is None or t.ndim == 3 + paged
            check_shape("varlen_attention", name, t, shape, fits)
    first, second = [_by_heads(side, paged) for side in sides]
    return first, second


def _by_heads(side: CacheSide, paged: bool) -> CacheSide:
    factors = None if side.factors is None else _heads_first(side.factors, paged)
    return side._replace(codes=_heads_first(side.codes, paged), factors=factors)


def _heads_first(t: Tensor, paged: bool) -> Tensor:
    return (t if paged else t.unsqueeze(0)).transpose(1, 2)


def _varlen_alloc(args: VarlenArgs) -> Tensor:
    op, q, paged = "varlen_attention", args.q, args.block_table is not None
    check(q.ndim == 3, op, "q must be (tokens, heads, size)", tuple(q.shape), "Reshape q")
    rule = "a block table needs seqused_k and no cu_seq_k, else keys need cu_seq_k"
    fits = (
        args.cu_seq_k is None and args.seqused_k is not None if paged else args.cu_seq_k is not None
    )
    lengths = {"cu_seq_k": args.cu_seq_k, "seqused_k": args.seqused_k}
    given = " and ".join(name for name, t in lengths.items() if t is not None) or "no lengths"
    table = "a block table" if paged else "no block table"
    fix = "Pass seqused_k alone" if paged else "Pass cu_seq_k"
    check(fits, op, rule, f"{table} and {given}", fix)
    k, v = _sides(args)
    for side in (k, v):
        check_side(op, side)
    rule = "the heads of q must be a multiple of those of k"
    fits = k.codes.shape[1] > 0 and q.shape[1] % k.codes.shape[1] == 0
    check(fits, op, rule, f"{q.shape[1]} and {k.codes.shape[1]}", "Fix one of them")
    return empty(q, (*q.shape[:2], v.form.size(v.codes.shape[3])))


def _varlen_fill(out: Tensor, args: VarlenArgs) -> None:
    k, v = _sides(args)
    starts = _bounds("cu_seq_q", args.cu_seq_q, args.q.shape[0])
    ends = None if args.cu_seq_k is None else _bounds("cu_seq_k", args.cu_seq_k, args.k.shape[0])
    _check_sequences(starts, ends, args)
    table = args.block_table
    if table is not None and args.seqused_k is not None:
        table = _used_pages(table, args.seqused_k, args.k.shape[1])
    for i, (start, end) in enumerate(pairwise(starts)):
        part = args.q[start:end].transpose(0, 1).unsqueeze(0)
        used = None if args.seqused_k is None else args.seqused_k[i : i + 1].to(torch.int64)
        sides, pages = (k, v), None if table is None else table[i : i + 1]
        if ends is not None:
            sides = (_tokens(k, ends[i], ends[i + 1]), _tokens(v, ends[i], ends[i + 1]))
            if used is None:
                used = torch.tensor([ends[i + 1] - ends[i]], device=out.device)
        result = _one(part, sides, used, pages, (args.scale, args.before, args.after))
        out[start:end] = result[0].transpose(0, 1)


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


def _check_sequences(starts: list[int], ends: list[int] | None, args: VarlenArgs) -> None:
    """Refuse numbers of sequences that differ, and lengths that are out of range."""
    op, count = "varlen_attention", len(starts) - 1
    max_q, max_k, seqused_k = args.max_q, args.max_k, args.seqused_k
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


def _tokens(side: CacheSide, start: int, end: int) -> CacheSide:
    """Return the tokens of a sequence of packed ones (1, H, tokens, ...)."""
    factors = None if side.factors is None else side.factors[:, :, start:end]
    return side._replace(codes=side.codes[:, :, start:end], factors=factors)


def _one(
    q: Tensor,
    sides: tuple[CacheSide, CacheSide],
    used: Tensor | None,
    block_table: Tensor | None,
    scoring: tuple[float, int, int],
) -> Tensor:
    """Return the attention of one sequence, (1, Hq, M, E)."""
    (k, v), (scale, before, after) = sides, scoring
    lengths = torch.zeros(1, dtype=torch.int64, device=q.device) if used is None else used
    mask, causal = None, after == 0
    if not causal and (before >= 0 or after > 0):
        tokens = torch.arange(int(lengths), device=q.device)
        own = torch.arange(q.shape[2], device=q.device) + (lengths - q.shape[2])
        distance = tokens - own.unsqueeze(1)
        mask = (distance <= after) if after >= 0 else torch.ones_like(distance, dtype=torch.bool)
        mask = (mask & (distance >= -before) if before >= 0 else mask)[None, None]
    return ATTENTION(
        *(q, k.codes, k.factors, v.codes, v.factors, k.form.text, v.form.text, lengths),
        scale=scale,
        causal=causal,
        window=before + 1 if causal and before >= 0 else 0,
        mask=mask,
        block_table=block_table,
        k_global=k.wide,
        v_global=v.wide,
    )


VARLEN_ATTENTION = leaf_op("varlen_attention", VarlenArgs, "Tensor", _varlen_alloc, _varlen_fill)
"""Return the attention of N sequences, (Tq, Hq, E) in the dtype of ``q``.

The last query of a sequence is at the position of its last token. Each sequence is a call of
``attention``, so its bits depend on no other one.
"""
