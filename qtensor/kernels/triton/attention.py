"""Attention over rows as they are stored, in the order of sums of docs/numerics.md.

A row of queries is a query and a head of those that share a head of keys: query * groups + head. A
tile holds ``ROWS`` consecutive rows of a sequence and a head of keys, and a slab some tiles. Three
kernels compute a slab; what they hand over lies in scratch memory:

- ``weights_kernel``: for a tile and a chunk of tokens the scores, their maximum, the sum of their
  weights, and the weights for each block of the values;
- ``values_kernel``: for a tile and a chunk the weighted sum of the values;
- ``merge_kernel``: the results of a row, merged in order.

No host code waits for the device: a length or a page outside the cache gives NaN.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.core.buffer_shapes import ceil_div
from qtensor.core.row_format import RowFormat, row_format
from qtensor.kernels.triton.attention_rows import (
    RowConstants,
    StoredRows,
    Visible,
    at_least,
    find_rows,
    load_factors,
    load_values,
    load_wide,
    pages_of,
    seen_by_any,
    visible_tokens,
)
from qtensor.kernels.triton.common import launch, raw, split_16, to_float32
from qtensor.kernels.triton.elements import as_bits, as_float
from qtensor.kernels.triton.float_math import exp2, rounded, through

CHUNK = tl.constexpr(256)
"""Consecutive tokens, from a multiple of it, whose scores share a maximum."""
SEGMENT = tl.constexpr(4)
"""Chunks, from a multiple of it, whose results are merged first."""
LOG2_E = tl.constexpr(1.4426950408889634)
MOST_ROWS = 8
"""The largest tile: its sums and a part of its keys fit into the registers of four warps."""
MOST_ELEMENTS = 128
"""Elements of values that a program sums."""
SCRATCH = 1 << 25
"""Entries of scratch memory, float32, that a slab of more than one tile may take."""


class Queries(NamedTuple):
    """The rows of queries and how they lie in tiles.

    Attributes:
        q: pointer to (B, heads * groups, queries, size), int16 for bfloat16.
        batch: stride of the sequences of ``q``, in entries, and so on for its other dims.
        head: see ``batch``.
        query: see ``batch``.
        element: see ``batch``.
        heads: heads of keys.
        groups: heads of queries for each of them.
        queries: of a sequence and a head.
        tiles: of a sequence and a head of keys.
        first_tile: of the slab.
    """

    q: Any
    batch: int
    head: int
    query: int
    element: int
    heads: int
    groups: int
    queries: int
    tiles: int
    first_tile: int


class Scoring(NamedTuple):
    """What turns sums of products into scores.

    Attributes:
        factor: the bits of the float64 that multiplies the sums, besides the factor of the cache.
        cap: multiplies the tangent of a soft cap, or None.
        mask: pointer to a mask of (B, heads, queries, tokens), or None; uint8 if it is boolean.
        batch: stride of the sequences of the mask, in entries, and so on for its other dims.
        head: see ``batch``.
        query: see ``batch``.
        token: see ``batch``.
    """

    factor: int
    cap: float | None
    mask: Any
    batch: int
    head: int
    query: int
    token: int


class Sinks(NamedTuple):
    """The scores without a value: a float32 pointer, or None, and strides in entries."""

    scores: Any
    batch: int
    head: int
    query: int


class Scratch(NamedTuple):
    """Memory of a slab.

    Attributes:
        weights: (tiles, chunks, blocks of the values, CHUNK, ROWS).
        most: (tiles, chunks, ROWS): the largest score.
        sums: (tiles, chunks, ROWS): the sum of weights; -1 without a score above -inf.
        outputs: (tiles, chunks, ROWS, elements): weighted sums of values.
        chunks: of a sequence.
        blocks: of the values of a row, with weights of their own.
        elements: of the values of a row, padded to whole programs.
    """

    weights: Any
    most: Any
    sums: Any
    outputs: Any
    chunks: int
    blocks: int
    elements: int


@triton.jit
def find_queries(queries, tile, r, ROWS: tl.constexpr):
    """Return sequence and head of keys of a tile, and for its rows head, query and existence."""
    tile = queries.first_tile + tile
    line = tile // queries.tiles
    rows = tile % queries.tiles * ROWS + r
    h = line % queries.heads
    head, m = h * queries.groups + rows % queries.groups, rows // queries.groups
    return line // queries.heads, h, head, m, m < queries.queries


@triton.jit
def add_product(part, STEP: tl.constexpr, queries, at, exists, k, columns, e0):
    """Add to sums of rows the products of the element that comes at a step, of 16 elements."""
    form: tl.constexpr = k.form.value
    NIBBLE: tl.constexpr = STEP // 8 * 8 + STEP % 8 // 2 + 4 - STEP % 2 * 4
    INDEX: tl.constexpr = NIBBLE if form.pack == 2 else STEP ^ 1
    e = e0 + INDEX
    # Int64, as all offsets are: the loop counts in int32.
    at = at + tl.full([], 1, tl.int64) * queries.element * e
    q = tl.load(queries.q + at, mask=exists & (e < k.size), other=0)
    one = at_least(to_float32(q), form.least)[:, None]
    return tl.fma(one, tl.reshape(columns[INDEX], (1, CHUNK)), part)


@triton.jit
def products(queries, at, exists, k, outer, h, token, inside, ROWS: tl.constexpr):
    """Return the products of ROWS queries and the keys of a chunk, (ROWS, CHUNK)."""
    form: tl.constexpr = k.form.value
    PIECE: tl.constexpr = form.block if form.block else 32
    total = tl.zeros([ROWS, CHUNK], tl.float32)
    for e0 in range(0, k.size, PIECE):
        part = tl.zeros([ROWS, CHUNK], tl.float32)
        for half in tl.static_range(PIECE // 16):
            columns = split_16(load_values(k, outer, h, token, inside, e0 + half * 16, 16))
            for i in tl.static_range(16):
                part = add_product(part, i, queries, at, exists, k, columns, e0 + half * 16)
        if form.block:
            factors = load_factors(k, outer, h, token, inside, e0 // PIECE)
            total = tl.fma(part, factors[None, :], total)
        else:
            total = total + part
    if k.factors is not None and form.block == 0:
        total = total * load_factors(k, outer, h, token, inside, 0)[None, :]
    return total


@triton.jit
def scaled(total, scoring, k):
    """Return the scores of sums of products, times the logarithm of e to base 2."""
    factor = tl.cast(scoring.factor, tl.int64).to(tl.float64, bitcast=True)
    if k.wide is not None:
        factor = factor * load_wide(k).to(tl.float64)
    total = total * factor.to(tl.float32)
    if scoring.cap is not None:
        # Signs are bits: Triton computes the negative of x as 0 - x.
        minus = as_float(as_bits(total) | -0x80000000)
        z = exp2(tl.where(minus < -96.0, -96.0, minus))
        tangent = tl.div_rn(1.0 - z, 1.0 + z)
        negative = as_float(as_bits(tangent) | -0x80000000)
        total = tl.where(total < 0.0, negative, tangent) * scoring.cap
    return total


@triton.jit
def sum_lanes(weights):
    """Return the sums (ROWS,) of weights (ROWS, CHUNK): token t belongs to lane t % 16."""
    ROWS: tl.constexpr = weights.shape[0]
    by_lane = tl.permute(tl.reshape(weights, (ROWS, CHUNK // 16, 16)), (0, 2, 1))
    groups = split_16(tl.reshape(by_lane, (ROWS * 16, CHUNK // 16)))
    sums = tl.zeros_like(groups[0])
    for i in tl.static_range(16):
        sums = sums + groups[i]
    # Each step adds two numbers, so the order is fixed.
    sums = tl.sum(tl.reshape(sums, (ROWS, 2, 8)), 1)
    sums = tl.sum(tl.reshape(sums, (ROWS, 2, 4)), 1)
    sums = tl.sum(tl.reshape(sums, (ROWS, 2, 2)), 1)
    return tl.sum(sums, 1)


@triton.jit
def weights_kernel(
    queries, k, v, pages, visible, scoring, scratch, ROWS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Write maximum, sum and weights of a tile and a chunk; ``ROUND``: weights to bfloat16."""
    program = tl.program_id(0).to(tl.int64)
    tile, chunk = program // scratch.chunks, program % scratch.chunks
    r = tl.arange(0, ROWS)
    b, h, head, m, exists = find_queries(queries, tile, r, ROWS)
    first, last, legal = visible_tokens(visible, b, m, queries.queries, exists)
    least, largest = seen_by_any(first, last)
    stats = program * ROWS + r
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    wrong = (legal == 0) & (chunk == 0)
    if ((least >= chunk * CHUNK + CHUNK) | (largest < chunk * CHUNK)) & (wrong == 0):
        tl.store(scratch.sums + stats, tl.full([ROWS], -1.0, tl.float32))
        return
    needed = (token >= least) & (token <= largest)
    outer, row, inside = find_rows(pages, b, token, needed)
    at = b * queries.batch + head * queries.head + m * queries.query
    scores = scaled(products(queries, at, exists, k, outer, h, row, inside, ROWS), scoring, k)
    seen = (token[None, :] >= first[:, None]) & (token[None, :] <= last[:, None])
    if scoring.mask is not None:
        at = b * scoring.batch + head * scoring.head + m * scoring.query
        at = at[:, None] + token[None, :] * scoring.token
        mask = tl.load(scoring.mask + at, mask=seen, other=0)
        if mask.dtype == tl.uint8:
            seen = seen & (mask != 0)
        else:
            scores = tl.fma(to_float32(mask), tl.full([1, 1], LOG2_E, tl.float32), scores)
    lost = (needed & (inside == 0))[None, :]
    scores = tl.where(seen, tl.where(lost, float("nan"), scores), float("-inf"))
    scores = tl.where(wrong & (token == 0)[None, :], float("nan"), scores)
    most = tl.max(tl.where(scores != scores, float("-inf"), scores), 1)
    some = tl.max((scores != float("-inf")).to(tl.int32), 1) > 0
    p = exp2(scores - tl.where(some, most, 0.0)[:, None])
    tl.store(scratch.most + stats, most)
    tl.store(scratch.sums + stats, tl.where(some, sum_lanes(p), -1.0))
    place = tl.arange(0, CHUNK)[None, :] * ROWS + r[:, None]
    for block in range(0, scratch.blocks):
        weights = p
        if v.factors is not None:
            factors = load_factors(v, outer, h, row, inside, block)
            # A weight of 0 stays 0 beside a factor that is NaN or inf.
            weights = tl.where(p == 0.0, 0.0, p * factors[None, :])
        weights = tl.where(weights < v.form.value.least, 0.0, weights)
        if ROUND:
            weights = through(weights, "bfloat16")
        first_weight = scratch.weights + (program * scratch.blocks + block) * CHUNK * ROWS
        tl.store(first_weight + place, weights)


