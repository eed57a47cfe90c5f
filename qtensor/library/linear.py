"""Define ``linear_forward`` and ``linear_backward``, each a whole direction in one call.

They compute what ``quantize``, ``gemm`` and ``bias_grad`` compute one after the other, with the
same bytes, and return the buffers that backward needs beside the products. A layer that splits over
ranks, keeps a workspace or postpones a gradient calls the single ops instead.

The buffers that are kept have two layouts. By default each is an output of its own. With
``packed=True`` they share one byte tensor (``qtensor.layout.pack``): a compiled program checks,
saves and frees each tensor between forward and backward, so that fewer tensors cost less.
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
from qtensor.library.define import FILLS, below_autograd, leaf_op
from qtensor.library.gemm import GEMM, GemmArgs
from qtensor.library.norm import BiasGradArgs
from qtensor.library.quantize import QUANTIZE, QuantizeArgs, check_input


class LinearForwardArgs(NamedTuple):
    """The arguments of ``linear_forward``.

    Attributes:
        x: input (M, K), float32, bfloat16 or float16.
        x_quantizer: canonical text of its quantizer.
        x_kept: canonical text of the buffers of ``x`` that are returned, "" for none.
        weight: (N, K), float32, bfloat16 or float16.
        weight_quantizer: as for ``x``.
        weight_kept: as for ``x``.
        bias: (N,), or None.
        dtype: of the product.
        scales: (2,) float32 or longer: factors of input and weight under delayed scaling.
        x_seed: (1,) int64 for stochastic rounding.
        weight_seed: (1,) int64 for stochastic rounding.
        packed: the kept buffers share one byte tensor.
    """

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
    packed: bool = False


class LinearBackwardArgs(NamedTuple):
    """The arguments of ``linear_backward``.

    Attributes:
        dy: gradient (M, N) of the product, float32, bfloat16 or float16.
        quantizer: canonical text of its quantizer.
        x: kept buffers of the input; [] if the weight has no gradient. Packed: the one byte tensor
            of both operands.
        x_quantizer: canonical text of these buffers, "" for none.
        x_shape: (M, K).
        weight: kept buffers of the weight; [] if the input has no gradient, and if packed.
        weight_quantizer: canonical text of these buffers, "" for none.
        weight_shape: (N, K).
        dtype: of the gradient of the input.
        weight_dtype: of the gradient of the weight.
        bias: return the gradient of the bias.
        scales: (3,) float32 under delayed scaling; the third is that of ``dy``.
        seed: (1,) int64 for stochastic rounding.
        packed: ``x`` holds the byte tensor of a packed forward.
    """

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
    packed: bool = False


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
    x, weight = args.x, args.weight
    if x.ndim != 2 or weight.ndim != 2:
        got = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        fail("linear_forward", "x and weight must be matrices", got, "Reshape them")
    for t, text, kept_text, seed in (
        (x, args.x_quantizer, args.x_kept, args.x_seed),
        (weight, args.weight_quantizer, args.weight_kept, args.weight_seed),
    ):
        check_seed("linear_forward", parse(text), seed)
        places(text, kept_text)
        check_input(t, parse(text).format)
    kept: list[Tensor] = []
    if args.packed:
        layout = packing(args.x_kept, x.shape, args.weight_kept, weight.shape)
        make = torch.zeros if any(piece.padded for piece in layout.pieces) else torch.empty
        kept.append(make(layout.size, dtype=torch.uint8, device=x.device))
    else:
        for t, text in ((x, args.x_kept), (weight, args.weight_kept)):
            kept += alloc_outputs(parse(text), t) if text else []
    amaxes = alloc_amax(x, args.x_quantizer) + alloc_amax(weight, args.weight_quantizer)
    return [_matrix(x.shape[0], weight.shape[0], args.dtype, x.device), *kept, *amaxes]


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
    x, weight = args.x, args.weight
    with below_autograd():
        rest, buffers = outputs[1:], []
        if args.packed:
            layout = _known_packing(args.x_kept, x.shape, args.weight_kept, weight.shape)
            for start, end in layout.gaps():
                # Equal calls give equal bytes.
                rest[0][start:end].zero_()
            rest = [*unpack(rest[0], layout), *rest[1:]]
        sides = (
            (x, args.x_quantizer, args.x_kept, args.x_seed),
            (weight, args.weight_quantizer, args.weight_kept, args.weight_seed),
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
        FILLS["gemm"](outputs[0], GemmArgs(*operands, "TN", args.dtype, args.bias))


LINEAR_FORWARD = leaf_op(
    "linear_forward(Tensor x, str x_quantizer, str x_kept, Tensor weight, str weight_quantizer, "
    "str weight_kept, Tensor? bias, ScalarType dtype, Tensor? scales=None, Tensor? x_seed=None, "
    "Tensor? weight_seed=None, bool packed=False) -> Tensor[]",
    LinearForwardArgs,
    _forward_alloc,
    _forward_fill,
)
"""``x @ weight.T + bias`` of quantized operands: see ``LinearForwardArgs``.

