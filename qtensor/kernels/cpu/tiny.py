"""Small tensors quantized and decoded by one native call whose arguments are ready: what is left is to allocate.

What a call of the ops takes beside that grows with nothing: looking facts up, allocating through the dispatcher, packing
sizes. Here it is done once for a quantizer, a shape and a dtype, and kept: at the second call of that kind, since a shape that
never comes again is not worth it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.kernels.cpu import calls, native
from qtensor.kernels.cpu.native import DTYPES, SHARED, Site, site_of
from qtensor.kernels.cpu.program import Builder, Program, Source
from qtensor.layout import Shape, contiguous_strides

_PLAIN = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_MOST = 4096

Buffer = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype."""


def _empty_by_torch(size: Shape, stride: Shape, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


# What inductor's code allocates with: half the time, since no mode or key is asked. None is there below an op.
_empty: Callable[[Any, Any, torch.dtype], Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cpu", _empty_by_torch
)


class _Encoder(NamedTuple):
    program: Program
    run: Callable[..., bool]
    """Takes addresses: x, scale, seed, the outputs."""
    outputs: tuple[Buffer, ...]
    scaled: bool
    """A call brings a scale, and must."""
    seeded: bool
    """A call may bring a seed."""


class _Decoder(NamedTuple):
    program: Program
    run: Callable[..., bool]
    """Takes addresses: the buffers, the result."""
    reads: tuple[tuple[int, torch.Size, torch.dtype], ...]
    """(slot, shape, dtype) of each buffer."""
    output: Buffer


_ENCODERS: dict[tuple[str, torch.Size, torch.dtype], _Encoder | None] = {}
_DECODERS: dict[tuple[str, tuple[int, ...], torch.dtype], _Decoder | None] = {}


def quantized(
    codec: Any,
    x: Tensor,
    scale: Tensor | None,
    amax: list[Tensor] | None,
    seed: Tensor | None,
) -> list[Tensor] | None:
    """New buffers of ``codec`` in slot order (and the amax that delayed scaling returns) from a small tensor.

    Returns:
        None for what has to go the long way: the first call of its kind, large tensors, those that are not contiguous,
        given maxima, a dtype or format without a kernel, what needs the reference's checks.
    """
    if type(x) not in _PLAIN or x.layout is not _STRIDED or amax:
        return None
    key = codec.canonical, x.shape, x.dtype
    try:
        encoder = _ENCODERS[key]
    except KeyError:
        if _is_first(key):
            return None
        encoder = _remember(_ENCODERS, key, _new_encoder(codec, x.shape, x.dtype))
    if encoder is None or not (x.is_cpu and x.is_contiguous()):
        return None
    _, run, sizes, scaled, seeded = encoder
    if scale is None and seed is None and not scaled:
        outputs = [_empty(*size) for size in sizes]
        done = run(x.data_ptr(), 0, 0, *[t.data_ptr() for t in outputs])
        return outputs if done else None
    if not _are_given(encoder, scale, seed):
        return None
    outputs = [_empty(*size) for size in sizes]
    scale_at = 0 if scale is None else scale.data_ptr()
    seed_at = 0 if seed is None or not seeded else seed.data_ptr()
    done = run(x.data_ptr(), scale_at, seed_at, *[t.data_ptr() for t in outputs])
    return outputs if done else None


def _are_given(encoder: _Encoder, scale: Tensor | None, seed: Tensor | None) -> bool:
    """Whether a call brings what the program reads, as it reads it."""
    if (scale is not None) != encoder.scaled:
        return False
    return _is_one(scale, torch.float32) and _is_one(seed, torch.int64)


def _is_one(t: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether a kernel can read the one element of ``t``, or there is none."""
    return t is None or (type(t) in _PLAIN and t.is_cpu and t.dtype is dtype and t.numel() == 1)


def learn_quantized(
    codec: Any,
    x: Tensor,
    scale: Tensor | None,
    amax: list[Tensor] | None,
    seed: Tensor | None,
) -> None:
    """After a call of the op through the dispatcher, the second of its kind or a later one: C++ answers those like it."""
    encoder = _ENCODERS.get((codec.canonical, x.shape, x.dtype)) if x.is_cpu else None
    if encoder is None or amax is not None or not _are_given(encoder, scale, seed):
        return
    if type(x) in _PLAIN and x.is_contiguous() and calls.take("quantize", True):
        outputs = [(-1 - i, 0) for i in range(len(encoder.outputs))]
        calls.learn(encoder.program, ((0, 0), (1, 0), (3, 0), *outputs))


def _new_encoder(codec: Any, shape: torch.Size, dtype: torch.dtype) -> _Encoder | None:
    site = _site(codec, shape)
    if site is None or dtype not in DTYPES:
        return None
    builder = Builder()
    x, scale, seed = builder.given(), builder.given(), builder.given()
    kept, outputs = {}, []
    for (_, _, size, kind), slot in zip(site.slots, codec.slots, strict=True):
        at = kept[slot.name] = builder.given()
        outputs.append((tuple(size), contiguous_strides(size), kind))
        if slot.padded:  # Kernels never write padding.
            builder.clear(at, size.numel() * kind.itemsize)
    call = {"seed": seed} | ({"scale": scale} if codec.needs_scale else {})
    if codec.returns_amax:
        call["amax"] = builder.given()
        outputs.append(((1,), (1,), torch.float32))
    builder.quantize(codec, site, Source(x, dtype), kept, call)
    program = builder.build()
    return _Encoder(
        program, program.run, tuple(outputs), codec.needs_scale, codec.stochastic_rounding
    )


def dequantized(
    codec: Any, buffers: Sequence[Tensor], shape: Shape, dtype: torch.dtype
) -> Tensor | None:
    """The values of a small tensor in ``dtype``.

    Args:
        codec: the quantizer of the buffers.
        buffers: in slot order.
        shape: the logical shape.
        dtype: of the result.

    Returns:
        None for what has to go the long way: the first call of its kind, large tensors, views of buffers, a dtype or
        format without a kernel.
    """
    key = codec.canonical, tuple(shape), dtype
    try:
        decoder = _DECODERS[key]
    except KeyError:
        if _is_first((*key, "decode")):
            return None
        decoder = _remember(_DECODERS, key, _new_decoder(codec, torch.Size(shape), dtype))
    if decoder is None:
        return None
    at = _addresses(decoder, buffers)
    if at is None:
        return None
    y = _empty(*decoder.output)
    return y if decoder.run(*at, y.data_ptr()) else None


def _addresses(decoder: _Decoder, buffers: Sequence[Tensor]) -> list[int] | None:
    """Where the buffers are that a program reads; None where one is not that of a whole tensor."""
    at = []
    for slot, size, kind in decoder.reads:
        t = buffers[slot]
        if t.shape != size or t.dtype is not kind or not (t.is_cpu and t.is_contiguous()):
            return None
        at.append(t.data_ptr())
    return at


def learn_dequantized(
    codec: Any, buffers: Sequence[Tensor], shape: Shape, dtype: torch.dtype
) -> None:
    """After a call of the op through the dispatcher: see ``learn_quantized``."""
    decoder = _DECODERS.get((codec.canonical, tuple(shape), dtype)) if buffers[0].is_cpu else None
    if decoder is None or _addresses(decoder, buffers) is None:
        return
    if calls.take("dequantize", False):
        places = [(slot, 0) for slot, _, _ in decoder.reads]
        calls.learn(decoder.program, (*places, (-1, 0)))


def _new_decoder(codec: Any, shape: torch.Size, dtype: torch.dtype) -> _Decoder | None:
    site = _site(codec, shape)
    if site is None or dtype not in DTYPES:
        return None
    wanted = (SHARED, *((4, 5, 6) if site.side else (0, 1, 2)))
    builder = Builder()
    at, reads = [0] * (SHARED + 1), []
    for slot, place, size, kind in site.slots:
        if place in wanted:
            at[place] = builder.given()
            reads.append((slot, size, kind))
    builder.decode(site, at, Source(builder.given(), dtype))
    output = tuple(shape), contiguous_strides(shape), dtype
    program = builder.build()
    return _Decoder(program, program.run, tuple(reads), output)


def _site(codec: Any, shape: torch.Size) -> Site | None:
    """None for what no program serves."""
    if shape.numel() > native.ONE_THREAD or isinstance(native.library(), str):
        return None
    return site_of(codec, shape)


_met: dict[Any, None] = {}


def _is_first(key: Any) -> bool:
    """Whether a call of that kind was never met, which is remembered."""
    if key in _met:
        return False
    _remember(_met, key, None)
    return True


def _remember(known: dict[Any, Any], key: Any, value: Any) -> Any:
    """Keep a value for a key; one too many begins anew."""
    if len(known) >= _MOST:
        known.clear()
    known[key] = value
    return value
