"""Define ``linear_forward`` and ``linear_backward``, each a whole direction in one call.

They compute what ``quantize``, ``gemm`` and ``bias_grad`` compute one after the other, with the
same bytes, and return the buffers that backward needs beside the products. A layer that splits over
ranks, keeps a workspace or postpones a gradient calls the single ops instead.

The buffers that are kept have two layouts. By default each is an output of its own. In a packed
plan they share one byte tensor (``qtensor.layout.pack``): a compiled program checks, saves and
frees each tensor between forward and backward, so that fewer tensors cost less.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.errors import fail
from qtensor.layout import PACK_ALIGNMENT, Packing, Shape, pack
from qtensor.library.checks import check_seed
from qtensor.library.codec import alloc_outputs, alloc_slots, parse
from qtensor.library.constant import compile_constant
from qtensor.library.define import FILLS, below_autograd, leaf_op
from qtensor.library.gemm import GEMM, GemmArgs
from qtensor.library.norm import BiasGradArgs
from qtensor.library.quantize import QUANTIZE, QuantizeArgs, check_input
from qtensor.linear_plans import (
    BackwardPlan,
    ForwardPlan,
    backward_plan,
    forward_plan,
    plan_text,
)


class LinearForwardArgs(NamedTuple):
    """The arguments of ``linear_forward``.

    Attributes:
        x: input (M, K), float32, bfloat16 or float16.
        weight: (N, K), float32, bfloat16 or float16.
        bias: (N,), or None.
        plan: text of a ``ForwardPlan``.
        scales: (2,) float32 or longer: factors of input and weight under delayed scaling.
        x_seed: (1,) int64 for stochastic rounding.
        weight_seed: (1,) int64 for stochastic rounding.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    plan: str
    scales: Tensor | None = None
    x_seed: Tensor | None = None
    weight_seed: Tensor | None = None


class LinearBackwardArgs(NamedTuple):
    """The arguments of ``linear_backward``.

    Attributes:
        dy: gradient (M, N) of the product, float32, bfloat16 or float16.
        saved: the kept buffers of the input, then those of the weight. Packed: the byte tensor that
            they share.
        columns: K.
        plan: text of a ``BackwardPlan``.
        scales: (3,) float32 under delayed scaling; the third is that of ``dy``.
        seed: (1,) int64 for stochastic rounding.
    """

    dy: Tensor
    saved: list[Tensor]
    columns: int
    plan: str
    scales: Tensor | None = None
    seed: Tensor | None = None


@compile_constant
def forward_text(*fields: Any) -> str:
    """Return the text of the ``ForwardPlan`` with these fields."""
    return plan_text(ForwardPlan(*fields))


@compile_constant
def backward_text(*fields: Any) -> str:
    """Return the text of the ``BackwardPlan`` with these fields."""
    return plan_text(BackwardPlan(*fields))


@functools.lru_cache(maxsize=4096)
def part(canonical: str, usage: str) -> tuple[tuple[int, ...], str]:
    """Return the slots of a usage and the canonical string of these buffers alone.

    The result is ((), "") if the quantizer has no such buffers.
    """
    codec = parse(canonical)
    if not getattr(codec, usage):
        return (), ""
    twin = codec.with_usage(rowwise=usage == "rowwise", columnwise=usage == "columnwise")
    return places(canonical, twin.canonical), twin.canonical


@functools.lru_cache(maxsize=4096)
def places(canonical: str, kept: str) -> tuple[int, ...]:
    """Return the slots of the buffers of ``kept`` among those of ``canonical``; () for ""."""
    if not kept:
        return ()
    slots = parse(canonical).slots
    if not set(parse(kept).slots) <= set(slots):
        rule = "only buffers of the quantizer can be kept"
        fail("linear_forward", rule, f"{kept} of {canonical}", "Name one of its usages")
    return tuple(slots.index(slot) for slot in parse(kept).slots)


def usable(canonical: str, usage: str) -> tuple[tuple[int, ...], str]:
    """Return ``part``, or all buffers if that usage has none of its own."""
    slots, text = part(canonical, usage)
    return (slots, text) if slots else (tuple(range(len(parse(canonical).slots))), canonical)


