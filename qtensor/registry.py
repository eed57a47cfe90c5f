"""The quantizers that ops and kernels see: their interface, their canonical texts and their buffers.

The classes themselves are in ``quantizers/``, above the ops that they call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from qtensor.errors import fail
from qtensor.formats import FormatSpec, Slot
from qtensor.layout import Shape, buffer_shapes, contiguous_strides, has_padding


class QuantizerLike(Protocol):
    """The part of a quantizer that ops, kernels and storages use."""

    format: str
    spec: FormatSpec
    canonical: str
    slots: tuple[Slot, ...]
    keywords: tuple[str, ...]
    """Constructor keywords of the slots."""
    attributes: tuple[tuple[str, str], ...]
    """(attribute, constructor keyword) of each slot."""
    scale_layout: str
    rowwise: bool
    columnwise: bool
    transpose_plan: Any
    """How a 2-D tensor is transposed (storage/geometry.py)."""
    two_dimensional: bool
    """Blocks are square, shared by both directions."""
    factors_are_local: bool
    """A value depends on its own code and factors alone (False: a rotation mixes elements)."""
    per_tensor: bool
    """One factor for the whole tensor, which a GEMM can apply at its end."""
    returns_amax: bool
    """The op returns the tensor's amax after the buffers (delayed scaling)."""
    stochastic_rounding: bool
    """A call must bring ``seed=``."""
    needs_scale: bool
    """A call must bring ``scale=`` (delayed scaling)."""

    def encode_(
        self,
        out: dict[str, Tensor],
        x: Tensor,
        scale: Tensor | None,
        amax: list[Tensor] | None,
        seed: Tensor | None,
    ) -> None:
        """Write every buffer in ``out`` from the high-precision ``x``."""

    def decode(
        self, buffers: dict[str, Tensor], shape: Shape, columnwise: bool | None = None
    ) -> Tensor:
        """Buffers to float32 of ``shape``."""

    def decode_codes(self, buffers: dict[str, Tensor], shape: Shape) -> tuple[Tensor, Tensor]:
        """``per_tensor`` formats: element values, and the (1,) factor kept out of them."""

    def derive(
        self, buffers: dict[str, Tensor], shape: Shape, usage: str
    ) -> dict[str, Tensor] | None:
        """Buffers of ``usage`` from those of the other direction, exactly, or None."""

    def without_square_blocks(self) -> QuantizerLike:
        """The quantizer of rows that were cut across square blocks."""

    def side(self, columnwise: bool | None = None) -> str:
        """Which buffers a decode reads, ``"_rowwise"`` or ``"_columnwise"``."""

    def is_requantization_safe(self) -> bool:
        """Whether quantizing the same data again gives the same bytes."""

    def update_quantized(self, src: Tensor, dst: Any, **call: Any) -> Any:
        """Requantize ``src`` into the buffers of ``dst``."""

    def amax(self, x: Tensor) -> list[Tensor]:
        """The maxima that decide the tensor-wide factors of ``x``."""

    def amax_shapes(self, shape: Shape) -> list[tuple[int, ...]]:
        """Shapes of what ``amax`` returns."""

    def with_usage(
        self, *, rowwise: bool | None = None, columnwise: bool | None = None
    ) -> QuantizerLike:
        """The same options with other usages, as a new value."""


_CLASSES: dict[str, type] = {}

LISTENERS: list[Callable[[], object]] = []
"""Functions that forget what they derived from canonical texts, called when a class is registered."""


def register_quantizer(name: str, cls: type) -> None:
    """Make ``cls`` the quantizer class of format ``name``.

    Raises:
        QTensorError: the name is taken by another class.
    """
    known = _CLASSES.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (
        cls.__module__,
        cls.__qualname__,
    ):
        fail(
            f"format {name!r}",
            "a format has one quantizer class",
            f"{cls.__qualname__} beside {known.__qualname__}",
            "choose another format name",
        )
    _CLASSES[name] = cls
    parse.cache_clear()
    _known_layouts.cache_clear()
    for forget in LISTENERS:
        forget()


