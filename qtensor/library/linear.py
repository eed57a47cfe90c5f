"""The ops of a linear layer as a whole: its forward and its backward, each in one call.

They compute what ``quantize``, ``gemm`` and ``bias_grad`` compute one after the other, with the same bytes, and return what is
kept of the operands beside the products. A layer that splits over ranks, keeps a workspace or puts a gradient off calls the
single ops.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.errors import fail
from qtensor.layout import Shape
from qtensor.library import small
from qtensor.library.checks import check_seed
from qtensor.library.codec import alloc_outputs, alloc_slots, parse
from qtensor.library.define import FILLS, Shortcuts, below_autograd, leaf_op
from qtensor.library.gemm import GEMM, GemmArgs
from qtensor.library.norm import BiasGradArgs
from qtensor.library.quantize import QUANTIZE, QuantizeArgs, check_input


@functools.lru_cache(maxsize=4096)
def part(canonical: str, usage: str) -> tuple[tuple[int, ...], str]:
    """(places of the buffers of a usage, canonical text of what they are alone); ((), "") where there are none."""
    codec = parse(canonical)
    if not getattr(codec, usage):
        return (), ""
    twin = codec.with_usage(rowwise=usage == "rowwise", columnwise=usage == "columnwise")
    return places(canonical, twin.canonical), twin.canonical


@functools.lru_cache(maxsize=4096)
def places(canonical: str, kept: str) -> tuple[int, ...]:
    """Where the buffers of ``kept`` lie among those of ``canonical``; () where nothing is kept."""
    if not kept:
        return ()
    slots = parse(canonical).slots
    if not set(parse(kept).slots) <= set(slots):
        rule = "only buffers of the quantizer can be kept"
        fail("linear_forward", rule, f"{kept} of {canonical}", "Name one of its usages")
    return tuple(slots.index(slot) for slot in parse(kept).slots)


def usable(canonical: str, usage: str) -> tuple[tuple[int, ...], str]:
    """``part``, or the whole where that usage has no buffers of its own."""
    found = part(canonical, usage)
    return found if found[0] else (tuple(range(len(parse(canonical).slots))), canonical)


def _matrix(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided((rows, cols), (cols, 1), dtype=dtype, device=device)


def _alloc_part(x: Tensor, quantizer: str, kept: str, seed: Tensor | None) -> list[Tensor]:
    codec = parse(quantizer)
    check_seed("linear_forward", codec, seed)
    places(quantizer, kept)
    check_input(x, codec.format)
    return alloc_outputs(parse(kept), x) if kept else []


def alloc_amax(x: Tensor, quantizer: str) -> list[Tensor]:
    """Memory for the amax (1,) of an ``x`` that is quantized under delayed scaling; [] for other quantizers."""
    if not parse(quantizer).returns_amax:
        return []
    return [torch.empty_strided((1,), (1,), dtype=torch.float32, device=x.device)]


class LinearForwardArgs(NamedTuple):
    """Arguments of the op ``linear_forward``."""

    x: Tensor
    x_quantizer: str
    x_kept: str
    weight: Tensor
    weight_quantizer: str
    weight_kept: str
    bias: Tensor | None
    dtype: torch.dtype
    scales: Tensor | None = None
    x_seed: Tensor | None = None
    weight_seed: Tensor | None = None


def _forward_alloc(args: LinearForwardArgs) -> list[Tensor]:
    return [
        _matrix(args.x.shape[0], args.weight.shape[0], args.dtype, args.x.device),
        *_alloc_part(args.x, args.x_quantizer, args.x_kept, args.x_seed),
        *_alloc_part(args.weight, args.weight_quantizer, args.weight_kept, args.weight_seed),
        *alloc_amax(args.x, args.x_quantizer),
        *alloc_amax(args.weight, args.weight_quantizer),
    ]


def quantize_all(
    x: Tensor, quantizer: str, kept: tuple[str, Sequence[Tensor]], call: Sequence[Any]
) -> list[Tensor]:
    """Every buffer of a quantized ``x``, those of ``kept`` (canonical text, tensors) being the given ones.

    Args:
        x: what is quantized.
        quantizer: canonical text.
        kept: see above.
        call: amax to write (or None), scale, seed.
    """
    codec, (text, tensors), (amax, scale, seed) = parse(quantizer), kept, call
    given = dict(zip(places(quantizer, text), tensors, strict=True))
    buffers = [
        given[i] if i in given else alloc_slots([slot], x.shape, x.device)[0]
        for i, slot in enumerate(codec.slots)
    ]
    found = buffers if amax is None else [*buffers, amax]
    FILLS["quantize"](found, QuantizeArgs(x, quantizer, scale, None, seed))
    return buffers


def _scale(scales: Tensor | None, quantizer: str, role: int) -> Tensor | None:
    if scales is None or not parse(quantizer).needs_scale:
        return None
    return scales[role : role + 1]


def _forward_fill(outputs: list[Tensor], args: LinearForwardArgs) -> None:
    operands = (
        args.x,
        args.x_quantizer,
        args.x_kept,
        args.weight,
        args.weight_quantizer,
        args.weight_kept,
    )
    if small.forward_(outputs, operands, args.bias, args.scales, (args.x_seed, args.weight_seed)):
        return
    with below_autograd():
        rest, buffers = outputs[1:], []
        sides = (
            (args.x, args.x_quantizer, args.x_kept, args.x_seed),
            (args.weight, args.weight_quantizer, args.weight_kept, args.weight_seed),
        )
        amaxes = rest[sum(len(places(quantizer, kept)) for _, quantizer, kept, _ in sides) :]
        for role, (t, quantizer, kept, seed) in enumerate(sides):
            count = len(places(quantizer, kept))
            amax = amaxes.pop(0) if parse(quantizer).returns_amax else None
            call = (amax, _scale(args.scales, quantizer, role), seed)
            buffers.append(quantize_all(t, quantizer, (kept, rest[:count]), call))
            rest = rest[count:]
        rows = [part(q, "rowwise") for q in (args.x_quantizer, args.weight_quantizer)]
        left, right = ([b[i] for i in at] for b, (at, _) in zip(buffers, rows, strict=True))
        FILLS["gemm"](
            outputs[0],
            GemmArgs(
                left,
                rows[0][1],
                args.x.shape,
                right,
                rows[1][1],
                args.weight.shape,
                "TN",
                args.dtype,
                args.bias,
            ),
        )


def _forward_learn(outputs: list[Tensor], args: LinearForwardArgs) -> None:
    operands = (
        args.x,
        args.x_quantizer,
        args.x_kept,
        args.weight,
        args.weight_quantizer,
        args.weight_kept,
    )
    small.learn_forward(outputs, operands, args.bias, args.scales, (args.x_seed, args.weight_seed))


LINEAR_FORWARD = leaf_op(
    "linear_forward(Tensor x, str x_quantizer, str x_kept, Tensor weight, str weight_quantizer, str weight_kept, "
    "Tensor? bias, ScalarType dtype, Tensor? scales=None, Tensor? x_seed=None, Tensor? weight_seed=None) -> Tensor[]",
    LinearForwardArgs,
    _forward_alloc,
    _forward_fill,
    shortcuts=Shortcuts(learn=_forward_learn),
)
"""``quantize(x)`` (M, K) times ``quantize(weight)`` (N, K) plus bias: [the product (M, N), the buffers of ``x_kept``, those of
``weight_kept``, the amaxes of delayed scaling]. What is kept is named by the canonical text of those buffers alone, "" for
nothing. ``scales``: (2,) or more, of input and weight."""


def forward_by_ops(
    x: Tensor,
    x_quantizer: str,
    x_kept: str,
    weight: Tensor,
    weight_quantizer: str,
    weight_kept: str,
    bias: Tensor | None,
    dtype: torch.dtype,
    scales: Tensor | None = None,
    x_seed: Tensor | None = None,
    weight_seed: Tensor | None = None,
) -> list[Tensor]:
    """What ``linear_forward`` returns, by the single ops, for operands that answer those themselves: quantized tensors."""
    sides = ((x, x_quantizer, x_kept, x_seed), (weight, weight_quantizer, weight_kept, weight_seed))
    operands, kept, amaxes = [], [], []
    for role, (t, quantizer, text, seed) in enumerate(sides):
        found = QUANTIZE(t, quantizer, _scale(scales, quantizer, role), None, seed)
        if parse(quantizer).returns_amax:
            *found, amax = found
            amaxes.append(amax)
        at, rows = part(quantizer, "rowwise")
        operands += [[found[i] for i in at], rows, t.shape]
        kept += [found[i] for i in places(quantizer, text)]
    return [GEMM(*operands, "TN", dtype, bias), *kept, *amaxes]


class LinearBackwardArgs(NamedTuple):
    """Arguments of the op ``linear_backward``."""

    dy: Tensor
    quantizer: str
    x: list[Tensor]
    x_quantizer: str
    x_shape: Shape
    weight: list[Tensor]
    weight_quantizer: str
    weight_shape: Shape
    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias: bool
    scales: Tensor | None = None
    seed: Tensor | None = None


def _backward_alloc(args: LinearBackwardArgs) -> list[Tensor]:
    check_input(args.dy, parse(args.quantizer).format)
    check_seed("linear_backward", parse(args.quantizer), args.seed)
    outputs = []
    if args.weight:
        outputs.append(_matrix(args.dy.shape[0], args.weight_shape[1], args.dtype, args.dy.device))
    if args.x:
        outputs.append(
            _matrix(args.dy.shape[1], args.x_shape[1], args.weight_dtype, args.dy.device)
        )
    if args.bias:
        outputs.append(
            torch.empty_strided(args.dy.shape[1:], (1,), dtype=args.dy.dtype, device=args.dy.device)
        )
    return [*outputs, *alloc_amax(args.dy, args.quantizer)]


def _backward_fill(outputs: list[Tensor], args: LinearBackwardArgs) -> None:
    saved = (
        (args.x, args.x_quantizer, args.x_shape),
        (args.weight, args.weight_quantizer, args.weight_shape),
    )
    if small.backward_(
        outputs, args.dy, args.quantizer, saved, args.bias, (args.scales, args.seed)
    ):
        return
    with below_autograd():
        rest = list(outputs)
        amax = rest.pop() if parse(args.quantizer).returns_amax else None
        call = (amax, _scale(args.scales, args.quantizer, 2), args.seed)
        buffers = quantize_all(args.dy, args.quantizer, ("", ()), call)
        if args.weight:
            at, text = part(args.quantizer, "rowwise")
            right = (args.weight, args.weight_quantizer, args.weight_shape)
            FILLS["gemm"](
                rest.pop(0),
                GemmArgs([buffers[i] for i in at], text, args.dy.shape, *right, "NN", args.dtype),
            )
        if args.x:
            at, text = usable(args.quantizer, "columnwise")
            left, right = [buffers[i] for i in at], (args.x, args.x_quantizer, args.x_shape)
            FILLS["gemm"](
                rest.pop(0), GemmArgs(left, text, args.dy.shape, *right, "NT", args.weight_dtype)
            )
        if args.bias:
            FILLS["bias_grad"](rest.pop(0), BiasGradArgs(args.dy))


def _backward_learn(outputs: list[Tensor], args: LinearBackwardArgs) -> None:
    saved = (
        (args.x, args.x_quantizer, args.x_shape),
        (args.weight, args.weight_quantizer, args.weight_shape),
    )
    small.learn_backward(
        outputs, args.dy, args.quantizer, saved, (args.bias, args.scales, args.seed)
    )


LINEAR_BACKWARD = leaf_op(
    "linear_backward(Tensor dy, str quantizer, Tensor[] x, str x_quantizer, SymInt[] x_shape, Tensor[] weight, "
    "str weight_quantizer, SymInt[] weight_shape, ScalarType dtype, ScalarType weight_dtype, bool bias, "
    "Tensor? scales=None, Tensor? seed=None) -> Tensor[]",
    LinearBackwardArgs,
    _backward_alloc,
    _backward_fill,
    shortcuts=Shortcuts(learn=_backward_learn),
)
"""From ``quantize(dy)`` (M, N): [the gradient of x (M, K) where there are buffers of the weight, that of the weight (N, K) where
there are buffers of x, that of the bias (N,) where it is asked for, the amax of delayed scaling]. ``scales``: (3,)."""
