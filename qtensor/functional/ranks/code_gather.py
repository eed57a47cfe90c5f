"""Gather an input that is split over ranks as codes and factors, not as values.

Each rank quantizes its own rows, and one collective moves their codes and factors as bytes. Every
buffer that comes out has the bytes that quantizing the gathered values gives:

- Factors of the whole tensor come from maxima that one collective reduces first.
- Delayed scaling knows its factor before the call. The factor and the maximum of each rank travel
  with the codes: the factors must be equal, and the largest maximum is that of the whole.
- Per-tensor and per-row FP8 send rowwise codes alone; the columnwise codes are the same bytes.

Values are gathered where codes would differ (stochastic rounding, a block that continues on the
next rank), where factors lie in tiles across the rows of ranks (``swizzled``), and where codes take
as many bytes as the values do: 1-D blocks in both directions take 16.5 bits in MXFP8.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import is_empty, round_up, rows_cols
from qtensor.core.compile_constants import compile_constant
from qtensor.core.operand import Operand
from qtensor.core.quantizer_registry import parse
from qtensor.functional.operands import Quantized
from qtensor.functional.ranks.parallel import Parallel, all_gather, gather
from qtensor.library.quantize import QUANTIZE, maxima_of
from qtensor.library.same_rows import SAME_ROWS
from qtensor.quantizers.dtensor_parts import block_sizes
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.storage.maxima import is_shared_by_rows, max_over_ranks


class Sent(NamedTuple):
    """A buffer that travels.

    Attributes:
        place: its place among the buffers of this rank.
        dim: the dim of the buffer that runs along the rows, -1 if it has none.
        per: rows that share a group of entries along ``dim``.
        units: entries of a group.
        pad: multiple to which the entries of the whole tensor are padded with zeros.
    """

    place: int
    dim: int
    per: int
    units: int
    pad: int


class GatherPlan(NamedTuple):
    """How a quantizer's buffers are gathered.

    Attributes:
        canonical: quantizer of this rank's rows.
        sent: the buffers that travel, wide elements first.
        transposed: places, among the buffers of the whole tensor, of those that hold the first
            buffer of this rank transposed; they do not travel.
        maxima: which of the maxima are reduced over ranks.
        rows: number of rows that must stay together.
        returns_amax: whether the quantizer returns an amax, as delayed scaling does.
    """

    canonical: str
    sent: tuple[Sent, ...]
    transposed: tuple[int, ...]
    maxima: tuple[bool, ...]
    rows: int
    returns_amax: bool


@compile_constant
def gather_plan(canonical: str, dtype: torch.dtype) -> GatherPlan | None:
    """Return how a tensor of ``dtype`` is gathered as codes, or None to gather its values."""
    whole = parse(canonical)
    own = whole
    if whole.rowwise and whole.columnwise and whole.spec.transpose_shares_bytes:
        own = whole.with_usage(columnwise=False)
    if whole.stochastic_rounding or any([slot.swizzled for slot in own.slots]):
        return None
    sent, bits = [], 0.0
    for place, slot in enumerate(own.slots):
        for i, dim in enumerate(slot.dims):
            if dim.axis in ("m", "lead"):
                sent.append(Sent(place, i, dim.per, dim.units, dim.pad))
                counted = [d for d in slot.dims if d.axis != "one"]
                density = math.prod([d.units / d.per for d in counted])
                # A factor of a whole row counts as nothing beside the row.
                bits += 8 * slot.dtype.itemsize * density if len(counted) > 1 else 0
        if whole.returns_amax and all([dim.axis == "one" for dim in slot.dims]):
            sent.append(Sent(place, -1, 1, 1, 1))
    if bits >= 8 * dtype.itemsize:
        return None
    sent.sort(key=lambda s: (s.dim >= 0, -own.slots[s.place].dtype.itemsize))
    names = [slot.name for slot in own.slots]
    return GatherPlan(
        own.canonical,
        tuple(sent),
        tuple([i for i, slot in enumerate(whole.slots) if slot.name not in names]),
        () if whole.needs_scale else is_shared_by_rows(own.canonical),
        block_sizes(own.canonical)[0],
        whole.returns_amax,
    )


def gather_rows(x: Tensor, canonical: str, scale: Tensor | None, p: Parallel) -> Tensor | Quantized:
    """Return the rows of all ranks: quantized as one tensor, or their values.

    Args:
        x: (..., S, ..., K), this rank's part along ``p.dim``; S is equal on all ranks.
        canonical: canonical text of the quantizer, "" for none.
        scale: (1,) float32, the factor of delayed scaling, else None.
        p: the layer's split.

    Raises:
        QTensorError: when the collective runs, if ranks have different factors of delayed scaling.
    """
    if not canonical or isinstance(x, QuantizedTensorStorage):
        return gather(x, p)
    plan = gather_plan(canonical, x.dtype)
    rows, columns = rows_cols(x.shape[p.dim :])
    if plan is None or is_empty(x.shape) or rows % plan.rows:
        return gather(x, p)
    groups = rows_cols((*x.shape[: p.dim], 1))[0]
    buffers = _quantized_part(x.reshape(groups * rows, columns), plan, p, scale)
    joined, amax = _exchange(buffers, plan, p, groups, rows)
    for place in plan.transposed:
        joined = [*joined[:place], joined[0].t().contiguous(), *joined[place:]]
    shape = (*x.shape[: p.dim], x.shape[p.dim] * p.size, *x.shape[p.dim + 1 :])
    return Quantized(Operand(joined, canonical, rows_cols(shape)), shape, x.dtype, amax)


def _quantized_part(
    matrix: Tensor, plan: GatherPlan, p: Parallel, scale: Tensor | None
) -> list[Tensor]:
    """Return the buffers of this rank's rows (M, K), then the amax (1,) of delayed scaling."""
    maxima = None
    if any(plan.maxima):
        own = list(zip(maxima_of(matrix, plan.canonical), plan.maxima, strict=True))
        shared = iter(
            max_over_ranks([a for a, is_shared in own if is_shared], p.group, "linear input")
        )
        maxima = [next(shared) if is_shared else a for a, is_shared in own]
    return QUANTIZE(matrix, plan.canonical, scale, maxima, None)


