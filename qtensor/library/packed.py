"""The two directions of a small linear layer as ops of few arguments and results, for compiled programs.

A program checks, keeps and hands on every tensor that lies between its forward and its backward, and converts every argument of
an op. Here what is kept of both operands lies in one buffer, and what else is to be known in one text. The bytes are those of
``linear_forward`` and ``linear_backward``.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.layout import Shape, buffer_shapes, contiguous_strides, round_up
from qtensor.library import small
from qtensor.library.checks import check_seed
from qtensor.library.codec import parse
from qtensor.library.define import FILLS, Shortcuts, below_autograd, leaf_op
from qtensor.library.linear import LinearBackwardArgs, LinearForwardArgs, alloc_amax, places
from qtensor.library.quantize import check_input

_ALIGNED = 16


class Piece(NamedTuple):
    """A buffer within the one that is kept: size, strides, dtype, bytes in front of it, and whether it is padded."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    padded: bool


def _pieces(x_kept: str, x_shape: Shape, w_kept: str, w_shape: Shape) -> tuple[list[Piece], int]:
    """The pieces of both operands (those of the input first), and the bytes that they take.

    The weight's come first in memory: their sizes are known where those of the input are symbols.
    """
    end, found = 0, []
    for text, shape in ((w_kept, w_shape), (x_kept, x_shape)):
        slots = parse(text).slots if text else ()
        part = []
        for slot, size in zip(slots, buffer_shapes(slots, shape), strict=True):
            stride = contiguous_strides(size)
            part.append(Piece(tuple(size), stride, slot.dtype, end, slot.padded))
            end = end + round_up(math.prod(size) * slot.dtype.itemsize, _ALIGNED)
        found.append(part)
    return [*found[1], *found[0]], end


@functools.lru_cache(maxsize=4096)
def _known_pieces(
    x_kept: str, x_shape: torch.Size, w_kept: str, w_shape: torch.Size
) -> tuple[list[Piece], int]:
    return _pieces(x_kept, x_shape, w_kept, w_shape)


def _views(saved: Tensor, pieces: list[Piece]) -> list[Tensor]:
    """The buffers within the one that is kept, wherever that lies in its storage."""
    if saved.is_cpu and saved.data_ptr() % _ALIGNED:
        # Numbers of four bytes are read from places that are multiples of four.
        saved = saved.clone()
    ends = [p.offset + math.prod(p.size) * p.dtype.itemsize for p in pieces]
    return [
        saved[p.offset : end].view(p.dtype).view(p.size)
        for p, end in zip(pieces, ends, strict=True)
    ]


def _gaps(pieces: list[Piece], count: int) -> list[tuple[int, int]]:
    """What lies between the buffers: from where to where."""
    found, end = [], 0
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if piece.offset > end:
            found.append((end, piece.offset))
        end = piece.offset + math.prod(piece.size) * piece.dtype.itemsize
    return [*found, (end, count)] if end < count else found


class Forward(NamedTuple):
    """What the text of ``linear_forward_packed`` says: see ``linear_forward``."""

    x_quantizer: str
    x_kept: str
    weight_quantizer: str
    weight_kept: str


class Backward(NamedTuple):
    """What the text of ``linear_backward_packed`` says: see ``linear_backward``; "" where nothing is kept."""

    quantizer: str
    x_kept: str
    weight_kept: str
    weight_dtype: str
    bias: str


def forward_text(x_quantizer: str, x_kept: str, weight_quantizer: str, weight_kept: str) -> str:
    """The plan of ``linear_forward_packed``: see ``Forward``."""
    return "|".join(Forward(x_quantizer, x_kept, weight_quantizer, weight_kept))


def backward_text(
    quantizer: str, x_kept: str, weight_kept: str, weight_dtype: torch.dtype, bias: bool
) -> str:
    """The plan of ``linear_backward_packed``: see ``Backward``."""
    dtype = str(weight_dtype).removeprefix("torch.")
    return "|".join(Backward(quantizer, x_kept, weight_kept, dtype, "bias" if bias else ""))