def quantizer_class(name: str) -> type:
    """Return the quantizer class of a format.

    Raises:
        QTensorError: no such format; the message lists the known ones.
    """
    if name not in _CLASSES:
        fail(
            "quantizer",
            "the format must be a registered one",
            repr(name),
            f"Choose one of: {', '.join(format_names())}",
        )
    return _CLASSES[name]


def format_names() -> tuple[str, ...]:
    """Return the registered formats, in order of registration."""
    return tuple(_CLASSES)


@functools.lru_cache(maxsize=4096)
def parse(canonical: str) -> QuantizerLike:
    """Return the quantizer of a canonical text, such as ``"nvfp4(columnwise=True,with_rht=True)"``.

    Raises:
        QTensorError: unknown format, unknown option or malformed text.
    """
    name, bracket, options = canonical.partition("(")
    cls = quantizer_class(name)
    if bracket and not options.endswith(")"):
        _malformed(canonical)
    values: dict[str, Any] = {}
    for item in options.removesuffix(")").split(",") if bracket else ():
        option, equals, value = item.partition("=")
        if not equals or option in values:
            _malformed(canonical)
        values[option] = _value(value, getattr(cls, option, None))
    return cls(**values)


def _malformed(canonical: str) -> None:
    fail(
        "quantizer",
        "text must read 'format' or 'format(option=value,...)'",
        repr(canonical),
        "Correct the text",
    )


def _value(text: str, default: Any) -> Any:
    """Return an option's text as the type of its default.

    A text that cannot be converted is returned as it is, and the quantizer refuses it.
    """
    if isinstance(default, bool):
        return {"True": True, "False": False}.get(text, text)
    if isinstance(default, int | float):
        try:
            return type(default)(text)
        except ValueError:
            return text
    return text


def alloc_slots(slots: Sequence[Slot], shape: Shape, device: torch.device) -> list[Tensor]:
    """Allocate the inner buffers of a tensor of ``shape``, in slot order.

    Buffers with padding start as zeros, because fills never write the padding.
    """
    buffers, known = [], all(type(n) is int for n in shape)
    for slot, size in zip(slots, buffer_shapes(slots, shape), strict=True):
        cleared = has_padding(slot, shape) if known else slot.padded
        make = torch.zeros if cleared else torch.empty
        buffers.append(make(size, dtype=slot.dtype, device=device))
    return buffers


class _Layout(NamedTuple):
    """How the buffer of a slot is allocated."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    cleared: bool
    """The buffer has padding and starts as zeros."""


@functools.lru_cache(maxsize=4096)
def _known_layouts(canonical: str, shape: Shape) -> tuple[_Layout, ...]:
    slots = parse(canonical).slots
    return tuple(
        _Layout(tuple(size), contiguous_strides(size), slot.dtype, has_padding(slot, shape))
        for slot, size in zip(slots, buffer_shapes(slots, shape), strict=True)
    )


def alloc_outputs(quantizer: QuantizerLike, x: Tensor) -> list[Tensor]:
    """Allocate the buffers of a quantized ``x``: ``alloc_slots`` with shapes that are computed once."""
    device = x.device
    try:
        layouts = _known_layouts(quantizer.canonical, x.shape)
    except TypeError:  # symbolic sizes have no hash
        return alloc_slots(quantizer.slots, x.shape, device)
    # torch reads given strides faster than it computes them: a third of the call.
    return [
        torch.zeros(size, dtype=dtype, device=device)
        if cleared
        else torch.empty_strided(size, stride, dtype=dtype, device=device)
        for size, stride, dtype, cleared in layouts
    ]


def by_name(quantizer: QuantizerLike, buffers: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return a dict from slot name to buffer, from buffers in slot order."""
    return {slot.name: buffer for slot, buffer in zip(quantizer.slots, buffers, strict=False)}


def transposed(
    quantizer: QuantizerLike, buffers: Sequence[Tensor]
) -> tuple[QuantizerLike, list[Tensor]]:
    """Return the quantizer and the buffers of the transpose of a matrix; the buffers are views."""
    twin, moves = quantizer.transpose_plan
    named = by_name(quantizer, buffers)
    return twin, [named[name] if turn is None else turn(named[name]) for _, name, turn in moves]
