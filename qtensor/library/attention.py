"""The op of attention over a cache of keys and values."""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.core.errors import DtypeError, check
from qtensor.core.row_format import row_format
from qtensor.kernels import table
from qtensor.library.cache import (
    CacheSide,
    capacity_of,
    check_indices,
    check_pages,
    check_per_sequence,
    check_rows,
    check_shape,
    check_side,
)
from qtensor.library.checks import PassedCalls
from qtensor.library.define import empty, leaf_op
from qtensor.library.quantize import INPUT_DTYPES
from qtensor.reference import attention as reference
from qtensor.reference.arithmetic import write_
from qtensor.reference.denormals import denormals_kept


class AttentionArgs(NamedTuple):
    """Arguments of the op ``attention``.

    Attributes:
        q: (B, Hq, M, D), float32, bfloat16 or float16.
        k: codes of the keys, (B, H, capacity, entries of D), or pages; H divides Hq.
        k_factors: their factors, or None if the format has none.
        v: codes of the values, with a head size E of their own.
        v_factors: as ``k_factors``.
        k_format: canonical text of a quantizer, or "float32", "bfloat16", "float16".
        v_format: the same for the values.
        lengths: (B,) int64 or int32: tokens of each sequence; later rows are never read.
        scale: multiplies the products of queries and keys.
        causal: whether a query sees tokens up to its position alone.
        window: a query sees this many tokens that end with its own; 0 for all. Needs ``causal``.
        soft_cap: scores s become ``soft_cap * tanh(s / soft_cap)``; 0 for none.
        positions: (B, M) int64 or int32, for ``causal``; None for the last M tokens.
        first: (B,) int64 or int32: tokens before it, the left padding, are not seen.
        mask: bool (True: seen) or floating (added to the scores), broadcastable to (B, Hq, M, S);
            S is at least the largest length.
        sinks: (Hq,) or (B, Hq, M): a score for each query, beside those of the tokens, that has
            no value.
        block_table: (B, pages of a sequence) int64 or int32.
        k_global: float32, one value: the amax of NVFP4, or the ``scale_inv`` of FP8.
        v_global: the same for the values.
    """

    q: Tensor
    k: Tensor
    k_factors: Tensor | None
    v: Tensor
    v_factors: Tensor | None
    k_format: str
    v_format: str
    lengths: Tensor
    scale: float
    causal: bool = True
    window: int = 0
    soft_cap: float = 0.0
    positions: Tensor | None = None
    first: Tensor | None = None
    mask: Tensor | None = None
    sinks: Tensor | None = None
    block_table: Tensor | None = None
    k_global: Tensor | None = None
    v_global: Tensor | None = None


def _sides(args: AttentionArgs) -> tuple[CacheSide, CacheSide]:
    return (
        CacheSide("k", args.k, args.k_factors, args.k_global, row_format(args.k_format)),
        CacheSide("v", args.v, args.v_factors, args.v_global, row_format(args.v_format)),
    )


_PASSED = PassedCalls()


def _attention_alloc(args: AttentionArgs) -> Tensor:
    return empty(args.q, (*args.q.shape[:3], _checked_size(args)))


def _checked_size(args: AttentionArgs) -> int:
    """Check a call, and return the head size of the values."""
    signature = _PASSED.signature(args)
    if signature not in _PASSED:
        _check_attention(args)
        _PASSED.add(signature)
    return row_format(args.v_format).size(args.v.shape[3])


def _check_attention(args: AttentionArgs) -> None:
    op, q = "attention", args.q
    k, v = _sides(args)
    check_rows(op, "q", q)
    batch, heads, _, size = q.shape
    k_size = check_side(op, k)
    check_side(op, v)
    rule = "q and k must have one head size"
    check(k_size == size, op, rule, f"{size} and {k_size}", "Fix one of them")
    rule = "k and v must have the same sequences or pages, heads and tokens"
    got = f"{tuple(k.codes.shape[:3])} and {tuple(v.codes.shape[:3])}"
    check(k.codes.shape[:3] == v.codes.shape[:3], op, rule, got, "Fix one of them")
    rule = "the heads of q must be a multiple of those of k"
    fits = k.codes.shape[1] > 0 and heads % k.codes.shape[1] == 0
    check(fits, op, rule, f"{heads} and {k.codes.shape[1]}", "Fix one of them")
    if args.block_table is None:
        rule, got = "q and k must have the same sequences", f"{batch} and {k.codes.shape[0]}"
        check(k.codes.shape[0] == batch, op, rule, got, "Pass a block table, or fix one of them")
    check_per_sequence(op, batch, args.lengths, args.block_table)
    check_options(op, q, args)