def _exchange(
    buffers: list[Tensor], plan: GatherPlan, p: Parallel, groups: int, rows: int
) -> tuple[list[Tensor], Tensor | None]:
    """Return the buffers of the rows of all ranks, and the amax (1,) of delayed scaling.

    Args:
        buffers: of this rank's rows, then the amax (1,) of delayed scaling.
        plan: of the quantizer.
        p: the layer's split.
        groups: number of this rank's groups of rows; those of the other ranks follow each of them.
        rows: number of rows of a group.
    """
    pieces = [buffers[-1]] if plan.returns_amax else []
    for s in plan.sent:
        piece = buffers[s.place]
        if s.pad > 1:
            # The padding ends this rank's rows, but not those of the whole tensor.
            piece = piece.narrow(s.dim, 0, groups * rows // s.per * s.units)
        pieces.append(piece)
    flat = [piece.contiguous().view(-1).view(torch.uint8) for piece in pieces]
    received = all_gather(torch.cat(flat) if len(flat) > 1 else flat[0], p).view(p.size, -1)
    parts, start = [], 0
    for piece, own in zip(pieces, flat, strict=True):
        part = received.narrow(1, start, own.shape[0]).contiguous()
        parts.append(part.view(piece.dtype))
        start = start + own.shape[0]
    amax, joined = None, {}
    if plan.returns_amax:
        amax, parts, pieces = parts[0].amax(0), parts[1:], pieces[1:]
    for s, piece, part in zip(plan.sent, pieces, parts, strict=True):
        if s.dim < 0:
            joined[s.place] = SAME_ROWS(part.view(torch.uint8), _OTHER_FACTOR).view(piece.dtype)
        else:
            joined[s.place] = _join(part.view(p.size, *piece.shape), s, groups)
    count = len(buffers) - plan.returns_amax
    return [joined.get(i, buffers[i]) for i in range(count)], amax


def _join(parts: Tensor, s: Sent, groups: int) -> Tensor:
    """Return the buffer of the whole tensor from those of all ranks, (ranks, ...)."""
    # (ranks, ..., groups, entries, ...) -> (..., groups, ranks, entries, ...)
    entries = parts.shape[s.dim + 1] // groups
    apart = parts.unflatten(s.dim + 1, (groups, entries)).movedim(0, s.dim + 1)
    whole = apart.flatten(s.dim, s.dim + 2)
    if s.pad == 1:
        return whole.contiguous()
    sizes = list(whole.shape)
    sizes[s.dim] = round_up(whole.shape[s.dim], s.pad)
    padded = whole.new_zeros(sizes)
    padded.narrow(s.dim, 0, whole.shape[s.dim]).copy_(whole)
    return padded


_OTHER_FACTOR = (
    "linear input[fp8_delayed]: ranks that gather an input must have one factor of delayed scaling "
    "for it; got another one on another rank. Load one state of delayed scaling on all ranks of "
    "the group, and call the layer equally often on each of them."
)
