"""The ops of a linear layer by programs, where all of its matrices are small."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from qtensor.kernels.cpu.program import Builder, Program, Result, Source, available, serves
from qtensor.layout import Shape
from qtensor.library.codec import parse
from qtensor.library.small import (
    DTYPES,
    PLAIN,
    Expected,
    addresses,
    expected_buffers,
    fits,
    remember,
)

Saved = tuple[list[Tensor], str, Shape]
"""(buffers, canonical text, logical shape) of an operand that the forward kept."""
_PROGRAMS: dict[tuple[Any, ...], Any] = {}


def _seed_at(seed: Tensor | None) -> int:
    return 0 if seed is None else seed.data_ptr()


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
    x, x_quantizer, x_kept, weight, weight_quantizer, weight_kept = operands
    if not _on_cpu(x, weight, bias, scales):
        return False
    key = (
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
        scales is None,
    )
    try:
        program = _PROGRAMS[key]
    except KeyError:
        program = remember(_PROGRAMS, key, _new_forward(key))
    if program is None:
        return False
    at = 0 if scales is None else scales.data_ptr()
    return program.run(  # type: ignore[no-any-return]
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        at,
        at + 4,
        _seed_at(seeds[0]),
        _seed_at(seeds[1]),
        *[t.data_ptr() for t in outputs],
    )


def _new_forward(key: tuple[Any, ...]) -> Program | None:
    x_text, x_kept, x_shape, x_dtype, w_text, w_kept, w_shape, w_dtype, bias, dtype, unscaled = key
    sides = ((x_text, x_kept, x_shape, x_dtype), (w_text, w_kept, w_shape, w_dtype))
    codecs = [parse(text) for text in (x_text, w_text)]
    sites = [serves(codec, shape) for codec, shape in zip(codecs, (x_shape, w_shape), strict=True)]
    if not available() or None in sites or x_shape[1] != w_shape[1]:
        return None
    sizes = (x_shape[0], w_shape[0], x_shape[1])
    if not fits(*sizes) or any(d not in DTYPES for d in (x_dtype, w_dtype, dtype)):
        return None
    if bias is not None and (bias[0] not in DTYPES or bias[1] != (sizes[1],)):
        return None
    if any((codec.needs_scale and unscaled) or not codec.rowwise for codec in codecs):
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
    builder.multiply(*both, Result("TN", sizes, Source(out_at, dtype), added))
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
    (x, x_text, x_shape), (weight, w_text, w_shape) = saved
    scales, seed = given
    if not dy.is_contiguous():
        dy = dy.contiguous()
    if not _on_cpu(dy, scales):
        return False
    key = (
        quantizer,
        dy.shape,
        dy.dtype,
        x_text,
        tuple(x_shape) if x else (),
        w_text,
        tuple(w_shape) if weight else (),
        bias,
        tuple([t.dtype for t in outputs[:2]]),
        scales is None,
    )
    try:
        found = _PROGRAMS[key]
    except KeyError:
        found = remember(_PROGRAMS, key, _new_backward(key))
    if found is None:
        return False
    x_at, w_at = addresses(x, found.x), addresses(weight, found.weight)
    if x_at is None or w_at is None:
        return False
    return found.program.run(  # type: ignore[no-any-return]
        dy.data_ptr(),
        0 if scales is None else scales.data_ptr() + 8,
        _seed_at(seed),
        *w_at,
        *x_at,
        *[t.data_ptr() for t in outputs],
    )


def _new_backward(key: tuple[Any, ...]) -> _Backward | None:
    text, shape, dtype, x_text, x_shape, w_text, w_shape, bias, dtypes, unscaled = key
    codec, site = parse(text), serves(parse(text), shape)
    known = [(q, s) for q, s in ((w_text, w_shape), (x_text, x_shape)) if s]
    if not available() or site is None or dtype not in DTYPES or (codec.needs_scale and unscaled):
        return None
    if any(not q or serves(parse(q), s) is None or not fits(*shape, s[1]) for q, s in known):
        return None
    builder = Builder()
    dy = Source(builder.given(), dtype)
    call = {"scale": builder.given(), "seed": builder.given()}
    weight = builder.operand(parse(w_text), serves(parse(w_text), w_shape)) if w_shape else None
    x = builder.operand(parse(x_text), serves(parse(x_text), x_shape)) if x_shape else None
    kinds = iter(dtypes)
    outs = [Source(builder.given(), next(kinds)) for wanted in (weight, x) if wanted is not None]
    bias_at = builder.given() if bias else 0
    if codec.returns_amax:
        call["amax"] = builder.given()
    if not codec.needs_scale:
        del call["scale"]
    gradient = builder.quantize(codec, site, dy, {}, call)
    if weight is not None:
        builder.multiply(gradient, weight, Result("NN", (shape[0], w_shape[1], shape[1]), outs[0]))
    if x is not None:
        builder.multiply(gradient, x, Result("NT", (shape[1], x_shape[1], shape[0]), outs[-1]))
    if bias:
        builder.sum_rows(dy, shape[0], shape[1], bias_at)
    return _Backward(builder.build(), expected_buffers(x), expected_buffers(weight))