def _matrix(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided((rows, cols), (cols, 1), dtype=dtype, device=device)


def packing(x_kept: str, x_shape: Shape, weight_kept: str, weight_shape: Shape) -> Packing:
    """Return the positions of the saved buffers of input (M, K) and weight (N, K) in their tensor.

    The pieces of the input come first in the result. Those of the weight come first in memory:
    their sizes are numbers where those of the input are symbols.
    """
    x_slots, weight_slots = (parse(text).slots if text else () for text in (x_kept, weight_kept))
    weight, end = pack(weight_slots, weight_shape, 0)
    x, end = pack(x_slots, x_shape, end)
    return Packing((*x, *weight), end)


@functools.lru_cache(maxsize=4096)
def _known_packing(
    x_kept: str, x_shape: torch.Size, weight_kept: str, weight_shape: torch.Size
) -> Packing:
    return packing(x_kept, x_shape, weight_kept, weight_shape)


def unpack(saved: Tensor, layout: Packing) -> list[Tensor]:
    """Return the buffers that share the byte tensor ``saved`` (layout.size,), as views of it.

    ``saved`` may be a view itself, at any offset within its storage: an activation pool hands it
    back so. One that is not contiguous, or not aligned as its buffers need, is copied first.
    """
    if not saved.is_contiguous() or (saved.is_cpu and saved.data_ptr() % PACK_ALIGNMENT):
        saved = saved.clone(memory_format=torch.contiguous_format)
    return [
        saved[piece.offset : piece.offset + piece.nbytes].view(piece.dtype).view(piece.size)
        for piece in layout.pieces
    ]


def alloc_amax(x: Tensor, quantizer: str) -> list[Tensor]:
    """Return [an empty amax (1,)] for an ``x`` under delayed scaling; [] for other quantizers."""
    if not parse(quantizer).returns_amax:
        return []
    return [torch.empty_strided((1,), (1,), dtype=torch.float32, device=x.device)]


def _forward_alloc(args: LinearForwardArgs) -> list[Tensor]:
    x, weight, plan = args.x, args.weight, forward_plan(args.plan)
    if x.ndim != 2 or weight.ndim != 2:
        got = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        fail("linear_forward", "x and weight must be matrices", got, "Reshape them")
    for t, canonical, kept_canonical, seed in (
        (x, plan.x_quantizer, plan.x_kept, args.x_seed),
        (weight, plan.weight_quantizer, plan.weight_kept, args.weight_seed),
    ):
        check_seed("linear_forward", parse(canonical), seed)
        places(canonical, kept_canonical)
        check_input(t, parse(canonical).format)
    kept: list[Tensor] = []
    if plan.packed:
        layout = packing(plan.x_kept, x.shape, plan.weight_kept, weight.shape)
        make = torch.zeros if any(piece.padded for piece in layout.pieces) else torch.empty
        kept.append(make(layout.size, dtype=torch.uint8, device=x.device))
    else:
        for t, canonical in ((x, plan.x_kept), (weight, plan.weight_kept)):
            kept += alloc_outputs(parse(canonical), t) if canonical else []
    amaxes = alloc_amax(x, plan.x_quantizer) + alloc_amax(weight, plan.weight_quantizer)
    return [_matrix(x.shape[0], weight.shape[0], plan.dtype, x.device), *kept, *amaxes]


def quantize_all(
    x: Tensor, quantizer: str, kept: tuple[str, Sequence[Tensor]], call: Sequence[Any]
) -> list[Tensor]:
    """Quantize ``x`` (M, K) and return all its buffers, some of which exist already.

    Args:
        x: float32, bfloat16 or float16.
        quantizer: canonical text.
        kept: (canonical text, tensors) of the buffers that exist.
        call: amax (1,) to write, or None; scale (1,) or None; seed (1,) or None.
    """
    codec, (text, tensors), (amax, scale, seed) = parse(quantizer), kept, call
    existing = dict(zip(places(quantizer, text), tensors, strict=True))
    buffers = [
        existing[i] if i in existing else alloc_slots([slot], x.shape, x.device)[0]
        for i, slot in enumerate(codec.slots)
    ]
    outputs = buffers if amax is None else [*buffers, amax]
    FILLS["quantize"](outputs, QuantizeArgs(x, quantizer, scale, None, seed))
    return buffers


def _scale(scales: Tensor | None, quantizer: str, role: int) -> Tensor | None:
    if scales is None or not parse(quantizer).needs_scale:
        return None
    return scales[role : role + 1]


def _forward_fill(outputs: list[Tensor], args: LinearForwardArgs) -> None:
    x, weight, plan = args.x, args.weight, forward_plan(args.plan)
    with below_autograd():
        rest, buffers = outputs[1:], []
        if plan.packed:
            layout = _known_packing(plan.x_kept, x.shape, plan.weight_kept, weight.shape)
            for start, end in layout.gaps():
                # Equal calls give equal bytes.
                rest[0][start:end].zero_()
            rest = [*unpack(rest[0], layout), *rest[1:]]
        sides = (
            (x, plan.x_quantizer, plan.x_kept, args.x_seed),
            (weight, plan.weight_quantizer, plan.weight_kept, args.weight_seed),
        )
        amaxes = rest[sum(len(places(quantizer, kept)) for _, quantizer, kept, _ in sides) :]
        for role, (t, quantizer, kept, seed) in enumerate(sides):
            count = len(places(quantizer, kept))
            amax = amaxes.pop(0) if parse(quantizer).returns_amax else None
            values = (amax, _scale(args.scales, quantizer, role), seed)
            buffers.append(quantize_all(t, quantizer, (kept, rest[:count]), values))
            rest = rest[count:]
        rows = [part(quantizer, "rowwise") for _, quantizer, _, _ in sides]
        left, right = (
            [own[i] for i in slots] for own, (slots, _) in zip(buffers, rows, strict=True)
        )
        operands = (left, rows[0][1], x.shape, right, rows[1][1], weight.shape)
        FILLS["gemm"](outputs[0], GemmArgs(*operands, "TN", plan.dtype, args.bias))


LINEAR_FORWARD = leaf_op(
    "linear_forward(Tensor x, Tensor weight, Tensor? bias, str plan, Tensor? scales=None, "
    "Tensor? x_seed=None, Tensor? weight_seed=None) -> Tensor[]",
    LinearForwardArgs,
    _forward_alloc,
    _forward_fill,
)
"""``x @ weight.T + bias`` of quantized operands: see ``LinearForwardArgs`` and ``ForwardPlan``.

Returns [product (M, N), the kept buffers of ``x`` and of ``weight``, the amaxes (1,) of delayed
scaling]; in a packed plan one byte tensor stands for all kept buffers.
"""


def forward_by_ops(*args: Any, **kwargs: Any) -> list[Tensor]:
    """Return the unpacked results of ``linear_forward``, computed by single ops.

    Quantized tensors handle the single ops themselves.
    """
    call = LinearForwardArgs(*args, **kwargs)
    plan = forward_plan(call.plan)
    sides = (
        (call.x, plan.x_quantizer, plan.x_kept, call.x_seed),
        (call.weight, plan.weight_quantizer, plan.weight_kept, call.weight_seed),
    )
    operands: list[Any] = []
    kept, amaxes = [], []
    for role, (t, quantizer, kept_canonical, seed) in enumerate(sides):
        buffers = QUANTIZE(t, quantizer, _scale(call.scales, quantizer, role), None, seed)
        if parse(quantizer).returns_amax:
            *buffers, amax = buffers
            amaxes.append(amax)
        slots, rows = part(quantizer, "rowwise")
        operands += [[buffers[i] for i in slots], rows, t.shape]
        kept += [buffers[i] for i in places(quantizer, kept_canonical)]
    return [GEMM(*operands, "TN", plan.dtype, call.bias), *kept, *amaxes]


def _backward_alloc(args: LinearBackwardArgs) -> list[Tensor]:
    dy, columns, plan = args.dy, args.columns, backward_plan(args.plan)
    check_input(dy, parse(plan.quantizer).format)
    check_seed("linear_backward", parse(plan.quantizer), args.seed)
    if dy.ndim != 2:
        fail("linear_backward", "dy must be a matrix (M, N)", tuple(dy.shape), "Reshape it")
    outputs = []
    if plan.weight_kept:
        outputs.append(_matrix(dy.shape[0], columns, plan.dtype, dy.device))
    if plan.x_kept:
        outputs.append(_matrix(dy.shape[1], columns, plan.weight_dtype, dy.device))
    if plan.bias:
        outputs.append(torch.empty_strided(dy.shape[1:], (1,), dtype=dy.dtype, device=dy.device))
    return [*outputs, *alloc_amax(dy, plan.quantizer)]


def _kept_operands(args: LinearBackwardArgs) -> tuple[list[Tensor], list[Tensor]]:
    """Return the kept buffers of input and weight, each [] where there are none."""
    plan, saved = backward_plan(args.plan), args.saved
    x_count, weight_count = (
        len(parse(canonical).slots) if canonical else 0
        for canonical in (plan.x_kept, plan.weight_kept)
    )
    if plan.packed:
        rows, width = args.dy.shape
        shapes = torch.Size((rows, args.columns)), torch.Size((width, args.columns))
        layout = _known_packing(plan.x_kept, shapes[0], plan.weight_kept, shapes[1])
        if len(saved) != 1 or saved[0].shape != (layout.size,) or saved[0].dtype != torch.uint8:
            sizes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in saved)
            rule = f"packed: saved must hold one uint8 tensor of {layout.size} bytes"
            fix = "Pass the tensor that linear_forward returned"
            fail("linear_backward", rule, f"[{sizes}]", fix)
        saved = unpack(saved[0], layout)
    elif len(saved) != x_count + weight_count:
        rule = f"saved must hold {x_count} buffers of the input and {weight_count} of the weight"
        fix = "Pass the buffers that linear_forward returned"
        fail("linear_backward", rule, f"{len(saved)} tensors", fix)
    return saved[:x_count], saved[x_count:]


