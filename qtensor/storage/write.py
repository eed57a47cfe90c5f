"""Write into quantized tensors: copy bytes where they fit, requantize otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from qtensor.errors import UnsupportedError, fail
from qtensor.layout import is_empty
from qtensor.library.dequantize import DEQUANTIZE
from qtensor.library.quantize import INPUT_DTYPES, QUANTIZE, RANDOM_SEED
from qtensor.storage.base import QuantizedTensorStorage, ViewNote
from qtensor.storage.maxima import Split, maxima_of_whole

ROUNDS_AT_RANDOM: ContextVar[bool] = ContextVar("rounds_at_random", default=False)
"""True while an optimizer of ``qtensor.optim.round_parameters_`` writes its parameters."""


def plain(t: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return the dequantized values of ``t`` without a gradient, for use inside dispatch.

    Args:
        t: quantized tensor or storage.
        dtype: dtype of the result; the nominal dtype if None.

    Returns:
        A plain tensor of the logical shape.
    """
    if (stack := getattr(t, "_stack", None)) is not None:
        return plain(stack, dtype).transpose(-2, -1).contiguous()
    return DEQUANTIZE(t.buffers(), t._quantizer.canonical, t.shape, dtype or t.dtype)


def note_part(part: Any, whole: Any, shared: Sequence[str]) -> Any:
    """Return ``part`` with a note that it is a part of ``whole``.

    Args:
        part: a view of ``whole``.
        whole: the tensor from which ``part`` was taken.
        shared: names of the buffers that also belong to values outside ``part``.
    """
    is_copy = any(
        getattr(part, slot.name).untyped_storage()._cdata
        != getattr(whole, slot.name).untyped_storage()._cdata
        for slot in part._quantizer.slots
    )
    # A write to an empty part changes nothing, so it need not reach the whole.
    is_copy = is_copy and not is_empty(part.shape)
    if not is_copy and part.numel() == whole.numel():
        return inherit_note(part, whole)
    return inherit_note(part, whole, ViewNote(tuple(shared), is_copy))


def inherit_note(part: Any, whole: Any, note: ViewNote | None = None) -> Any:
    """Return ``part`` with the note of ``whole``, joined with ``note``."""
    old = whole._view_note
    if old is not None and note is not None:
        shared = tuple(dict.fromkeys(old.shared + note.shared))
        note = ViewNote(shared, old.is_copy or note.is_copy)
    note = note if note is not None else old
    if note is not None:
        part._view_note = note
        name, dtype, quantizer, _ = part._context
        # The context carries the note across compile boundaries.
        part._context = (name, dtype, quantizer, quantizer.scale_layout + note.suffix())
    return part


def copy_into(dst: Any, src: Any) -> Any:
    """Handle ``dst.copy_(src)``: copy bytes between equal quantizers, quantize values otherwise."""
    if not isinstance(dst, QuantizedTensorStorage):
        return dst.copy_(plain(src))
    if tuple(dst.shape) != tuple(src.shape):
        src = (plain(src) if isinstance(src, QuantizedTensorStorage) else src).expand(dst.shape)
    if not isinstance(src, QuantizedTensorStorage):
        return requantize_(dst, src)
    if src._quantizer != dst._quantizer:
        return requantize_(dst, plain(src))
    check_reaches(dst)
    note = dst._view_note
    if note is not None and note.shared:
        return _copy_part(dst, src, note.shared)
    for to, source in zip(dst.buffers(), src.buffers(), strict=True):
        copy_buffer(to, source)
    return dst


def _copy_part(dst: Any, src: Any, shared: tuple[str, ...]) -> Any:
    """Copy into a part that shares factors with the whole tensor, and return the part.

    Bytes are copied if the factors are equal. Otherwise the values are encoded with the factors of
    ``dst``. The device compares the factors, so that the call can be traced and never waits.
    """
    equal = torch.stack([(getattr(dst, n) == getattr(src, n)).all() for n in shared]).all()
    for slot, new in zip(dst._quantizer.slots, _encode_part(dst, plain(src), shared), strict=False):
        if slot.name not in shared:
            to, source = _common(getattr(dst, slot.name), getattr(src, slot.name))
            to.copy_(torch.where(equal, source, _common(to, new)[1]))
    return dst


def _encode_part(dst: Any, values: Tensor, shared: tuple[str, ...]) -> list[Tensor]:
    """Return the buffers of ``values``, encoded with the tensor-wide factors of ``dst``."""
    quantizer = dst._quantizer
    named = {slot.name: getattr(dst, slot.name) for slot in quantizer.slots}
    factors = quantizer.stored_factors(named) if shared or quantizer.needs_scale else {}
    seed = RANDOM_SEED(values) if quantizer.stochastic_rounding else None
    return QUANTIZE(values, quantizer.canonical, factors.get("scale"), factors.get("amax"), seed)


