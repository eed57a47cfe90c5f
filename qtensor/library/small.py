"""Small products and linear layers on a CPU by programs: all that an op does in one call, in the bytes of the single ops."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.kernels.cpu import calls
from qtensor.kernels.cpu.native import Site
from qtensor.kernels.cpu.program import (
    SMALL,
    Builder,
    Operand,
    Program,
    Result,
    Source,
    available,
    serves,
)
from qtensor.kernels.gemm import IN_FRONT
from qtensor.kernels.gemm.problem import Problem
from qtensor.layout import Shape
from qtensor.library.codec import parse

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = (Tensor, torch.nn.Parameter)
_MOST = 4096

Expected = tuple[tuple[torch.Size, torch.dtype], ...]
"""Shape and dtype of each buffer that a call must bring."""


class _Product(NamedTuple):
    program: Program
    a: Expected
    b: Expected


_PRODUCTS: dict[tuple[Any, ...], _Product | None] = {}


def expected_buffers(operand: Operand | None) -> Expected:
    """What a call must bring of an operand."""
    if operand is None:
        return ()
    return tuple((size, dtype) for _, _, size, dtype in operand.site.slots)


def addresses(buffers: Sequence[Tensor], expected: Expected) -> list[int] | None:
    """Where buffers are; None where one is not that of a whole tensor."""
    found: list[int] = []
    if len(buffers) < len(expected):
        return None
    for buffer, (size, dtype) in zip(buffers, expected, strict=False):
        if (
            buffer.shape != size
            or buffer.dtype is not dtype
            or not (buffer.is_cpu and buffer.is_contiguous())
        ):
            return None
        found.append(buffer.data_ptr())
    return found


def product_sizes(a_shape: Shape, b_shape: Shape, layout: str) -> tuple[int, int, int]:
    """M, N and K of a product of matrices."""
    m, k = (a_shape[1], a_shape[0]) if layout == "NT" else (a_shape[0], a_shape[1])
    return m, b_shape[0] if layout == "TN" else b_shape[1], k


def multiply_(
    out: Tensor,
    a: Sequence[Tensor],
    a_quantizer: str,
    a_shape: Shape,
    b: Sequence[Tensor],
    b_quantizer: str,
    b_shape: Shape,
    layout: str,
    bias: Tensor | None,
) -> bool:
    """The fill of ``gemm`` for small matrices on a CPU; False, with nothing written, for others."""
    if bias is not None and not (bias.ndim == 1 and bias.is_cpu and bias.is_contiguous()):
        return False
    added = None if bias is None else (bias.dtype, bias.shape[0])
    left, right = (
        (a_quantizer, tuple(a_shape), a[0].dtype),
        (b_quantizer, tuple(b_shape), b[0].dtype),
    )
    key = (*left, *right, layout, out.dtype, added)
    try:
        found = _PRODUCTS[key]
    except KeyError:
        found = remember(_PRODUCTS, key, _new_product(left, right, layout, out.dtype, added))
    if found is None or not out.is_contiguous():
        return False
    a_at, b_at = addresses(a, found.a), addresses(b, found.b)
    if a_at is None or b_at is None:
        return False
    bias_at = () if bias is None else (bias.data_ptr(),)
    return found.program.run(*a_at, *b_at, out.data_ptr(), *bias_at)


def remember(known: dict[Any, Any], key: Any, value: Any) -> Any:
    """Keep a value for a key; one too many begins anew."""
    if len(known) >= _MOST:
        known.clear()
    known[key] = value
    return value


def _new_product(
    left: tuple[str, tuple[int, ...], torch.dtype],
    right: tuple[str, tuple[int, ...], torch.dtype],
    layout: str,
    dtype: torch.dtype,
    bias: tuple[torch.dtype, int] | None,
) -> _Product | None:
    if len(left[1]) != 2 or len(right[1]) != 2 or not (left[0] or right[0]):
        return None
    sizes = product_sizes(left[1], right[1], layout)
    if right[1] != ((sizes[1], sizes[2]) if layout == "TN" else (sizes[2], sizes[1])):
        return None
    if not fits(*sizes) or dtype not in DTYPES or not available():
        return None
    if bias is not None and (bias[0] not in DTYPES or bias[1] != sizes[1]):
        return None
    builder = Builder()
    operands: list[Operand | Source] = []
    expected: list[Expected] = []
    for quantizer, shape, kind in (left, right):
        if not quantizer:
            if kind not in DTYPES:
                return None
            operands.append(Source(builder.given(), kind))
            expected.append(((torch.Size(shape), kind),))
            continue
        codec = parse(quantizer)
        site = serves(codec, shape)
        if site is None:
            return None
        operand = builder.operand(codec, site)
        operands.append(operand)
        expected.append(expected_buffers(operand))
    out = Source(builder.given(), dtype)
    added = None if bias is None else Source(builder.given(), bias[0])
    builder.multiply(operands[0], operands[1], Result(layout, sizes, out, added))
    return _Product(builder.build(), *expected)


def fits(m: int, n: int, k: int) -> bool:
    """Whether a product is small, and none whose sizes of 1 make ``torch.mm`` choose another routine."""
    return min(m, n, k) > 1 and max(m * n, n * k, m * k) <= SMALL


# ---- linear layers -----------------------------------------------------------------------------

Saved = tuple[list[Tensor], str, Shape]
"""(buffers, canonical text, logical shape) of an operand that the forward kept."""
_PROGRAMS: dict[tuple[Any, ...], Any] = {}


def _seed_at(seed: Tensor | None) -> int:
    return 0 if seed is None else seed.data_ptr()


def _is_seed(seed: Tensor | None) -> bool:
    return seed is None or (seed.is_cpu and seed.dtype is torch.int64 and seed.numel() == 1)


def _scales(scales: Tensor | None) -> tuple[torch.dtype, int] | None:
    return None if scales is None else (scales.dtype, scales.numel())


def _has_scales(given: tuple[torch.dtype, int] | None, count: int) -> bool:
    return given is not None and given[0] is torch.float32 and given[1] >= count


def _on_cpu(*tensors: Tensor | None) -> bool:
    for t in tensors:
        if t is not None and not (type(t) in PLAIN and t.is_cpu and t.is_contiguous()):
            return False
    return True


def forward_(
    outputs: list[Tensor],
    operands: tuple[Tensor, str, str, Tensor, str, str],
    bias: Tensor | None,
    scales: Tensor | None,
    seeds: tuple[Tensor | None, Tensor | None],
) -> bool:
    """The fill of ``linear_forward``; False, with nothing written, where it does not serve."""
    key = _forward_key(outputs, operands, bias, scales, seeds)
    if key is None:
        return False
    try:
        program = _PROGRAMS[key]
    except KeyError:
        program = remember(_PROGRAMS, key, _new_forward(key))
    if program is None:
        return False
    x, weight = operands[0], operands[3]
    at = 0 if scales is None else scales.data_ptr()
    return program.run(
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        at,
        at + 4,
        _seed_at(seeds[0]),
        _seed_at(seeds[1]),
        *[t.data_ptr() for t in outputs],
    )


def _forward_key(
    outputs: list[Tensor],
    operands: tuple[Tensor, str, str, Tensor, str, str],
    bias: Tensor | None,
    scales: Tensor | None,
    seeds: tuple[Tensor | None, Tensor | None],
) -> tuple[Any, ...] | None:
    """What the program of a call depends on, or None where programs cannot read its tensors."""
    x, x_quantizer, x_kept, weight, weight_quantizer, weight_kept = operands
    if not (_on_cpu(x, weight, bias, scales) and _is_seed(seeds[0]) and _is_seed(seeds[1])):
        return None
    return (
        x_quantizer,
        x_kept,
        x.shape,
        x.dtype,
        weight_quantizer,
        weight_kept,
        weight.shape,
        weight.dtype,
        None if bias is None else (bias.dtype, bias.shape),
        outputs[0].dtype,
        _scales(scales),
    )


def _outputs(count: int) -> list[tuple[int, int]]:
    """The places of that many outputs."""
    return [(-1 - i, 0) for i in range(count)]


FORWARD_PLACES = ((0, 0), (1, 0), (2, 0), (3, 0), (3, 4), (4, 0), (5, 0))
"""Of input, weight, bias, their scales and their seeds."""


@functools.cache
def _taken(name: str, packs_first: bool) -> bool:
    """Whether C++ is asked before Python for an op on a CPU."""
    return available() and calls.take(name, packs_first)


def forward_is_native(x: Tensor, x_quantizer: str, x_kept: str, weight: Tensor, *_: Any) -> bool:
    """Whether C++ answers a call of ``linear_forward``, as far as sizes tell."""
    if not (x.is_cpu and x.ndim == 2 and x.is_contiguous()):
        return False
    rows, columns = x.shape
    return fits(rows, weight.shape[0], columns) and _taken("linear_forward", False)


def backward_is_native(dy: Tensor, quantizer: str, x: list[Tensor], *rest: Any) -> bool:
    """Whether C++ answers a call of ``linear_backward``, as far as sizes tell."""
    if not (dy.is_cpu and dy.ndim == 2):
        return False
    rows, columns = dy.shape
    return fits(rows, columns, rest[1 if x else 4][1]) and _taken("linear_backward", True)


def learn_forward(
    outputs: list[Tensor],
    operands: tuple[Tensor, str, str, Tensor, str, str],
    bias: Tensor | None,
    scales: Tensor | None,
    seeds: tuple[Tensor | None, Tensor | None],
    packed: tuple[str, calls.Places, Sequence[bool]] | None = None,
) -> None:
    """After a call of ``linear_forward`` through the dispatcher: calls like it are answered without Python.

    ``packed``: (name, places, which outputs are cleared) of another op that this call was a part of.
    """
    if not (outputs[0].is_cpu and _taken(packed[0] if packed else "linear_forward", False)):
        return
    key = _forward_key(outputs, operands, bias, scales, seeds)
    program = None if key is None else _PROGRAMS.get(key)
    if program is None:
        return
    if packed is not None:
        calls.learn(program, *packed[1:])
        return
    cleared = [False]
    for text in (operands[2], operands[5]):
        cleared += [slot.padded for slot in parse(text).slots] if text else []
    calls.learn(program, (*FORWARD_PLACES, *_outputs(len(outputs))), cleared)


def _new_forward(key: tuple[Any, ...]) -> Program | None:
    x_text, x_kept, x_shape, x_dtype, w_text, w_kept, w_shape, w_dtype, bias, dtype, scales = key
    sides = ((x_text, x_kept, x_shape, x_dtype), (w_text, w_kept, w_shape, w_dtype))
    codecs = [parse(text) for text in (x_text, w_text)]
    x_site, w_site = serves(codecs[0], x_shape), serves(codecs[1], w_shape)
    if not available() or x_site is None or w_site is None or x_shape[1] != w_shape[1]:
        return None
    sites = (x_site, w_site)
    sizes = (x_shape[0], w_shape[0], x_shape[1])
    if not fits(*sizes) or any(d not in DTYPES for d in (x_dtype, w_dtype, dtype)):
        return None
    if bias is not None and (bias[0] not in DTYPES or bias[1] != (sizes[1],)):
        return None
    if not all(codec.rowwise for codec in codecs):
        return None
    if any(codec.needs_scale for codec in codecs) and not _has_scales(scales, 2):
        return None
    builder = Builder()
    x_at, w_at, bias_at, *scale_at, x_seed, w_seed, out_at = [builder.given() for _ in range(8)]
    seed_at = (x_seed, w_seed)
    kept = [
        {slot.name: builder.given() for slot in parse(k).slots} if k else {}
        for k in (x_kept, w_kept)
    ]
    amax_at = [builder.given() if codec.returns_amax else 0 for codec in codecs]
    both = []
    for i, at in enumerate((x_at, w_at)):
        call = {"seed": seed_at[i], "amax": amax_at[i]}
        if codecs[i].needs_scale:
            call["scale"] = scale_at[i]
        source = Source(at, sides[i][3])
        both.append(builder.quantize(codecs[i], sites[i], source, kept[i], call))
    added = None if bias is None else Source(bias_at, bias[0])
    builder.multiply(both[0], both[1], Result("TN", sizes, Source(out_at, dtype), added))
    return builder.build()


class _Backward(NamedTuple):
    program: Program
    x: Expected
    weight: Expected


def backward_(
    outputs: list[Tensor],
    dy: Tensor,
    quantizer: str,
    saved: tuple[Saved, Saved],
    bias: bool,
    given: tuple[Tensor | None, Tensor | None],
) -> bool:
    """The fill of ``linear_backward``; False, with nothing written, where it does not serve.

    Args:
        outputs: of the op.
        dy: the gradient.
        quantizer: of the gradient.
        saved: the operands that the forward kept, of input and weight, without buffers where a product is not wanted.
        bias: the bias has a gradient.
        given: scales and seed.
    """
    scales, seed = given
    if not dy.is_contiguous():
        dy = dy.contiguous()
    key = _backward_key(outputs, dy, quantizer, saved, bias, given)
    if key is None:
        return False
    try:
        found = _PROGRAMS[key]
    except KeyError:
        found = remember(_PROGRAMS, key, _new_backward(key))
    if found is None:
        return False
    x, weight = saved[0][0], saved[1][0]
    x_at, w_at = addresses(x, found.x), addresses(weight, found.weight)
    if x_at is None or w_at is None:
        return False
    return found.program.run(
        dy.data_ptr(),
        0 if scales is None else scales.data_ptr() + 8,
        _seed_at(seed),
        *w_at,
        *x_at,
        *[t.data_ptr() for t in outputs],
    )


def _backward_key(
    outputs: list[Tensor],
    dy: Tensor,
    quantizer: str,
    saved: tuple[Saved, Saved],
    bias: bool,
    given: tuple[Tensor | None, Tensor | None],
) -> tuple[Any, ...] | None:
    (x, x_text, x_shape), (weight, w_text, w_shape) = saved
    scales, seed = given
    if not (_on_cpu(dy, scales) and _is_seed(seed)):
        return None
    return (
        quantizer,
        dy.shape,
        dy.dtype,
        x_text,
        tuple(x_shape) if x else (),
        w_text,
        tuple(w_shape) if weight else (),
        bias,
        tuple([t.dtype for t in outputs[:2]]),
        _scales(scales),
    )


def learn_backward(
    outputs: list[Tensor],
    dy: Tensor,
    quantizer: str,
    saved: tuple[Saved, Saved],
    given: tuple[bool, Tensor | None, Tensor | None],
    packed: tuple[str, calls.Places] | None = None,
) -> None:
    """After a call of ``linear_backward`` through the dispatcher: see ``learn_forward``.

    ``given``: whether the bias has a gradient; scales and seed.
    """
    if not (dy.is_cpu and _taken(packed[0] if packed else "linear_backward", True)):
        return
    key = _backward_key(outputs, dy.contiguous(), quantizer, saved, given[0], given[1:])
    found = None if key is None else _PROGRAMS.get(key)
    x, weight = saved[0][0], saved[1][0]
    if found is None or None in (addresses(x, found.x), addresses(weight, found.weight)):
        return
    if packed is not None:
        calls.learn(found.program, packed[1])
        return
    last = 1 + len(x) + len(weight)
    of_weight = [(1 + len(x) + i, 0) for i in range(len(found.weight))]
    of_x = [(1 + i, 0) for i in range(len(found.x))]
    places = [(0, 0), (last, 8), (last + 1, 0), *of_weight, *of_x, *_outputs(len(outputs))]
    calls.learn(found.program, places)


def _new_backward(key: tuple[Any, ...]) -> _Backward | None:
    text, shape, dtype, x_text, x_shape, w_text, w_shape, bias, dtypes, scales = key
    codec, site = parse(text), serves(parse(text), shape)
    if not available() or site is None or any(d not in DTYPES for d in (dtype, *dtypes)):
        return None
    if codec.needs_scale and not _has_scales(scales, 3):
        return None
    saved: list[tuple[Any, Site] | None] = []
    for q, of, size in ((w_text, w_shape, shape[1]), (x_text, x_shape, shape[0])):
        found = serves(parse(q), of) if q and of else None
        if of and (found is None or of[0] != size or not fits(shape[0], shape[1], of[1])):
            return None
        saved.append(None if found is None else (parse(q), found))
    builder = Builder()
    dy = Source(builder.given(), dtype)
    call = {"scale": builder.given(), "seed": builder.given()}
    weight, x = (None if known is None else builder.operand(*known) for known in saved)
    kinds = iter(dtypes)
    outs = [Source(builder.given(), next(kinds)) for wanted in (weight, x) if wanted is not None]
    bias_at = builder.given() if bias else 0
    if codec.returns_amax:
        call["amax"] = builder.given()
    if not codec.needs_scale:
        del call["scale"]
    if codec.rowwise and site.scale_inv is not None:
        # Both directions hold the same codes, and the products read their values once.
        codec = codec.with_usage(rowwise=True, columnwise=False)
        site = serves(codec, shape) or site
    gradient = builder.quantize(codec, site, dy, {}, call)
    if weight is not None:
        builder.multiply(gradient, weight, Result("NN", (shape[0], w_shape[1], shape[1]), outs[0]))
    if x is not None:
        builder.multiply(gradient, x, Result("NT", (shape[1], x_shape[1], shape[0]), outs[-1]))
    if bias:
        builder.sum_rows(dy, shape[0], shape[1], bias_at)
    return _Backward(builder.build(), expected_buffers(x), expected_buffers(weight))


def refusal(problem: Problem) -> str | None:
    """Return why no program computes a product, or None."""
    if problem.capability is not None or not problem.device.startswith("cpu"):
        return "it runs on CPUs"
    left, right = (
        (side.canonical, tuple(side.shape), side.dtype) for side in (problem.a, problem.b)
    )
    bias = None if problem.bias is None else (problem.bias[1], problem.bias[0][0])
    if problem.bias is not None and len(problem.bias[0]) != 1:
        return "the bias must have one dimension"
    if _new_product(left, right, problem.layout, problem.dtype, bias) is None:
        return f"it computes small quantized matrices of at most {SMALL} elements"
    return None


IN_FRONT["small"] = refusal
