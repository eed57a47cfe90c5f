"""Define the ops of layers that decode a part of their weight: convolutions and embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape, ceil_div, rows_cols
from qtensor.core.errors import DtypeError, IndexRangeError, check
from qtensor.core.operand import ROW_STEP, Operand, decodes_in_rows, row_parts, select_rows
from qtensor.core.quantizer_registry import parse, usage_part
from qtensor.kernels import table
from qtensor.kernels.cpu.native import WHOLE, Part
from qtensor.library.checks import check_operand
from qtensor.library.define import FILLS, SymInt, empty, leaf_op
from qtensor.library.dequantize import DequantizeArgs, check_dtype

TILE = 1 << 20
"""Values of a weight that a convolution decodes at a time, about: 4 MiB in float32."""

# ---- convolution


class ConvolutionArgs(NamedTuple):
    """Arguments of the op ``convolution``: those of ``torch.convolution``, with buffers.

    The weight is an ``Operand`` of any shape whose first dim is that of ``size``; ``size`` is
    (N, C / groups, *kernel), or (C, N / groups, *kernel) if ``transposed``.
    """

    x: Tensor
    weight: Operand
    size: Shape
    bias: Tensor | None
    stride: Shape
    padding: Shape
    dilation: Shape
    transposed: bool
    output_padding: Shape
    groups: SymInt


def _convolution_alloc(args: ConvolutionArgs) -> Tensor:
    """Return the output, in the memory format of the input."""
    x, size, groups = args.x, args.size, args.groups
    rank = len(size) - 2
    rule = "the input is (batch, channels, *size), with the channels and dims of the weight"
    got = f"{tuple(x.shape)} for a weight {tuple(size)} in {groups} groups"
    fits = rank > 0 and x.ndim == len(size) and groups > 0 and size[0] % groups == 0
    fits = fits and x.shape[1] == (size[0] if args.transposed else size[1] * groups)
    check(fits, "convolution", rule, got, "Fix the shapes")
    check_dtype(x.dtype, args.weight.canonical)
    stride, dilation = (
        _each("stride", args.stride, rank, 1),
        _each("dilation", args.dilation, rank, 1),
    )
    padding, extra = (
        _each("padding", args.padding, rank),
        _each("output_padding", args.output_padding, rank),
    )
    sizes = []
    for i, n in enumerate(x.shape[2:]):
        span = dilation[i] * (size[2 + i] - 1) + 1
        if args.transposed:
            sizes.append((n - 1) * stride[i] - 2 * padding[i] + span + extra[i])
        else:
            sizes.append((n + 2 * padding[i] - span) // stride[i] + 1)
    channels = size[1] * groups if args.transposed else size[0]
    rule, fix = "the bias has a value for each output channel", "Fix its shape"
    bias = (channels,) if args.bias is None else tuple(args.bias.shape)
    check(bias == (channels,), "convolution", rule, f"{bias} for {channels}", fix)
    out = empty(x, (x.shape[0], channels, *sizes))
    last = {2: torch.channels_last, 3: torch.channels_last_3d}.get(rank)
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return out
    return torch.empty_like(out, memory_format=last)


def _each(name: str, values: Shape, rank: int, least: int = 0) -> list[int]:
    """Return a value for each of ``rank`` dims; torch takes one for all of them."""
    given = list(values)
    fits = len(given) in (1, rank) and all(n >= least for n in given)
    rule = f"{name} holds {rank} integers from {least} on, or one"
    check(fits, "convolution", rule, given, "Fix the argument")
    return given * rank if len(given) == 1 else given


def _convolution_fill(out: Tensor, args: ConvolutionArgs) -> None:
    """Convolve with the decoded output channels, ``TILE`` values of the weight at a time."""
    x, weight, size, bias = args.x, args.weight, args.size, args.bias
    check_operand("convolution", weight)
    values = math.prod(size)
    rule = "the buffers are those of a tensor with the rows and values of the weight"
    got = f"{tuple(weight.shape)} for {tuple(size)}"
    fits = tuple(weight.shape[:1]) == tuple(size[:1]) and math.prod(weight.shape) == values
    check(fits and len(weight.shape) > 1, "convolution", rule, got, "Pass its own shape")
    steps = args.stride, args.padding, args.dilation, args.transposed, args.output_padding
    rows = rows_cols(weight.shape)[0]
    # The output channels of a transposed convolution are not rows of the weight.
    is_cut = not args.transposed and decodes_in_rows(parse(weight.canonical))
    if not is_cut or values <= TILE:
        whole = _decoded(weight, (0, rows), x.dtype).view(tuple(size))
        out.copy_(torch.convolution(x, whole, bias, *steps, args.groups))
        return
    each, inputs = rows // size[0], x.shape[1] // args.groups
    for first, count, group, groups in _spans(size[0], args.groups, values):
        tile = _decoded(weight, (first * each, (first + count) * each), x.dtype)
        channels = x.narrow(1, group * inputs, groups * inputs)
        own = None if bias is None else bias[first : first + count]
        part = torch.convolution(channels, tile.view(count, *size[1:]), own, *steps, groups)
        out.narrow(1, first, count).copy_(part)


def _spans(channels: int, groups: int, values: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield tiles of output channels: the first, their number, the first group, the groups.

    A tile holds whole groups, or channels of one of them.
    """
    step = max(TILE * channels // values // ROW_STEP, 1) * ROW_STEP
    size = channels // groups
    if groups > 1 and ROW_STEP % size == 0:
        for first in range(0, channels, step):
            count = min(step, channels - first)
            yield first, count, first // size, count // size
        return
    for group in range(groups):
        end = (group + 1) * size
        for first in range(group * size, end, step):
            yield first, min(step, end - first), group, 1


def _decoded(weight: Operand, bounds: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return some rows (count, K) of the (M, K) view of a weight, decoded.

    ``bounds`` are the first row and the end; all rows, if rows of the format cannot be cut out.
    """
    quantizer, (rows, cols) = parse(weight.canonical), rows_cols(weight.shape)
    first, end = bounds
    out = torch.empty((end - first, cols), dtype=dtype, device=weight.buffers[0].device)
    part = WHOLE if bounds == (0, rows) else Part(first, end - first)
    if table.dequantize_(quantizer, weight.buffers, weight.shape, out, part):
        return out
    # Rows of any format begin at these multiples.
    start, stop = first // ROW_STEP * ROW_STEP, min(rows, ceil_div(end, ROW_STEP) * ROW_STEP)
    buffers, shape = weight.buffers, tuple(weight.shape)
    if (start, stop) != (0, rows):
        buffers = row_parts(quantizer, buffers, shape, (start, stop))
        shape = (stop - start, cols)
    values = torch.empty(shape, dtype=dtype, device=out.device)
    FILLS["dequantize"](values, DequantizeArgs(buffers, weight.canonical, shape, dtype))
    return values.view(-1, cols)[first - start : end - start]


CONVOLUTION = leaf_op(
    "convolution", ConvolutionArgs, "Tensor", _convolution_alloc, _convolution_fill
)
"""Convolve plain x with a quantized weight, of which at most a tile is decoded at a time.

Each tile of output channels has the values of ``torch.convolution`` with the decoded channels.
"""

# ---- embedding


class UsedRowsArgs(NamedTuple):
    """Arguments of the op ``used_rows``.

    Attributes:
        weight: the table (V, D).
        indices: integers in [0, V), of any shape.
        padding: an index whose row is not needed, or -1.
        dtype: of the values.
    """

    weight: Operand
    indices: Tensor
    padding: SymInt
    dtype: torch.dtype


def _used_rows_alloc(args: UsedRowsArgs) -> tuple[Tensor, Tensor, Tensor]:
    (buffers, _, shape), index = args.weight, args.indices
    rule = "the table is a matrix with buffers"
    fits = len(shape) == 2 and bool(buffers)
    check(fits, "used_rows", rule, tuple(shape), "Pass its buffers and its shape")
    integers, rule = index.dtype in (torch.int32, torch.int64), "an index holds int32 or int64"
    check(integers, "used_rows", rule, index.dtype, "Convert it", DtypeError)
    check_dtype(args.dtype, args.weight.canonical)
    count = index.numel() + 1
    rows = empty(buffers[0], (count, shape[1]), args.dtype)
    return rows, empty(index), empty(index, (count,))


def _used_rows_fill(outputs: tuple[Tensor, Tensor, Tensor], args: UsedRowsArgs) -> None:
    (rows, places, numbers), weight, index = outputs, args.weight, args.indices
    check_operand("used_rows", weight)
    used, inverse = torch.unique(index, return_inverse=True)
    size, count = weight.shape[0], len(used)
    if count:
        rule = f"an index must be from 0 to {size - 1}, since the table has {size} rows"
        wrong = int(used[0] if used[0] < 0 else used[-1])
        fix = "Pass an index of the table"
        check(0 <= wrong < size, "used_rows", rule, wrong, fix, IndexRangeError)
    places.copy_(torch.where(index == args.padding, 0, inverse + 1))
    for output, values in ((rows, _rows_of(weight, used, args.dtype)), (numbers, used)):
        output[0].zero_()
        output[1 : 1 + count] = values
        output[1 + count :].zero_()


def _rows_of(weight: Operand, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return decoded rows (count, D) of a table; all are decoded if rows share bytes."""
    quantizer, shape = parse(weight.canonical), (len(index), weight.shape[1])
    chosen, rowwise = usage_part(weight.canonical, "rowwise")
    slots = [quantizer.slots[i] for i in chosen]
    buffers = [weight.buffers[i] for i in chosen]
    part = select_rows(slots, buffers, weight.shape, index) if rowwise else None
    if part is None:
        return _decoded(weight, (0, weight.shape[0]), dtype)[index]
    values = torch.empty(shape, dtype=dtype, device=index.device)
    FILLS["dequantize"](values, DequantizeArgs(part, rowwise, shape, dtype))
    return values


USED_ROWS = leaf_op(
    "used_rows", UsedRowsArgs, "(Tensor, Tensor, Tensor)", _used_rows_alloc, _used_rows_fill
)
"""Decode the rows of a quantized table that an index names, each once.

Returns:
    Rows (n + 1, D), where n is the number of indices: a row of zeros, the rows that are needed in
    the order of their numbers, and zeros. The place among them of each index, of its shape, 0 for
    ``padding``. And the number in the table of each row (n + 1,), 0 for those of zeros.
"""
