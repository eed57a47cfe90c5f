"""Write into quantized tensors: copy bytes where they fit, requantize otherwise."""

from __future__ import annotations

import warnings
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qtensor.core.errors import UnsupportedError, fail
from qtensor.library.quantize import INPUT_DTYPES, QUANTIZE, RANDOM_SEED, maxima_of
from qtensor.storage.base import QuantizedTensorStorage, is_quantized
from qtensor.storage.maxima import maxima_of_whole
from qtensor.storage.ops.lazy_view import layout_of, values
from qtensor.storage.ops.padding import ends_with_zeros
from qtensor.storage.origin import FRESH, Origin, Split
from qtensor.storage.rebuild import map_buffers
from qtensor.storage.usages import check_usages

if TYPE_CHECKING:
    from qtensor.storage.tensor import QuantizedTensor

ROUNDS_AT_RANDOM: ContextVar[bool] = ContextVar("rounds_at_random", default=False)
"""True while an optimizer of ``qtensor.optim.round_parameters_`` writes its parameters."""


plain = values
"""The dequantized values of a tensor or storage, for use inside dispatch."""


def copy_into(dst: Tensor, src: Tensor) -> Tensor:
    """Handle ``dst.copy_(src)``: copy bytes between equal quantizers, quantize values otherwise."""
    if not is_quantized(dst):
        _warn_of_decoding(dst, src)
        return dst.copy_(_plain(src))
    if tuple(dst.shape) != tuple(src.shape):
        src = _plain(src).expand(dst.shape)
    if (layout := layout_of(dst)) is not None:
        layout.write(dst, src, copy_into)
        return dst
    if not is_quantized(src):
        return requantize_(dst, src)
    if src._quantizer != dst._quantizer:
        return requantize_(dst, plain(src))
    shared = begin_write(dst)
    if _memory(dst) & _memory(src):
        # A buffer that is written may be one that is still to be read, as in q.t().copy_(q).
        src = map_buffers(src, torch.clone, origin=FRESH)
    if shared:
        return _copy_part(dst, src, shared)
    for to, source in zip(dst.buffers(), src.buffers(), strict=True):
        copy_buffer(to, source)
    return dst


def _warn_of_decoding(dst: Tensor, src: Tensor) -> None:
    """Say once that a plain parameter gets the values of a quantized tensor, and becomes larger.

    ``load_state_dict`` copies so into a model that is not quantized.
    """
    if isinstance(dst, torch.nn.Parameter) and dst.numel() and not _SAID:
        _SAID.append(True)
        warnings.warn(
            f"copy_: a quantized tensor of {src.nbytes} bytes was decoded into a plain parameter "
            f"of {dst.nbytes}. load_state_dict(state, assign=True) keeps quantized tensors as they "
            "are. This warning is shown once.",
            UserWarning,
            stacklevel=2,
        )


_SAID: list[bool] = []
"""Not empty after the warning about decoding into a plain parameter."""


def _plain(t: Tensor) -> Tensor:
    return plain(t) if is_quantized(t) else t


def _memory(t: QuantizedTensorStorage) -> set[int]:
    return {buffer.untyped_storage()._cdata for buffer in t.buffers()}


def _copy_part(
    dst: QuantizedTensor, src: QuantizedTensor, shared: tuple[str, ...]
) -> QuantizedTensor:
    """Copy into a part that shares factors with the whole tensor, and return the part.

    Bytes are copied if the factors are equal. Otherwise the values are encoded with the factors of
    ``dst``. The device compares the factors, so that the call can be traced and never waits.
    """
    values = encodable(plain(src))
    encoded = _encode_part(dst, values, shared)
    equal = torch.stack([(getattr(dst, n) == getattr(src, n)).all() for n in shared]).all()
    for slot, new in zip(dst._quantizer.slots, encoded, strict=False):
        if slot.name not in shared:
            to, source = _common(getattr(dst, slot.name), getattr(src, slot.name))
            to.copy_(torch.where(equal, source, _common(to, new)[1]))
    return dst