def check_options(op: str, q: Tensor, args: Any) -> None:
    """Refuse options that do not fit the queries.

    Args:
        op: named by the error.
        q: (B, Hq, M, D).
        args: ``AttentionArgs``, or what has its attributes from ``scale`` to ``sinks``.

    Raises:
        QTensorError: the message names the option.
        DtypeError: a mask or indices have another dtype.
    """
    batch, heads, queries, _ = q.shape
    _check_numbers(op, args)
    positions, sinks, mask = args.positions, args.sinks, args.mask
    check_indices(op, positions=positions, first=args.first)
    fits = args.first is None or args.first.shape == (batch,)
    check_shape(op, "first", args.first, f"({batch},)", fits)
    fits = positions is None or positions.shape == (batch, queries)
    check_shape(op, "positions", positions, f"({batch}, {queries})", fits)
    _check_sinks(op, sinks, q)
    if mask is not None:
        fits = mask.dtype is torch.bool or mask.dtype in INPUT_DTYPES
        rule = "the mask must be bool, float32, bfloat16 or float16"
        check(fits, op, rule, mask.dtype, "Convert it", DtypeError)
        sizes = zip(mask.shape, q.shape[:3], strict=False)
        fits = mask.ndim == 4 and all(n in (1, most) for n, most in sizes)
        check_shape(op, "mask", mask, f"({batch} or 1, {heads} or 1, {queries} or 1, tokens)", fits)


def _check_sinks(op: str, sinks: Tensor | None, q: Tensor) -> None:
    shapes = ((q.shape[1],), tuple(q.shape[:3]))
    fits = sinks is None or (sinks.is_floating_point() and tuple(sinks.shape) in shapes)
    check_shape(op, "sinks", sinks, f"{shapes[0]} or {shapes[1]}, floating", fits)


def _check_numbers(op: str, args: Any) -> None:
    scale, soft_cap = args.scale, args.soft_cap
    rule = "scale must be a finite number, and must stay so in float32; only 0 may become 0"
    fits = _in_float32(scale) and _in_float32(reference.LOG2_E * scale)
    check(fits, op, rule, scale, "Pass 1 / sqrt(head size)")
    rule = "soft_cap must be a finite number of at least 0, and must stay so in float32; only 0 "
    rule += "may become 0"
    fits = soft_cap >= 0 and _in_float32(soft_cap) and _in_float32(reference.LOG2_E * soft_cap)
    check(fits, op, rule, soft_cap, "Pass 0 for none")
    if soft_cap:
        rule = "scale / soft_cap must be a finite number in float32; only a scale of 0 may give 0"
        fits = _in_float32(2.0 * (reference.LOG2_E * scale) / soft_cap)
        check(fits, op, rule, f"{scale} / {soft_cap}", "Pass a soft_cap nearer to the scores")
    check(args.window >= 0, op, "window must be at least 0", args.window, "Pass 0 for none")
    rule = "a window needs causal=True"
    check(args.causal or not args.window, op, rule, "causal=False", "Pass a mask instead")


def _in_float32(value: float) -> bool:
    """Return whether the float32 nearest to a value is finite, and 0 only for 0."""
    rounded = ctypes.c_float(value).value
    return math.isfinite(rounded) and (rounded != 0) == (value != 0)