Returns [product (M, N), the kept buffers of ``x`` and of ``weight``, the amaxes (1,) of delayed
scaling]; with ``packed`` one byte tensor stands for all kept buffers.
"""


def forward_by_ops(*args: Any, **kwargs: Any) -> list[Tensor]:
    """Return the unpacked results of ``linear_forward``, computed by single ops.

    Quantized tensors handle the single ops themselves.
    """
    call = LinearForwardArgs(*args, **kwargs)
    sides = (
        (call.x, call.x_quantizer, call.x_kept, call.x_seed),
        (call.weight, call.weight_quantizer, call.weight_kept, call.weight_seed),
    )
    operands: list[Any] = []
    kept, amaxes = [], []
    for role, (t, quantizer, text, seed) in enumerate(sides):
        buffers = QUANTIZE(t, quantizer, _scale(call.scales, quantizer, role), None, seed)
        if parse(quantizer).returns_amax:
            *buffers, amax = buffers
            amaxes.append(amax)
        slots, rows = part(quantizer, "rowwise")
        operands += [[buffers[i] for i in slots], rows, t.shape]
        kept += [buffers[i] for i in places(quantizer, text)]
    return [GEMM(*operands, "TN", call.dtype, call.bias), *kept, *amaxes]


def _backward_alloc(args: LinearBackwardArgs) -> list[Tensor]:
    dy = args.dy
    check_input(dy, parse(args.quantizer).format)
    check_seed("linear_backward", parse(args.quantizer), args.seed)
    for text, shape in (
        (args.x_quantizer, args.x_shape),
        (args.weight_quantizer, args.weight_shape),
    ):
        if dy.ndim != 2 or (text and len(shape) != 2):
            got = f"dy {tuple(dy.shape)}, operand {tuple(shape)}"
            rule = "dy and the kept operands must be matrices"
            fail("linear_backward", rule, got, "Pass the shapes (M, K) and (N, K)")
    outputs = []
    if args.weight_quantizer if args.packed else args.weight:
        outputs.append(_matrix(dy.shape[0], args.weight_shape[1], args.dtype, dy.device))
    if args.x_quantizer if args.packed else args.x:
        outputs.append(_matrix(dy.shape[1], args.x_shape[1], args.weight_dtype, dy.device))
    if args.bias:
        outputs.append(torch.empty_strided(dy.shape[1:], (1,), dtype=dy.dtype, device=dy.device))
    return [*outputs, *alloc_amax(dy, args.quantizer)]


def kept_operands(args: LinearBackwardArgs) -> tuple[list[Tensor], list[Tensor]]:
    """Return the kept buffers of input and weight, each [] where there are none."""
    if not args.packed:
        return args.x, args.weight
    shapes = torch.Size(args.x_shape), torch.Size(args.weight_shape)
    layout = _known_packing(args.x_quantizer, shapes[0], args.weight_quantizer, shapes[1])
    if len(args.x) != 1 or args.x[0].shape != (layout.size,) or args.x[0].dtype != torch.uint8:
        sizes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in args.x)
        rule = f"packed: x must hold one uint8 tensor of {layout.size} bytes"
        fail("linear_backward", rule, f"[{sizes}]", "Pass the tensor that linear_forward returned")
    buffers = unpack(args.x[0], layout)
    count = len(parse(args.x_quantizer).slots) if args.x_quantizer else 0
    return buffers[:count], buffers[count:]


def _backward_fill(outputs: list[Tensor], args: LinearBackwardArgs) -> None:
    dy, quantizer = args.dy, args.quantizer
    with below_autograd():
        x, weight = kept_operands(args)
        rest = list(outputs)
        amax = rest.pop() if parse(quantizer).returns_amax else None
        values = (amax, _scale(args.scales, quantizer, 2), args.seed)
        buffers = quantize_all(dy, quantizer, ("", ()), values)
        if weight:
            slots, text = part(quantizer, "rowwise")
            left = [buffers[i] for i in slots]
            right = (weight, args.weight_quantizer, args.weight_shape)
            product = GemmArgs(left, text, dy.shape, *right, "NN", args.dtype)
            FILLS["gemm"](rest.pop(0), product)
        if x:
            slots, text = usable(quantizer, "columnwise")
            left, right = [buffers[i] for i in slots], (x, args.x_quantizer, args.x_shape)
            product = GemmArgs(left, text, dy.shape, *right, "NT", args.weight_dtype)
            FILLS["gemm"](rest.pop(0), product)
        if args.bias:
            FILLS["bias_grad"](rest.pop(0), BiasGradArgs(dy))


LINEAR_BACKWARD = leaf_op(
    "linear_backward(Tensor dy, str quantizer, Tensor[] x, str x_quantizer, SymInt[] x_shape, "
    "Tensor[] weight, str weight_quantizer, SymInt[] weight_shape, ScalarType dtype, "
    "ScalarType weight_dtype, bool bias, Tensor? scales=None, Tensor? seed=None, "
    "bool packed=False) -> Tensor[]",
    LinearBackwardArgs,
    _backward_alloc,
    _backward_fill,
)
"""The gradients of a linear layer from its quantized ``dy``: see ``LinearBackwardArgs``.

Returns [gradient of x (M, K) where buffers of the weight are kept, gradient of the weight (N, K)
where buffers of x are kept, gradient of the bias (N,) if asked for, amax (1,) of delayed scaling].
"""