def encodable(values: Tensor) -> Tensor:
    """Return ``values`` in a dtype that the ops encode: a tensor may show float64."""
    return values if values.dtype in INPUT_DTYPES else values.to(torch.float32)


def _encode_part(dst: QuantizedTensor, values: Tensor, shared: tuple[str, ...]) -> list[Tensor]:
    """Return the buffers of ``values``, encoded with the factors that ``dst`` shares.

    A shared factor of 0, with which every value is 0, is replaced in ``dst``: all values that share
    it are zeros, which every factor encodes. NVFP4 stores maxima, which are 0 for zeros; appended
    rows have factors of 0.
    """
    quantizer = dst._quantizer
    named = {slot.name: getattr(dst, slot.name) for slot in quantizer.slots}
    if maxima := [name for name in named if name.startswith("_amax")] if shared else []:
        own = dict(zip(maxima, maxima_of(values, quantizer.canonical), strict=True))
        named |= {name: own[name] for name in maxima if name not in shared}
    else:
        own = {}
    for name in shared:
        factors = named[name]
        new = own[name].view(factors.shape) if name in own else torch.ones_like(factors)
        factors.copy_(torch.where(factors == 0, new, factors))
    kept = quantizer.stored_factors(named) if shared or quantizer.needs_scale else {}
    seed = RANDOM_SEED(values) if quantizer.stochastic_rounding else None
    return QUANTIZE(values, quantizer.canonical, kept.get("scale"), kept.get("amax"), seed)


def begin_write(dst: QuantizedTensor) -> tuple[str, ...]:
    """Return the names of the buffers that a write to ``dst`` must leave unchanged.

    Raises:
        UnsupportedError: the write would not reach the whole tensor, or an alias.
    """
    check_usages(dst)
    origin = _origin_now(dst)
    if origin.is_copy:
        fail(
            f"copy_[{dst._quantizer.format}]",
            "a write to a part cannot reach the whole tensor if the scales of the part are a copy",
            dst._quantizer.canonical,
            "Clone it to write into the copy, or keep the whole with swizzled=False",
            UnsupportedError,
        )
    # update_usage may have dropped a shared buffer.
    return tuple([name for name in origin.shared if name in dst._quantizer.slot_names])


def _origin_now(t: QuantizedTensorStorage) -> Origin:
    """Return the origin that a write obeys: of the padded tensor, if only padding follows ``t``."""
    origin = t._origin
    if origin.padded is not None:
        whole, dim, _ = origin.padded
        if ends_with_zeros(whole, dim, t.shape[dim]):
            return _origin_now(whole)
    return origin


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


def requantize_(dst: QuantizedTensor, values: Tensor) -> QuantizedTensor:
    """Quantize values into an existing tensor and return the tensor.

    If ``dst`` is a part of a tensor, its shared factors stay, so that values outside it do not
    change.

    Args:
        dst: quantized tensor.
        values: floating or integer tensor of the shape of ``dst``.
    """
    if (layout := layout_of(dst)) is not None:
        layout.write(dst, values, copy_into)
        return dst
    shared = begin_write(dst)
    values = encodable(values).to(dst.device)
    quantizer = dst._quantizer
    if ROUNDS_AT_RANDOM.get() and not quantizer.stochastic_rounding:
        values = round_at_random(values.contiguous(), quantizer.element.mantissa_bits)
    # A part keeps the factors that it shares, also if it is a part of a rank's part.
    if not shared and dst._origin.split:
        return _requantize_part(dst, values, dst._origin.split)
    if not dst._origin.is_part and _is_whole(dst):
        quantizer.update_quantized(values, dst)
        return dst
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


def _requantize_part(
    dst: QuantizedTensor, values: Tensor, splits: tuple[Split, ...]
) -> QuantizedTensor:
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


def _is_whole(dst: QuantizedTensorStorage) -> bool:
    described = dst._quantizer._describe_buffers(dst.shape)
    return all(getattr(dst, name).shape == shape for name, (shape, _) in described.items())