def check_lengths(args: AttentionArgs) -> int:
    """Refuse lengths and pages outside the cache, and return the largest length.

    Raises:
        QTensorError: the message names the first that is outside.
    """
    op, lengths = "attention", args.lengths
    if not lengths.numel():
        return 0
    least, most = (int(n) for n in lengths.aminmax())
    capacity = capacity_of(args.k, args.block_table)
    rule = f"lengths must be from 0 to the {capacity} tokens that the cache can hold"
    check(least >= 0 and most <= capacity, op, rule, lengths.tolist(), "Pass those of the cache")
    if args.mask is not None:
        rule = f"the mask must cover the longest sequence, {most} tokens"
        check(args.mask.shape[3] >= most, op, rule, tuple(args.mask.shape), "Pass a longer mask")
    if args.block_table is not None:
        page = args.k.shape[2]
        width = args.block_table.shape[1]
        used = torch.arange(width, device=lengths.device) * page < lengths.unsqueeze(1)
        check_pages(op, args.block_table, used, args.k.shape[0])
    return most


def _gathered(t: Tensor, block_table: Tensor | None, count: int) -> Tensor:
    """Return the first ``count`` tokens of each sequence, (B, H, count, ...)."""
    if block_table is None:
        return t[:, :, :count]
    pages = -(-count // t.shape[2]) if count else 0
    picked = t[block_table[:, :pages].clamp(0, max(t.shape[0] - 1, 0)).long()]
    return picked.transpose(1, 2).flatten(2, 3)[:, :, :count]


def _ranges(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Return the first and the last token that each query sees, (B, M); last < first for none."""
    queries = args.q.shape[2]
    lengths = args.lengths.long().unsqueeze(1)
    if args.positions is not None:
        positions = args.positions.long()
    else:
        positions = lengths - queries + torch.arange(queries, device=lengths.device)
    last = (lengths - 1).expand(-1, queries)
    first = torch.zeros_like(last)
    if args.causal:
        last = torch.minimum(last, positions)
    if args.window:
        first = torch.maximum(first, positions - args.window + 1)
    if args.first is not None:
        first = torch.maximum(first, args.first.long().unsqueeze(1))
    return first, last


def _attention_fill(out: Tensor, args: AttentionArgs) -> None:
    # CPU kernels check lengths and pages themselves; those that are wrong end here.
    if not out.numel() or table.floats_("attention", out.device.type, out, args):
        return
    with denormals_kept():
        write_(out, reference.attention(args.q, *_reference_call(args)))


def _reference_call(
    args: AttentionArgs,
) -> tuple[reference.Rows, reference.Rows, reference.Scoring]:
    """Return keys, values and scoring for the reference, after a check of lengths and pages."""
    count = check_lengths(args)
    first, last = _ranges(args)
    tokens = torch.arange(count, device=args.q.device)
    seen = (tokens >= first.unsqueeze(2)) & (tokens <= last.unsqueeze(2))
    k, v = (_stored(side, args, seen.any(1)) for side in _sides(args))
    return k, v, _scoring(args, seen)


def _stored(side: CacheSide, args: AttentionArgs, used: Tensor) -> reference.Rows:
    """Return the rows of the tokens, which are 0 where no query sees them: they may be NaN."""
    count = used.shape[1]
    codes = _gathered(side.codes, args.block_table, count)
    factors = None
    if side.factors is not None:
        factors = _gathered(side.factors, args.block_table, count)
    stored = reference.decode_stored(codes, factors, side.wide, side.form)
    used = used[:, None, :, None]
    if stored.factors is not None:
        stored = stored._replace(factors=torch.where(used, stored.factors, 0.0))
    return stored._replace(values=torch.where(used, stored.values, 0.0))


def _scoring(args: AttentionArgs, seen: Tensor) -> reference.Scoring:
    seen, added, mask = seen.unsqueeze(1), None, args.mask
    if mask is not None:
        mask = mask[..., : seen.shape[3]]
        if mask.dtype is torch.bool:
            seen = seen & mask
        else:
            added = mask.float()
    sinks = _sinks_of_queries(args.sinks, args.q)
    return reference.Scoring(args.scale, args.soft_cap, seen, added, sinks)


def _sinks_of_queries(sinks: Tensor | None, q: Tensor) -> Tensor | None:
    """Return sinks (Hq,) or (B, Hq, M) as float32 (B, Hq, M)."""
    if sinks is None:
        return None
    sinks = sinks.float()
    return (sinks[:, None] if sinks.ndim == 1 else sinks).expand(q.shape[:3])


ATTENTION = leaf_op("attention", AttentionArgs, "Tensor", _attention_alloc, _attention_fill)
"""Return the attention of ``q`` over a cache, (B, Hq, M, E), in the dtype of ``q``.

The order of sums is that of docs/numerics.md, so a query's result does not depend on the other
queries and sequences of the call, nor on capacity and pages. A query that sees no token gives 0.

Lengths and pages outside the cache are an error. The kernels of CUDA do not wait for the device to
know them: there, the queries of such a sequence, or those that see such a page, give NaN.
"""


def _part_alloc(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    rule = "sinks join the attention over all tokens"
    check(args.sinks is None, "attention_part", rule, "sinks", "Pass them to join_attention")
    shape = args.q.shape[:3]
    values = empty(args.q, (*shape, _checked_size(args)), torch.float32)
    return values, empty(args.q, (*shape, 2), torch.float32)


def _part_fill(outputs: tuple[Tensor, Tensor], args: AttentionArgs) -> None:
    values, sums = outputs
    if not sums.numel() or table.floats_("attention_part", sums.device.type, values, args, sums):
        return
    with denormals_kept():
        part = reference.attention_part(args.q, *_reference_call(args))
        for output, t in zip(outputs, part, strict=True):
            write_(output, t)


ATTENTION_PART = leaf_op(
    "attention_part", AttentionArgs, "(Tensor, Tensor)", _part_alloc, _part_fill
)
"""Return what ``join_attention`` needs of the attention over some of the tokens.

The arguments are those of ``attention`` without sinks. The results are float32: weighted values
(B, Hq, M, E) that are not divided, and (B, Hq, M, 2) for the largest score, times the logarithm of
e to base 2, and the sum of weights; -inf and 0 without any score.
"""


class JoinArgs(NamedTuple):
    """Arguments of the op ``join_attention``.

    Attributes:
        values: float32 (B, Hq, M, E) of the first tokens, as ``attention_part`` returns them.
        sums: float32 (B, Hq, M, 2).
        more_values: those of later tokens.
        more_sums: as ``sums``.
        dtype: of the result.
        sinks: as in ``attention``.
    """

    values: Tensor
    sums: Tensor
    more_values: Tensor
    more_sums: Tensor
    dtype: torch.dtype
    sinks: Tensor | None = None


def _join_alloc(args: JoinArgs) -> Tensor:
    op, values = "join_attention", args.values
    rule = "values must be (B, heads, queries, size)"
    check(values.ndim == 4, op, rule, tuple(values.shape), "Pass results of attention_part")
    wanted = (values.shape, (*values.shape[:3], 2)) * 2
    for name, shape in zip(args._fields[:4], wanted, strict=True):
        t = getattr(args, name)
        check_shape(op, name, t, str(tuple(shape)), t.shape == shape)
        rule = f"{name} must be dense float32"
        fits = t.dtype is torch.float32 and t.layout is torch.strided
        check(fits, op, rule, t.dtype, "Pass results of attention_part", DtypeError)
    rule = "the dtype must be float32, bfloat16 or float16"
    check(args.dtype in INPUT_DTYPES, op, rule, args.dtype, "Pass that of q", DtypeError)
    _check_sinks(op, args.sinks, values)
    return empty(values, values.shape, args.dtype)


def _join_fill(out: Tensor, args: JoinArgs) -> None:
    if not out.numel() or table.floats_("join_attention", out.device.type, out, args):
        return
    with denormals_kept():
        parts = ((args.values, args.sums), (args.more_values, args.more_sums))
        write_(out, reference.join(parts, _sinks_of_queries(args.sinks, out)))


JOIN_ATTENTION = leaf_op("join_attention", JoinArgs, "Tensor", _join_alloc, _join_fill)
"""Return the attention over the tokens of two parts, (B, Hq, M, E); 0 without any score.

docs/numerics.md states how two parts are merged.
"""