def _backward_fill(outputs: list[Tensor], args: LinearBackwardArgs) -> None:
    dy, columns, plan = args.dy, args.columns, backward_plan(args.plan)
    quantizer = plan.quantizer
    with below_autograd():
        x, weight = _kept_operands(args)
        rest = list(outputs)
        amax = rest.pop() if parse(quantizer).returns_amax else None
        values = (amax, _scale(args.scales, quantizer, 2), args.seed)
        buffers = quantize_all(dy, quantizer, ("", ()), values)
        if weight:
            slots, canonical = part(quantizer, "rowwise")
            left = [buffers[i] for i in slots]
            right = (weight, plan.weight_kept, (dy.shape[1], columns))
            product = GemmArgs(left, canonical, dy.shape, *right, "NN", plan.dtype)
            FILLS["gemm"](rest.pop(0), product)
        if x:
            slots, canonical = usable(quantizer, "columnwise")
            left = [buffers[i] for i in slots]
            right = (x, plan.x_kept, (dy.shape[0], columns))
            product = GemmArgs(left, canonical, dy.shape, *right, "NT", plan.weight_dtype)
            FILLS["gemm"](rest.pop(0), product)
        if plan.bias:
            FILLS["bias_grad"](rest.pop(0), BiasGradArgs(dy))


LINEAR_BACKWARD = leaf_op(
    "linear_backward(Tensor dy, Tensor[] saved, SymInt columns, str plan, Tensor? scales=None, "
    "Tensor? seed=None) -> Tensor[]",
    LinearBackwardArgs,
    _backward_alloc,
    _backward_fill,
)
"""Gradients of a linear layer from its quantized ``dy``: see ``LinearBackwardArgs``.

Returns [gradient of x (M, K) where buffers of the weight are kept, gradient of the weight (N, K)
where buffers of x are kept, gradient of the bias (N,) if asked for, amax (1,) of delayed scaling].
"""
