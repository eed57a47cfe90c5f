"""Register quantizers, parse their canonical strings and allocate their buffers.

Ops and kernels use the interface ``QuantizerLike``. The classes themselves are in ``quantizers/``,
above the ops that they call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import (
    Shape,
    buffer_shape,
    buffer_shapes,
    contiguous_strides,
    has_padding,
)
from qtensor.core.compile_constants import forget_constants
from qtensor.core.encoding import decode_call
from qtensor.core.errors import DtypeError, fail
from qtensor.core.formats import Element, FormatSpec, Slot

Move = tuple[str, str, Callable[[Tensor], Tensor] | None]
"""One buffer of a transposed tensor: the keyword of the new buffer in the constructor, the name of
the old one, and what makes a view of it; None for the buffer as it is.
"""


class Factors(TypedDict, total=False):
    """Factors that a tensor holds, as arguments of the op ``quantize``."""

    scale: Tensor
    amax: list[Tensor]


class QuantizerLike(Protocol):
    """Declare the attributes and methods of a quantizer that ops, kernels and storages use.

    ``qtensor/quantizers/base.py: Quantizer`` explains them. As there, everything that is not an
    option is a ``ClassVar``.
    """

    format: ClassVar[str]
    spec: ClassVar[FormatSpec]
    tensor_cls: ClassVar[type[Any]]
    storage_cls: ClassVar[type[Any]]
    canonical: ClassVar[str]
    slots: ClassVar[tuple[Slot, ...]]
    slot_names: ClassVar[tuple[str, ...]]
    keywords: ClassVar[tuple[str, ...]]
    """Keyword of each slot's buffer in the constructor of the tensor class."""
    attributes: ClassVar[tuple[tuple[str, str], ...]]
    """(attribute of the tensor, keyword of its constructor) of each slot."""
    scale_layout: ClassVar[str]
    per_tensor: ClassVar[bool]
    """True if the whole tensor has one factor, which a GEMM can apply at its end."""
    returns_amax: ClassVar[bool]
    """True if the op returns the tensor's amax after the buffers (delayed scaling)."""
    stochastic_rounding: ClassVar[bool]
    """True if a call must pass ``seed=``."""
    needs_scale: ClassVar[bool]
    """True if a call must pass ``scale=`` (delayed scaling)."""

    @property
    def rowwise(self) -> bool:
        """True if there are rowwise data."""

    @property
    def columnwise(self) -> bool:
        """True if there are columnwise data."""

    @property
    def columnwise_value(self) -> bool:
        """True if the columnwise data hold the values, although there are rowwise data."""

    @property
    def element(self) -> Element:
        """The element of the codes."""

    @property
    def two_dimensional(self) -> bool:
        """True if blocks are square and both directions share them."""

    @property
    def square_block(self) -> int:
        """The rows, and columns, of a square block; 1 if blocks are not square."""

    @property
    def factors_are_local(self) -> bool:
        """True if a value depends on its own code and factors alone; a rotation mixes elements."""

    @property
    def transpose_plan(self) -> tuple[QuantizerLike, tuple[Move, ...]]:
        """The quantizer of a transposed 2-D tensor, and how its buffers come about."""

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
        """Return the values of the buffers, float32 of ``shape``."""

    def decode_codes(self, buffers: dict[str, Tensor], shape: Shape) -> tuple[Tensor, Tensor]:
        """Return float32 element values of ``shape`` without the factor, and the (1,) factor."""

    def derive(
        self, buffers: dict[str, Tensor], shape: Shape, usage: str
    ) -> dict[str, Tensor] | None:
        """Return buffers of ``usage``, made exactly from the other direction, or None."""

    def without_square_blocks(self) -> QuantizerLike:
        """Return the quantizer of rows that were cut across square blocks."""

    def transposed(self) -> QuantizerLike:
        """Return the quantizer of a transposed tensor; it swaps the usages."""

    def side(self, columnwise: bool | None = None) -> str:
        """Return the buffers that a decode reads: ``"_rowwise"`` or ``"_columnwise"``."""

    def is_requantization_safe(self) -> bool:
        """Return True if quantizing the same data again gives the same bytes."""

    def update_quantized(
        self,
        src: Tensor,
        dst: Any,
        *,
        noop_flag: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Any:
        """Quantize ``src`` into the buffers of ``dst``, a tensor or storage."""

    def quantize(self, x: Tensor) -> Any:
        """Return a quantized tensor."""

    def _assemble(self, buffers: Sequence[Tensor], shape: Shape, dtype: torch.dtype) -> Any:
        """Return a quantized tensor with buffers that an op has allocated, without checks."""

    def alloc_tensors(
        self, shape: Shape, *, device: torch.device | str | None = None
    ) -> dict[str, Tensor]:
        """Return uninitialised buffers by attribute; padding is zero."""

    def _describe_buffers(self, shape: Shape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return {attribute: (shape, dtype)} in slot order for a tensor of logical ``shape``."""

    def stored_factors(self, buffers: dict[str, Tensor]) -> Factors:
        """Return arguments that make the quantize op use the tensor-wide factors of ``buffers``."""

    def global_factors(self, buffers: dict[str, Tensor], side: str) -> Tensor | None:
        """Return the tensor-wide factors of one side that multiply those of blocks, or None."""

    @property
    def learns_factor(self) -> bool:
        """Whether training can learn the tensor-wide factor."""

    @property
    def largest_code(self) -> float:
        """What a tensor's amax is divided by to give its decode factor."""

    def factor_slopes(self, buffers: dict[str, Tensor], x: Tensor, factor: Tensor) -> Tensor:
        """Return the derivatives of the decoded values by the tensor-wide decode factor."""

    def amax(self, x: Tensor) -> list[Tensor]:
        """Return the float32 maxima that decide the tensor-wide factors of ``x``."""

    def amax_shapes(self, shape: Shape) -> list[tuple[int, ...]]:
        """Return the shapes of the maxima that ``amax`` returns."""

    def with_usage(
        self, *, rowwise: bool | None = None, columnwise: bool | None = None
    ) -> QuantizerLike:
        """Return a new quantizer with the same options and other usages."""


_CLASSES: dict[str, type] = {}


def register_quantizer(name: str, cls: type) -> None:
    """Make ``cls`` the quantizer class of format ``name``.

    Raises:
        QTensorError: another class has the name.
    """
    known = _CLASSES.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (
        cls.__module__,
        cls.__qualname__,
    ):
        fail(
            f"format {name!r}",
            "a format has one quantizer class",
            f"{cls.__qualname__} and {known.__qualname__}",
            "Choose another format name",
        )
    _CLASSES[name] = cls
    parse.cache_clear()
    _known_layouts.cache_clear()
    forget_constants()


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
            f"Choose one of: {', '.join(format_names())}; for a format of your own, import "
            "the module that defines it",
        )
    return _CLASSES[name]


def format_names() -> tuple[str, ...]:
    """Return the registered formats, in order of registration."""
    return tuple(_CLASSES)


@functools.lru_cache(maxsize=4096)
def parse(canonical: str) -> QuantizerLike:
    """Return the quantizer of a canonical string such as ``"mxfp8(columnwise=True)"``.

    Raises:
        QTensorError: unknown format, unknown option or malformed string.
    """
    name, words = decode_call(canonical)
    cls = quantizer_class(name)
    return cls(**{
        option: _value(word, getattr(cls, option, None)) for option, word in words.items()
    })


def _value(option: str, default: object) -> object:
    """Return an option of a canonical string as the type of its default.

    A string that cannot be converted is returned unchanged, and the quantizer refuses it.
    """
    if isinstance(default, bool):
        return {"True": True, "False": False}.get(option, option)
    if isinstance(default, int | float):
        try:
            return type(default)(option)
        except ValueError:
            return option
    return option


def alloc_slots(slots: Sequence[Slot], shape: Shape, device: torch.device) -> list[Tensor]:
    """Allocate the inner buffers of a tensor of ``shape``, in slot order.

    Buffers with padding start as zeros, because fills never write the padding.
    """
    buffers, static = [], all(type(n) is int for n in shape)
    for slot, size in zip(slots, buffer_shapes(slots, shape), strict=True):
        cleared = has_padding(slot, shape) if static else slot.padded
        make = torch.zeros if cleared else torch.empty
        buffers.append(make(size, dtype=slot.dtype, device=device))
    return buffers


class _Layout(NamedTuple):
    """Describe the buffer of a slot: how it is allocated, and which sizes it may have.

    Attributes:
        size: shape of the buffer of a whole tensor.
        least: the same without padding; the buffer of a slice has a shape between both.
        stride: contiguous strides of ``size``.
        dtype: of the buffer.
        cleared: True if the buffer has padding and starts as zeros.
    """

    size: tuple[int, ...]
    least: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    cleared: bool


@functools.lru_cache(maxsize=4096)
def _known_layouts(canonical: str, shape: Shape) -> tuple[_Layout, ...]:
    slots = parse(canonical).slots
    layouts = []
    for slot, size in zip(slots, buffer_shapes(slots, shape), strict=True):
        unpadded = tuple(dataclasses.replace(dim, pad=1) for dim in slot.dims)
        # Tiles of swizzled scales are whole in a slice too.
        least = size if slot.swizzled else buffer_shape(unpadded, shape)
        stride, cleared = contiguous_strides(size), has_padding(slot, shape)
        layouts.append(_Layout(tuple(size), tuple(least), stride, slot.dtype, cleared))
    return tuple(layouts)


def alloc_outputs(quantizer: QuantizerLike, x: Tensor) -> list[Tensor]:
    """Allocate the buffers of a quantized ``x``, in slot order.

    This is ``alloc_slots`` with a cache of the shapes.

    Args:
        quantizer: describes the buffers.
        x: high-precision tensor of any shape; its shape and device are read.
    """
    device = x.device
    try:
        layouts = _known_layouts(quantizer.canonical, x.shape)
    except TypeError:  # symbolic sizes have no hash
        return alloc_slots(quantizer.slots, x.shape, device)
    # Hot path: torch does not compute strides that it gets.
    return [
        torch.zeros(size, dtype=dtype, device=device)
        if cleared
        else torch.empty_strided(size, stride, dtype=dtype, device=device)
        for size, _, stride, dtype, cleared in layouts
    ]


def check_buffers(
    op: str, quantizer: QuantizerLike, buffers: Sequence[Tensor], shape: Shape
) -> None:
    """Refuse buffers that do not make up a tensor of ``shape``, or a part of one.

    Args:
        op: the calling op, for errors.
        quantizer: describes the buffers.
        buffers: inner buffers in slot order.
        shape: the logical shape. Symbolic sizes are not compared with the buffers, which would
            bind a graph to one size.

    Raises:
        QTensorError: the number of buffers is wrong, or a buffer has a wrong dtype, layout, shape
            or device; the message names the slot of the buffer.
    """
    slots = quantizer.slots
    if len(buffers) != len(slots):
        needed = ", ".join(slot.name for slot in slots)
        rule = f"{quantizer.canonical} needs {len(slots)} buffers: {needed}"
        fix = "Pass the list that buffers() returns; the amax of delayed scaling is not one of them"
        fail(op, rule, len(buffers), fix)
    for slot, buffer in zip(slots, buffers, strict=True):
        if not isinstance(buffer, Tensor) or buffer.dtype != slot.dtype:
            got = buffer.dtype if isinstance(buffer, Tensor) else type(buffer).__name__
            rule = f"{slot.name} must be a {slot.dtype} tensor"
            fail(op, rule, got, "Pass the buffers in slot order", DtypeError)
    if torch.compiler.is_compiling():
        return
    for slot, buffer in zip(slots, buffers, strict=True):
        if buffer.layout is not torch.strided or hasattr(buffer, "_quantizer"):
            kind = "a quantized one" if hasattr(buffer, "_quantizer") else buffer.layout
            fail(op, f"{slot.name} must be a dense, plain tensor", kind, "Convert it", DtypeError)
        if buffer.device != buffers[0].device:
            devices = f"{slot.name} on {buffer.device}, {slots[0].name} on {buffers[0].device}"
            fail(op, "buffers must be on one device", devices, "Move them with .to(device)")
    try:
        layouts = _known_layouts(quantizer.canonical, tuple(shape))
    except TypeError:  # symbolic sizes have no hash
        return
    for slot, buffer, layout in zip(slots, buffers, layouts, strict=True):
        size, most = tuple(buffer.shape), layout.size
        if size != most and not (
            len(size) == len(most)
            and all(a <= n <= b for a, n, b in zip(layout.least, size, most, strict=True))
        ):
            rule = f"{slot.name} of a tensor of shape {tuple(shape)} must have shape {most}"
            fail(op, rule, size, "Pass the buffers of that tensor, or its shape")


def by_name(quantizer: QuantizerLike, buffers: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return a dict from slot name to buffer for buffers in slot order; others are ignored."""
    return {slot.name: buffer for slot, buffer in zip(quantizer.slots, buffers, strict=False)}


@functools.lru_cache(maxsize=4096)
def slots_within(canonical: str, part: str) -> tuple[int, ...]:
    """Return the slots of ``canonical`` that hold the buffers of ``part``; () for "".

    Raises:
        QTensorError: ``part`` has a buffer that ``canonical`` does not have.
    """
    if not part:
        return ()
    slots, wanted = parse(canonical).slots, parse(part).slots
    if not set(wanted) <= set(slots):
        rule = f"only buffers of the quantizer {canonical} can be named"
        fail("quantizer", rule, part, "Name one of its usages")
    return tuple(slots.index(slot) for slot in wanted)


@functools.lru_cache(maxsize=4096)
def usage_part(canonical: str, usage: str) -> tuple[tuple[int, ...], str]:
    """Return the slots of a usage and the canonical string of these buffers alone.

    The result is ((), "") if the quantizer has no such buffers.
    """
    quantizer = parse(canonical)
    if not getattr(quantizer, usage):
        return (), ""
    twin = quantizer.with_usage(rowwise=usage == "rowwise", columnwise=usage == "columnwise")
    return slots_within(canonical, twin.canonical), twin.canonical


def readable_part(canonical: str, usage: str) -> tuple[tuple[int, ...], str]:
    """Return ``usage_part``, or all buffers if that usage has none of its own."""
    slots, part = usage_part(canonical, usage)
    return (slots, part) if slots else (tuple(range(len(parse(canonical).slots))), canonical)


def transposed(
    quantizer: QuantizerLike, buffers: Sequence[Tensor]
) -> tuple[QuantizerLike, list[Tensor]]:
    """Return the quantizer and the buffers of a transposed matrix.

    Args:
        quantizer: of the (M, K) matrix.
        buffers: of the (M, K) matrix, in slot order.

    Returns:
        The quantizer of the (K, M) matrix, and its buffers, which are views of ``buffers``.
    """
    target, moves = quantizer.transpose_plan
    named = by_name(quantizer, buffers)
    return target, [
        named[name] if make_view is None else make_view(named[name]) for _, name, make_view in moves
    ]