@triton.jit
def values_kernel(
    queries, v, pages, visible, scratch, programs, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Write the weighted sums of BLOCKS * SIZE elements of a tile and a chunk.

    ``programs`` is the number of programs for the elements of a row.
    """
    program = tl.program_id(0).to(tl.int64)
    place, e0 = program // programs, program % programs * (BLOCKS * SIZE)
    tile, chunk = place // scratch.chunks, place % scratch.chunks
    r = tl.arange(0, ROWS)
    if tl.max((tl.load(scratch.sums + place * ROWS + r) != -1.0).to(tl.int32), 0) == 0:
        return
    b, h, _, m, exists = find_queries(queries, tile, r, ROWS)
    first, last, _ = visible_tokens(visible, b, m, queries.queries, exists)
    least, largest = seen_by_any(first, last)
    start = chunk * CHUNK
    begin = tl.maximum(least - start, 0) // 16 * 16
    end = tl.minimum(largest - start + 1, CHUNK)
    block = tl.minimum(e0 // SIZE + tl.arange(0, BLOCKS), scratch.blocks - 1)
    weights = scratch.weights + (place * scratch.blocks + block) * CHUNK * ROWS
    total = tl.zeros([ROWS, BLOCKS, SIZE], tl.float32)
    for group in range(begin, end, 16):
        token = start + group + tl.arange(0, 16)
        needed = (token >= least) & (token <= largest)
        outer, row, inside = find_rows(pages, b, token, needed)
        values = load_values(v, outer, h, row, inside, e0, BLOCKS * SIZE)
        columns = split_16(tl.permute(values, (1, 0)))
        for i in tl.static_range(16):
            one = tl.load(weights[None, :] + (group + (i ^ 1)) * ROWS + r[:, None])
            total = tl.fma(one[:, :, None], tl.reshape(columns[i ^ 1], (1, BLOCKS, SIZE)), total)
    at = (place * ROWS + r)[:, None] * scratch.elements + e0 + tl.arange(0, BLOCKS * SIZE)[None, :]
    tl.store(scratch.outputs + at, tl.reshape(total, (ROWS, BLOCKS * SIZE)))


@triton.jit
def merged(most, total, values, some, other_most, other_total, other_values, other_some):
    """Return maximum, sum of weights, weighted sums and "is there a score" of two results."""
    largest = tl.maximum(most, other_most, propagate_nan=tl.PropagateNan.ALL)
    a, b = exp2(most - largest), exp2(other_most - largest)
    both = some & other_some
    sums = tl.fma(total, a, other_total * b)
    weighted = tl.fma(values, a, other_values * b)
    return (
        tl.where(both, largest, tl.where(other_some, other_most, most)),
        tl.where(both, sums, tl.where(other_some, other_total, total)),
        tl.where(both, weighted, tl.where(other_some, other_values, values)),
        some | other_some,
    )


@triton.jit
def merge_kernel(
    out_ptr, queries, v, visible, sinks, scratch, programs, ROWS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write N elements of the result of a row.

    ``programs`` is the number of programs for the elements of a row.
    """
    program = tl.program_id(0).to(tl.int64)
    line, e = program // programs, program % programs * N + tl.arange(0, N)
    tile, r = line // ROWS, line % ROWS + tl.arange(0, 1)
    b, _, head, m, exists = find_queries(queries, tile, r, ROWS)
    first, last, legal = visible_tokens(visible, b, m, queries.queries, exists)
    least, largest = seen_by_any(first, last)
    begin = tl.where(legal, least // CHUNK // SEGMENT * SEGMENT, 0)
    end = tl.where(legal, largest // CHUNK + 1, 1)
    nothing = tl.full([1], float("-inf"), tl.float32)
    zero, none, zeros = tl.zeros([1], tl.float32), r < 0, tl.zeros([N], tl.float32)
    most, total, some, values = nothing, zero, none, zeros
    for segment in range(begin, end, SEGMENT):
        part_most, part_total, part_some, part_values = nothing, zero, none, zeros
        for i in tl.static_range(SEGMENT):
            chunk = segment + i + tl.zeros_like(r)
            at = (tile * scratch.chunks + chunk) * ROWS + r
            one_total = tl.load(scratch.sums + at, mask=chunk < end, other=-1.0)
            one_some = one_total != -1.0
            one_most = tl.load(scratch.most + at, mask=one_some, other=0.0)
            one = scratch.outputs + at * scratch.elements + e
            one_values = tl.load(one, mask=one_some, other=0.0)
            part_most, part_total, part_values, part_some = merged(
                part_most, part_total, part_values, part_some,
                one_most, one_total, one_values, one_some,
            )  # fmt: skip
        most, total, values, some = merged(
            most, total, values, some, part_most, part_total, part_values, part_some
        )
    if sinks.scores is not None:
        at = b * sinks.batch + head * sinks.head + m * sinks.query
        sink = tl.load(sinks.scores + at, mask=exists, other=0.0) * tl.full([1], LOG2_E, tl.float32)
        largest = tl.maximum(most, sink, propagate_nan=tl.PropagateNan.ALL)
        scale = exp2(most - largest)
        values = values * scale
        total = tl.fma(total, scale, exp2(sink - largest))
    result = tl.div_rn(values, total + zeros)
    if v.wide is not None:
        result = result * load_wide(v)
    # Adding +0 makes -0 to +0, whose sign could depend on tokens that are not seen.
    result = rounded(tl.where(some, result + 0.0, 0.0), out_ptr.dtype.element_ty)
    at = ((b * queries.heads * queries.groups + head) * queries.queries + m) * v.size
    tl.store(out_ptr + at + e, result, mask=exists & (e < v.size))


def _bits(value: float) -> int:
    """Return the bits of a float64."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _stored(
    codes: Tensor, factors: Tensor | None, wide: Tensor | None, form: RowFormat
) -> StoredRows:
    factor = {None: "", torch.float32: "float32", torch.uint8: "e8m0"}[form.factor]
    factor = "e4m3" if factor == "e8m0" and form.divisor else factor
    element = form.element
    bits = (element.exponent_bits, element.mantissa_bits) if element else (0, 0)
    least = 2.0**-96 if element else 2.0**-48
    constants = RowConstants(form.group[0], *bits, form.block, factor, form.divisor, least)
    strides = codes.stride()[:3]
    factor_strides = (0, 0, 0) if factors is None else factors.stride()[:3]
    size, kept = form.size(codes.shape[3]), tl.constexpr(constants)
    return StoredRows._make((raw(codes), factors, wide, *strides, *factor_strides, size, kept))


def _mask(mask: Tensor | None, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return pointer and strides of a mask, expanded to (B, heads, queries)."""
    if mask is None:
        return None, 0, 0, 0, 0
    typed = mask.view(torch.uint8) if mask.dtype is torch.bool else raw(mask)
    return typed, *mask.expand(*shape, -1).stride()


def _sinks(sinks: Tensor | None, shape: tuple[int, ...]) -> Sinks:
    if sinks is None:
        return Sinks(None, 0, 0, 0)
    sinks = sinks.float()
    every = sinks[:, None] if sinks.ndim == 1 else sinks
    return Sinks(sinks, *every.expand(shape).stride())


def _visible(args: Any, capacity: int) -> Visible:
    lengths, positions, first = (
        None if t is None else t.contiguous() for t in (args.lengths, args.positions, args.first)
    )
    most = capacity if args.mask is None else min(capacity, args.mask.shape[3])
    causal = tl.constexpr(args.causal)
    return Visible(lengths, positions, first, args.window or None, most, causal)


def _scoring(args: Any) -> Scoring:
    factor = LOG2_E.value * args.scale
    factor = 2.0 * factor / args.soft_cap if args.soft_cap else factor
    cap = LOG2_E.value * args.soft_cap if args.soft_cap else None
    return Scoring(_bits(factor), cap, *_mask(args.mask, args.q.shape[:3]))


def attention_(out: Tensor, args: Any) -> None:
    """Write the attention of a call.

    Args:
        out: (B, heads, queries, E), contiguous.
        args: the arguments of the op ``attention``, whose shapes and dtypes are checked.
    """
    k_form, v_form = row_format(args.k_format), row_format(args.v_format)
    k = _stored(args.k, args.k_factors, args.k_global, k_form)
    v = _stored(args.v, args.v_factors, args.v_global, v_form)
    batch, heads, count, _ = args.q.shape
    pages = pages_of(args.k, args.block_table)
    capacity = args.k.shape[2] * pages.width
    visible = _visible(args, capacity)
    groups = heads // args.k.shape[1]
    rows = min(MOST_ROWS, triton.next_power_of_2(groups * count))
    tiles = ceil_div(groups * count, rows)
    lines = batch * args.k.shape[1] * tiles
    # Elements of a program: whole blocks.
    size = v_form.block or min(MOST_ELEMENTS, max(16, triton.next_power_of_2(v.size)))
    blocks = v.size // v_form.block if v_form.block else 1
    together = min(MOST_ELEMENTS // size, triton.next_power_of_2(blocks))
    programs = ceil_div(v.size, size * together)
    chunks = max(1, ceil_div(capacity, CHUNK.value))
    slab, scratch = _scratch(lines, chunks, rows, (blocks, programs * size * together), out.device)
    scoring, sinks = _scoring(args), _sinks(args.sinks, args.q.shape[:3])
    result = raw(out)
    q = (raw(args.q), *args.q.stride(), args.k.shape[1], groups, count, tiles)
    for first in range(0, lines, slab):
        queries = Queries._make((*q, first))
        now = min(slab, lines - first)
        inputs: tuple[Any, ...] = (queries, k, v, pages, visible, scoring, scratch)
        rounding = args.q.dtype is torch.bfloat16
        launch(weights_kernel, now * chunks, *inputs, ROWS=rows, ROUND=rounding)
        inputs = (queries, v, pages, visible, scratch, programs)
        sizes = {"ROWS": rows, "BLOCKS": together, "SIZE": size}
        launch(values_kernel, now * chunks * programs, *inputs, **sizes)
        inputs = (result, queries, v, visible, sinks, scratch, programs)
        launch(merge_kernel, now * rows * programs, *inputs, ROWS=rows, N=size * together)


def _scratch(
    lines: int, chunks: int, rows: int, sizes: tuple[int, int], device: torch.device
) -> tuple[int, Scratch]:
    """Return the tiles of a slab and its memory; ``sizes`` are blocks and elements of a row."""
    blocks, elements = sizes
    slab = min(lines, max(1, SCRATCH // (chunks * rows * (blocks * CHUNK.value + elements))))
    shapes = (blocks, CHUNK.value, rows), (rows,), (rows,), (rows, elements)
    memory = [torch.empty(slab, chunks, *s, dtype=torch.float32, device=device) for s in shapes]
    weights, most, sums, outputs = memory
    return slab, Scratch(weights, most, sums, outputs, chunks, blocks, elements)
