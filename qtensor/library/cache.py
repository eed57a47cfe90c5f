"""A cache of keys and values: checks of its buffers, and the op ``cache_append_``.

A cache holds the rows of keys or values of every token, in the buffers of a row format
(``qtensor/core/row_format.py``): codes, and factors if the format has them. Both are
(B, H, capacity, ...), or with a block table (pages, H, page, ...): token t of sequence b is then
row ``t % page`` of page ``block_table[b, t // page]``. The last dim is contiguous; the others may
have any strides.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.errors import DtypeError, UnsupportedError, check, fail
from qtensor.core.row_format import RowFormat, row_format
from qtensor.kernels import table
from qtensor.library.checks import PassedCalls, check_one
from qtensor.library.define import Written, WrittenOptional, leaf_op
from qtensor.library.quantize import INPUT_DTYPES, QUANTIZE
from qtensor.reference.scaling import quotient

_INDICES = (torch.int64, torch.int32)
_MOST_PAGES = 2**31 - 1
"""The most pages of one sequence; a kernel could not copy a larger table of an expanded tensor."""


class CacheSide(NamedTuple):
    """The buffers of keys or of values.

    Attributes:
        name: "k" or "v", for errors.
        codes: (B, H, capacity, entries), or (pages, H, page, entries).
        factors: (B, H, capacity, factors), or None.
        wide: float32, one value, or None.
        form: the format of the rows.
    """

    name: str
    codes: Tensor
    factors: Tensor | None
    wide: Tensor | None
    form: RowFormat


def check_shape(op: str, name: str, t: Tensor | None, shapes: str, fits: bool) -> None:
    """Refuse a tensor that does not fit; ``shapes`` says which shape it must have.

    Raises:
        QTensorError: the message names the argument.
    """
    if t is not None:
        got = tuple(t.shape)
        check(fits, op, f"{name} must have the shape {shapes}", got, f"Pass such a {name}")


def check_indices(op: str, **tensors: Tensor | None) -> None:
    """Refuse tensors of indices with another dtype than int64 and int32.

    Raises:
        QTensorError: the message names the argument.
    """
    for name, t in tensors.items():
        if t is not None and t.dtype not in _INDICES:
            rule = f"{name} must be int64 or int32"
            fail(op, rule, t.dtype, "Convert it with .to(torch.int64)", DtypeError)


def check_rows(op: str, name: str, x: Tensor) -> None:
    """Refuse vectors that are not (B, heads, tokens, size) of a dtype that is quantized.

    Raises:
        QTensorError: the message names the argument.
    """
    if x.dtype not in INPUT_DTYPES or x.layout is not torch.strided:
        rule = f"{name} must be a dense float32, bfloat16 or float16 tensor"
        got = x.dtype if x.layout is torch.strided else x.layout
        fail(op, rule, got, "Convert it", DtypeError)
    rule = f"{name} must be (B, heads, tokens, head size)"
    check(x.ndim == 4 and x.shape[-1] > 0, op, rule, tuple(x.shape), "Reshape it")


def check_side(op: str, side: CacheSide) -> int:
    """Refuse buffers that do not hold rows of the format, and return the head size.

    Raises:
        QTensorError: dtype, rank or sizes of a buffer; the message names it.
    """
    name, codes, factors, wide, form = side
    label = f"{op}[{form.text}]"
    plain = codes.layout is torch.strided and (codes.ndim != 4 or codes.stride(3) == 1)
    if codes.dtype is not form.dtype or not plain:
        rule = f"{name} must be a dense {form.dtype} tensor with a contiguous last dim"
        got = f"{codes.dtype} {codes.layout}" if codes.layout is not torch.strided else codes.dtype
        fail(label, rule, got, "Pass the buffer of the cache", DtypeError)
    rule = f"{name} must be (B, heads, capacity, entries), or pages of them"
    check(codes.ndim == 4, label, rule, tuple(codes.shape), "Reshape it")
    size = form.size(codes.shape[3])
    rule = f"the head size of {name} must be a positive multiple of {form.block or 1}"
    fits = size > 0 and size % (form.block or 1) == 0 and form.entries(size) == codes.shape[3]
    check(fits, label, rule, f"{codes.shape[3]} entries", "Pad the heads, or take another format")
    if form.factor is None:
        check(factors is None, label, f"{name} has no factors", "a tensor", "Pass None")
    elif factors is None:
        fail(label, f"{name} needs its factors", None, f"Pass {form.factor} factors")
    else:
        want = (*codes.shape[:3], form.factors(size))
        fits = factors.dtype is form.factor and factors.layout is torch.strided
        rule = f"the factors of {name} must be dense {form.factor}"
        check(fits, label, rule, factors.dtype, "Pass the buffer of the cache", DtypeError)
        rule = f"the factors of {name} must have the shape {want}, with a contiguous last dim"
        fits = tuple(factors.shape) == want and (want[3] == 1 or factors.stride(3) == 1)
        check(fits, label, rule, tuple(factors.shape), "Pass the buffer of the cache")
    if form.divisor:
        check(wide is not None, label, f"{name} needs its global value", None, "Pass float32 (1,)")
        check_one(label, f"{name}_global", wide, torch.float32)
    else:
        check(wide is None, label, f"{name} has no global value", "a tensor", "Pass None")
    return size


def check_per_sequence(
    op: str, batch: int, lengths: Tensor | None, block_table: Tensor | None
) -> None:
    """Refuse lengths (B,) or a block table (B, pages) of another shape.

    Raises:
        QTensorError: the message names the argument.
    """
    check_indices(op, lengths=lengths, block_table=block_table)
    check_shape(op, "lengths", lengths, f"({batch},)", lengths is None or lengths.shape == (batch,))
    fits = block_table is None or (block_table.ndim == 2 and block_table.shape[0] == batch)
    check_shape(op, "block_table", block_table, f"({batch}, pages of a sequence)", fits)
    if block_table is not None:
        rule, width = f"block_table must have at most {_MOST_PAGES} columns", block_table.shape[1]
        check(width <= _MOST_PAGES, op, rule, width, "Leave out the pages that are not used")


def capacity_of(codes: Tensor, block_table: Tensor | None) -> int:
    """Return how many tokens a sequence can have."""
    return codes.shape[2] * (1 if block_table is None else block_table.shape[1])


def check_pages(op: str, block_table: Tensor, used: Tensor, pages: int) -> None:
    """Refuse entries of a block table, where ``used`` is true, that name no page.

    Raises:
        QTensorError: an entry is outside 0..pages - 1.
    """
    wrong = used & ((block_table < 0) | (block_table >= pages))
    if bool(wrong.any()):
        rule = f"entries of block_table must name one of the {pages} pages of the cache"
        fail(op, rule, block_table[wrong].tolist()[:8], "Fix the table")


class CacheAppendArgs(NamedTuple):
    """Arguments of the op ``cache_append_``.

    Attributes:
        k: (B, H, N, D), float32, bfloat16 or float16: the new keys.
        v: (B, H, N, E), the new values; None to write keys alone.
        positions: (B, N) int64 or int32: where each token is written. A token with a negative
            position is not written. The positions of a sequence differ.
        k_codes: the codes of the cache, written.
        k_factors: its factors, written; None if the format has none.
        v_codes: those of the values; None with ``v``.
        v_factors: as ``k_factors``.
        k_format: canonical text of a quantizer, or "float32", "bfloat16", "float16".
        v_format: the same for the values; "" without ``v``.
        k_mean: (H, D) or (B, H, D), subtracted from the keys in float32; or None.
        block_table: (B, pages of a sequence) int64 or int32, for pages.
        k_global: float32, one value that stays: the amax of NVFP4, the ``scale_inv`` of FP8.
        v_global: the same for the values.
    """

    k: Tensor
    v: Tensor | None
    positions: Tensor
    k_codes: Written
    k_factors: WrittenOptional
    v_codes: WrittenOptional
    v_factors: WrittenOptional
    k_format: str
    v_format: str
    k_mean: Tensor | None = None
    block_table: Tensor | None = None
    k_global: Tensor | None = None
    v_global: Tensor | None = None


class Append(NamedTuple):
    """New rows, and the buffers that take them."""

    rows: Tensor
    mean: Tensor | None
    side: CacheSide


def _appends(args: CacheAppendArgs) -> list[Append]:
    op = "cache_append_"
    k = CacheSide("k", args.k_codes, args.k_factors, args.k_global, row_format(args.k_format))
    if args.v is None or args.v_codes is None:
        got = [args.v, args.v_codes, args.v_factors, args.v_global]
        rule = "v, v_codes, v_factors and v_global must all be None, and v_format empty, or none"
        fits = all(t is None for t in got) and not args.v_format
        check(fits, op, rule, [t is None for t in got], "Pass all of them for values")
        return [Append(args.k, args.k_mean, k)]
    v = CacheSide("v", args.v_codes, args.v_factors, args.v_global, row_format(args.v_format))
    return [Append(args.k, args.k_mean, k), Append(args.v, None, v)]


_PASSED = PassedCalls()


def _append_check(args: CacheAppendArgs) -> None:
    if torch.is_grad_enabled():
        for name in ("k_codes", "k_factors", "v_codes", "v_factors"):
            buffer = getattr(args, name)
            if buffer is not None and buffer.requires_grad and buffer.is_leaf:
                rule = "a buffer that is written must not require grad"
                fix = "Call it in torch.no_grad(), or detach the buffer"
                fail("cache_append_", rule, name, fix, UnsupportedError)
    signature = _PASSED.signature(args)
    if signature not in _PASSED:
        _check_append(args)
        _PASSED.add(signature)


def _check_append(args: CacheAppendArgs) -> None:
    op, positions = "cache_append_", args.positions
    appends = _appends(args)
    for rows, mean, side in appends:
        check_rows(op, side.name, rows)
        batch, heads, count, size = rows.shape
        for name, buffer in (("codes", side.codes), ("factors", side.factors)):
            if buffer is not None:
                rule = f"the {name} of {side.name} must have memory of their own for each row"
                sizes = zip(buffer.shape, buffer.stride(), strict=True)
                fits = not any(stride == 0 and n > 1 for n, stride in sizes)
                got = f"strides {buffer.stride()} of {tuple(buffer.shape)}"
                check(fits, op, rule, got, "Pass a .contiguous() copy")
        got = f"{size} and {check_side(op, side)}"
        rule = f"{side.name} and its cache must have one head size"
        check(size == side.form.size(side.codes.shape[3]), op, rule, got, "Fix one of them")
        rule = f"{side.name} and its cache must have the same heads"
        got = f"{heads} and {side.codes.shape[1]}"
        check(heads == side.codes.shape[1], op, rule, got, "Fix one of them")
        if args.block_table is None:
            rule = f"{side.name} and its cache must have the same sequences"
            got = f"{batch} and {side.codes.shape[0]}"
            check(batch == side.codes.shape[0], op, rule, got, "Pass a block table")
        first = appends[0]
        rule = "k and v must have the same sequences, heads and tokens, and so must their caches"
        same = rows.shape[:3] == first.rows.shape[:3]
        same = same and side.codes.shape[:3] == first.side.codes.shape[:3]
        check(same, op, rule, tuple(rows.shape), "Fix one of them")
        shapes = ((heads, size), (batch, heads, size))
        fits = mean is None or (mean.is_floating_point() and tuple(mean.shape) in shapes)
        check_shape(op, "k_mean", mean, f"{shapes[0]} or {shapes[1]}, floating", fits)
    batch, count = args.k.shape[0], args.k.shape[2]
    check_indices(op, positions=positions)
    fits = positions.shape == (batch, count)
    check_shape(op, "positions", positions, f"({batch}, {count})", fits)
    check_per_sequence(op, batch, None, args.block_table)


def _check_positions(args: CacheAppendArgs) -> None:
    op, positions = "cache_append_", args.positions
    capacity = capacity_of(args.k_codes, args.block_table)
    if not positions.numel():
        return
    most = int(positions.max())
    rule = f"positions must be below the {capacity} tokens that the cache can hold"
    check(most < capacity, op, rule, most, "Make the cache larger")
    if args.block_table is not None:
        page = args.k_codes.shape[2]
        entries = args.block_table.gather(1, positions.clamp(min=0).long() // page)
        check_pages(op, entries, positions >= 0, args.k_codes.shape[0])


def _append_fill(_: None, args: CacheAppendArgs) -> None:
    positions, block_table = args.positions, args.block_table
    if not args.k.numel():
        return
    rows = []
    for append in _appends(args):
        rows += _encoded(append)
    # CPU kernels check positions and pages themselves; those that are wrong end here.
    if table.floats_("cache_append", args.k.device.type, rows, positions, block_table):
        return
    _check_positions(args)
    lead = args.k.shape[:3]
    sequence, token = (positions >= 0).nonzero(as_tuple=True)
    where = positions[sequence, token].long()
    place = sequence
    if block_table is not None:
        page = args.k_codes.shape[2]
        place, where = block_table[sequence, where // page].long(), where % page
    for source, target in rows:
        new = source[: lead.numel(), : target.shape[3]].unflatten(0, lead)
        target[place, :, where] = new[sequence, :, token]


def _encoded(append: Append) -> list[tuple[Tensor, Tensor]]:
    """Return encoded rows (B * H * N, width or more) and the buffers of the cache that take them.

    The factors come last, if there are any; they may be padded.
    """
    rows, mean, side = append
    if mean is not None:
        mean = mean.float()
        rows = rows.float() - (mean[:, None] if mean.ndim == 2 else mean.unsqueeze(2))
    form, matrix = side.form, rows.reshape(-1, rows.shape[-1])
    if form.element is None:
        return [(matrix.to(form.dtype).contiguous(), side.codes)]
    scale, amax = None, None
    if side.wide is not None:
        wide = side.wide.reshape(1)
        if form.factor is None:
            scale = quotient(1.0, wide)
        else:
            amax = [wide]
    codes, *factors = QUANTIZE(matrix, form.text, scale, amax)
    made = [(codes, side.codes)]
    return made if side.factors is None else [*made, (factors[0], side.factors)]


CACHE_APPEND = leaf_op("cache_append_", CacheAppendArgs, "()", _append_check, _append_fill)
"""Write new rows of keys and values into a cache; other rows are not read or written.

The bytes are those of quantizing the whole sequence with the same global value. Positions and
pages outside the cache are an error; the kernels of CUDA, which do not wait for the device to know
them, do not write such a token.
"""