class LinearForwardPackedArgs(NamedTuple):
    """Arguments of the op ``linear_forward_packed``."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    plan: str
    scales: Tensor | None = None
    x_seed: Tensor | None = None
    weight_seed: Tensor | None = None


def _forward_alloc(args: LinearForwardPackedArgs) -> list[Tensor]:
    p = Forward(*args.plan.split("|"))
    for text, kept, seed in (
        (p.x_quantizer, p.x_kept, args.x_seed),
        (p.weight_quantizer, p.weight_kept, args.weight_seed),
    ):
        check_seed("linear_forward_packed", parse(text), seed)
        places(text, kept)
    for t, text in ((args.x, p.x_quantizer), (args.weight, p.weight_quantizer)):
        check_input(t, parse(text).format)
    size = (args.x.shape[0], args.weight.shape[0])
    out = torch.empty_strided(size, (size[1], 1), dtype=args.x.dtype, device=args.x.device)
    pieces, count = _pieces(p.x_kept, args.x.shape, p.weight_kept, args.weight.shape)
    make = torch.zeros if any(piece.padded for piece in pieces) else torch.empty
    amaxes = alloc_amax(args.x, p.x_quantizer) + alloc_amax(args.weight, p.weight_quantizer)
    return [out, make(count, dtype=torch.uint8, device=args.x.device), *amaxes]


def _forward_fill(outputs: list[Tensor], args: LinearForwardPackedArgs) -> None:
    p = Forward(*args.plan.split("|"))
    with below_autograd():
        pieces, count = _known_pieces(p.x_kept, args.x.shape, p.weight_kept, args.weight.shape)
        for start, end in _gaps(pieces, count):
            # Equal calls give equal bytes.
            outputs[1][start:end].zero_()
        whole = [outputs[0], *_views(outputs[1], pieces), *outputs[2:]]
        sides = (args.x, p.x_quantizer, p.x_kept, args.weight, p.weight_quantizer, p.weight_kept)
        FILLS["linear_forward"](
            whole,
            LinearForwardArgs(
                *sides, args.bias, args.x.dtype, args.scales, args.x_seed, args.weight_seed
            ),
        )


def _forward_learn(outputs: list[Tensor], args: LinearForwardPackedArgs) -> None:
    p = Forward(*args.plan.split("|"))
    pieces, count = _known_pieces(p.x_kept, args.x.shape, p.weight_kept, args.weight.shape)
    operands = (args.x, p.x_quantizer, p.x_kept, args.weight, p.weight_quantizer, p.weight_kept)
    kept = [(-2, piece.offset) for piece in pieces]
    amaxes = [(-1 - i, 0) for i in range(2, len(outputs))]
    places = [*small.FORWARD_PLACES, (-1, 0), *kept, *amaxes]
    cleared = any(piece.padded for piece in pieces) or bool(_gaps(pieces, count))
    small.learn_forward(
        outputs,
        operands,
        args.bias,
        args.scales,
        (args.x_seed, args.weight_seed),
        ("linear_forward_packed", places, (False, cleared)),
    )


LINEAR_FORWARD_PACKED = leaf_op(
    "linear_forward_packed(Tensor x, Tensor weight, Tensor? bias, str plan, "
    "Tensor? scales=None, Tensor? x_seed=None, Tensor? weight_seed=None) -> Tensor[]",
    LinearForwardPackedArgs,
    _forward_alloc,
    _forward_fill,
    shortcuts=Shortcuts(learn=_forward_learn),
)
"""``linear_forward`` in the dtype of ``x`` under a plan (``Forward``, joined by "|"): [the product, what is kept, the amaxes of delayed
scaling]."""


def _backward_saved(
    dy: Tensor, saved: Tensor, columns: int, plan: str
) -> tuple[Backward, list[Tensor], list[Tensor]]:
    """The plan, and the buffers of input and weight."""
    p = Backward(*plan.split("|"))
    x_shape, w_shape = torch.Size((dy.shape[0], columns)), torch.Size((dy.shape[1], columns))
    pieces, _ = _known_pieces(p.x_kept, x_shape, p.weight_kept, w_shape)
    views = _views(saved.contiguous(), pieces)
    count = len(parse(p.x_kept).slots) if p.x_kept else 0
    return p, views[:count], views[count:]


class LinearBackwardPackedArgs(NamedTuple):
    """Arguments of the op ``linear_backward_packed``."""

    dy: Tensor
    saved: Tensor
    columns: int
    plan: str
    scales: Tensor | None = None
    seed: Tensor | None = None


def _backward_alloc(args: LinearBackwardPackedArgs) -> list[Tensor]:
    p = Backward(*args.plan.split("|"))
    check_input(args.dy, parse(p.quantizer).format)
    check_seed("linear_backward_packed", parse(p.quantizer), args.seed)
    rows, width = args.dy.shape
    sizes: list[tuple[tuple[int, ...], torch.dtype]] = []
    if p.weight_kept:
        sizes.append(((rows, args.columns), args.dy.dtype))
    if p.x_kept:
        sizes.append(((width, args.columns), getattr(torch, p.weight_dtype)))
    if p.bias:
        sizes.append(((width,), args.dy.dtype))
    found = [
        torch.empty_strided(size, contiguous_strides(size), dtype=dtype, device=args.dy.device)
        for size, dtype in sizes
    ]
    return [*found, *alloc_amax(args.dy, p.quantizer)]


def _backward_fill(outputs: list[Tensor], args: LinearBackwardPackedArgs) -> None:
    with below_autograd():
        p, x, weight = _backward_saved(args.dy, args.saved, args.columns, args.plan)
        sides = (x, p.x_kept, (args.dy.shape[0], args.columns), weight, p.weight_kept)
        dtypes = (args.dy.dtype, getattr(torch, p.weight_dtype))
        rest: tuple[Any, ...] = (
            (args.dy.shape[1], args.columns),
            *dtypes,
            bool(p.bias),
            args.scales,
            args.seed,
        )
        FILLS["linear_backward"](outputs, LinearBackwardArgs(args.dy, p.quantizer, *sides, *rest))


def _backward_learn(outputs: list[Tensor], args: LinearBackwardPackedArgs) -> None:
    saved = args.saved
    if saved.is_cpu and (saved.data_ptr() % _ALIGNED or not saved.is_contiguous()):
        return
    p, x, weight = _backward_saved(args.dy, args.saved, args.columns, args.plan)
    sides = (
        (x, p.x_kept, (args.dy.shape[0], args.columns)),
        (weight, p.weight_kept, (args.dy.shape[1], args.columns)),
    )
    start = saved.data_ptr()
    places = [(0, 0), (2, 8), (3, 0)]
    places += [(1, t.data_ptr() - start) for t in (*weight, *x)]
    places += [(-1 - i, 0) for i in range(len(outputs))]
    taken = ("linear_backward_packed", places)
    small.learn_backward(
        outputs, args.dy, p.quantizer, sides, (bool(p.bias), args.scales, args.seed), taken
    )


LINEAR_BACKWARD_PACKED = leaf_op(
    "linear_backward_packed(Tensor dy, Tensor saved, SymInt columns, str plan, "
    "Tensor? scales=None, Tensor? seed=None) -> Tensor[]",
    LinearBackwardPackedArgs,
    _backward_alloc,
    _backward_fill,
    shortcuts=Shortcuts(learn=_backward_learn),
)
"""``linear_backward`` from what ``linear_forward_packed`` kept of operands with that many columns, under a plan (``Backward``,
joined by "|"); the gradient of the input is in the dtype of ``dy``."""