def check_reaches(dst: Any) -> None:
    """Refuse a write to a part whose bytes are a copy.

    Raises:
        UnsupportedError: the write would not reach the whole tensor.
    """
    note = dst._view_note
    if note is not None and note.is_copy:
        fail(
            f"copy_[{dst._quantizer.format}]",
            "a write to a part cannot reach the whole tensor if the scales of the part are a copy",
            dst._quantizer.canonical,
            "Clone it to write into the copy, or keep the whole with swizzled=False",
            UnsupportedError,
        )


def _common(to: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Return both buffers cropped to their common size; scales of a slice may lack padding."""
    if to.shape == source.shape:
        return to, source
    sizes = tuple(slice(min(a, b)) for a, b in zip(to.shape, source.shape, strict=True))
    return to[sizes], source[sizes]


def copy_buffer(to: Tensor, source: Tensor) -> None:
    """Copy ``source`` into ``to``; one of them may lack padding."""
    to, source = _common(to, source)
    to.copy_(source)


def requantize_(dst: Any, values: Tensor) -> Any:
    """Quantize values into an existing tensor and return the tensor.

    If ``dst`` is a part of a tensor, its shared factors stay, so that values outside it do not
    change.

    Args:
        dst: quantized tensor.
        values: floating or integer tensor of the shape of ``dst``.
    """
    check_reaches(dst)
    if values.dtype not in INPUT_DTYPES:
        values = values.to(torch.float32)
    values = values.to(dst.device)
    quantizer, note = dst._quantizer, dst._view_note
    if ROUNDS_AT_RANDOM.get() and not quantizer.stochastic_rounding:
        values = round_at_random(values.contiguous(), quantizer.element.mantissa_bits)
    if (splits := _splits(dst)) is not None:
        return _requantize_part(dst, values, splits)
    if note is None and _is_whole(dst):
        quantizer.update_quantized(values, dst)
        return dst
    shared = note.shared if note is not None else ()
    for slot, new in zip(quantizer.slots, _encode_part(dst, values, shared), strict=False):
        if slot.name not in shared:
            copy_buffer(getattr(dst, slot.name), new)
    return dst


def round_at_random(
    values: Tensor, mantissa_bits: int, generator: torch.Generator | None = None
) -> Tensor:
    """Return values with ``1 + mantissa_bits`` significant bits, whose mean over draws is exact.

    A random number is added to the bits that are then cut off (docs/numerics.md). A format with
    this mantissa and scales that are powers of two holds the result exactly where its codes are
    normal numbers.

    Args:
        values: any shape; float32, bfloat16 or float16.
        mantissa_bits: at most 22.
        generator: of the device of ``values``, or None for the default generator.

    Returns:
        A tensor of the shape and dtype of ``values``.
    """
    cut = 1 << (23 - mantissa_bits)
    bits = values.to(torch.float32).view(torch.int32)
    noise = torch.randint(
        0, cut, bits.shape, dtype=torch.int32, device=bits.device, generator=generator
    )
    rounded = ((bits + noise) & -cut).view(torch.float32).to(values.dtype)
    return torch.where(values.isfinite(), rounded, values)


def _splits(dst: Any) -> tuple[Split, ...] | None:
    """Return how the tensor is split of which ``dst`` is a rank's part; None if it is not known."""
    splits: tuple[Split, ...] | None = getattr(dst, "_splits", None)
    shards = getattr(dst, "_shards", None)
    if splits is None and shards is not None:
        return (Split(shards.group, "m"),) if len(shards.rows) > 1 else ()
    return splits


def _requantize_part(dst: Any, values: Tensor, splits: tuple[Split, ...]) -> Any:
    """Quantize values into a rank's part; maxima are those of the whole tensor.

    All ranks write to their parts at the same time, as optimizers do.
    """
    quantizer = dst._quantizer
    amax = None if quantizer.needs_scale else maxima_of_whole(quantizer, values, splits, "copy_")
    named = {slot.name: getattr(dst, slot.name) for slot in quantizer.slots}
    scale = quantizer.stored_factors(named).get("scale") if quantizer.needs_scale else None
    seed = RANDOM_SEED(values) if quantizer.stochastic_rounding else None
    new = QUANTIZE(values, quantizer.canonical, scale, amax, seed)
    for slot, buffer in zip(quantizer.slots, new, strict=False):
        copy_buffer(named[slot.name], buffer)
    torch.autograd.graph.increment_version(dst)
    return dst


def _is_whole(dst: Any) -> bool:
    described = dst._quantizer._describe_buffers(dst.shape)
    return all(getattr(dst, name).shape == shape for name, (shape, _) in described.items())
