"""The quantizer base: a frozen value that knows its buffers, its canonical string and how to call the ops."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.compiler import is_compiling

from qtensor.errors import UnsupportedError, fail
from qtensor.formats import PLAIN, SWIZZLED, Element, FormatSpec, Slot, resolve_slots
from qtensor.layout import Shape, buffer_shapes
from qtensor.library.codec import alloc_slots, parse, register_codec
from qtensor.library.quantize import QUANTIZE_
from qtensor.quantizers.autograd import assembled, quantize_traced, quantized
from qtensor.quantizers.calls import (
    check_call,
    prepare,
    refuse_gradient,
)
from qtensor.quantizers.options import (
    canonical_value,
    check_choice,
    check_options,
    find_element,
    refuse_unknown,
)
from qtensor.storage import geometry
from qtensor.storage.base import Context, QuantizedTensorStorage
from qtensor.storage.checks import as_shape, check_buffers, check_nominal, check_whole
from qtensor.storage.tensor import QuantizedTensor


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """Options of a format as a value: hashable, equal by value, safe as a compile-time constant.

    Live state (process groups, generators, delayed-scaling scales) is never inside: it comes as arguments of the call.

    Attributes:
        rowwise: produce data whose blocks run along the last dim.
        columnwise: produce data whose blocks run along the leading dims.
        columnwise_value: with both usages, dequantize the columnwise data. Transposing sets it, so that a transposed
            tensor keeps its values where the directions are quantized independently.
    """

    rowwise: bool = True
    columnwise: bool = False
    columnwise_value: bool = False

    format: ClassVar[str]
    """The format's id."""
    spec: ClassVar[FormatSpec]
    tensor_cls: ClassVar[type[QuantizedTensor]]
    storage_cls: ClassVar[type[QuantizedTensorStorage]]
    per_tensor: ClassVar[bool] = False
    """One factor for the whole tensor, which a GEMM can apply at its end."""
    returns_amax: ClassVar[bool] = False
    """The quantize op returns the amax after the buffers (delayed scaling)."""
    needs_scale: ClassVar[bool] = False
    """A call must bring ``scale=`` (delayed scaling)."""
    stochastic_rounding: ClassVar[bool] = False
    """Whether a call draws random bytes; formats that can have it as an option."""

    _option_names: ClassVar[tuple[str, ...]] = ("rowwise", "columnwise", "columnwise_value")
    canonical: ClassVar[str]
    """The value as text: ``format(option=value,...)``; what crosses an op boundary."""
    slots: ClassVar[tuple[Slot, ...]]
    """The buffers that this quantizer fills, in slot order."""
    keywords: ClassVar[tuple[str, ...]]
    """Constructor keywords of the slots."""
    attributes: ClassVar[tuple[tuple[str, str], ...]]
    """(attribute, constructor keyword) of each slot."""
    scale_layout: ClassVar[str]
    """``"plain"`` or ``"swizzled_32_4_4"``."""

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = [n for n, kind in inspect.get_annotations(cls).items() if "ClassVar" not in str(kind)]
        # dataclasses.fields does not trace on a class, so the names are kept beside it.
        cls._option_names = tuple(dict.fromkeys((*cls._option_names, *own)))
        if abstract:
            return
        if "format" not in cls.__dict__:
            fail(
                f"class {cls.__qualname__}",
                "a quantizer class needs a format id of its own, by which ops find it",
                "none",
                'Add format = "my_format" to the class body',
            )
        register_codec(cls.format, cls)

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Refuse options that the format does not have, before the dataclass's own bare TypeError."""
        refuse_unknown(cls.format, cls.option_names(), options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_options(self)
        if "dtype" in self._option_names:
            check_choice(self, "dtype", tuple(e.name for e in self.spec.elements))
        if self.columnwise_value and not (self.rowwise and self.columnwise):
            object.__setattr__(self, "columnwise_value", False)
        object.__setattr__(self, "slots", resolve_slots(self.spec, self))
        object.__setattr__(self, "keywords", tuple(slot.keyword for slot in self.slots))
        object.__setattr__(self, "attributes", tuple((s.name, s.keyword) for s in self.slots))
        object.__setattr__(self, "canonical", self._canonical())
        object.__setattr__(
            self, "scale_layout", SWIZZLED if getattr(self, "swizzled", False) else PLAIN
        )

    def _canonical(self) -> str:
        """``format(option=value,...)`` with the options that differ from their defaults."""
        changed = [
            f"{name}={canonical_value(value)}" for name, value in self.given_options().items()
        ]
        return f"{self.format}({','.join(changed)})" if changed else self.format

    def given_options(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        given = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value != self._default(f.name, f.default):
                given[f.name] = value
        return given

    def _default(self, name: str, value: Any) -> Any:
        """What an option is when it is not given; ``value`` is the field's default."""
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return parse, (self.canonical,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself, as of every value: what holds copies (guards of compiled graphs do) finds it equal at a glance."""
        return self

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """The options of the format."""
        return cls._option_names

    @functools.cached_property
    def element(self) -> Element:
        """The element that the ``dtype`` option names, or the format's first."""
        name = getattr(self, "dtype", None)
        return self.spec.elements[0] if name is None else find_element(self.spec.elements, name)

    # ---- values ------------------------------------------------------------------------------------------

    def with_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> Self:
        """The same options with other usages, as a new value."""
        row = self.rowwise if rowwise is None else rowwise
        column = self.columnwise if columnwise is None else columnwise
        if row == self.rowwise and column == self.columnwise:
            return self
        return dataclasses.replace(self, rowwise=row, columnwise=column)

    def transposed(self) -> Self:
        """The quantizer that describes the buffers of a transposed tensor: the usages change places."""
        return dataclasses.replace(self, **self._transposed_options())

    @property
    def two_dimensional(self) -> bool:
        """Whether blocks are square, shared by both directions."""
        return False

    def without_square_blocks(self) -> Self:
        """The quantizer of rows that were cut across square blocks, whose factors are stored once a row."""
        return self

    @property
    def value_block(self) -> tuple[int, int] | None:
        """(rows, columns) that share a factor of the data that ``dequantize`` reads; None: the tensor, or a row."""
        block = self.spec.block
        if block is None or self.two_dimensional:
            return block and (block[1], block[1])
        return block if self.side() == "_rowwise" else block[::-1]

    @property
    def factors_are_local(self) -> bool:
        """Whether a value depends on its own code and factors alone (False: a rotation mixes elements)."""
        return True

    @functools.cached_property
    def transpose_plan(self) -> Any:
        """See ``geometry.transpose_plan``; kept, since hashing a value costs as much as a view."""
        return geometry.transpose_plan(self)

    def _transposed_options(self) -> dict[str, Any]:
        """The options that change when a tensor is transposed."""
        independent = self.rowwise and self.columnwise and not self.spec.transpose_shares_bytes
        return {
            "rowwise": self.columnwise,
            "columnwise": self.rowwise,
            "columnwise_value": independent and not self.columnwise_value,
        }

    def side(self, columnwise: bool | None = None) -> str:
        """Which buffers a decode reads, ``"_rowwise"`` or ``"_columnwise"``: those asked for, where they are there."""
        wanted = self.columnwise_value if columnwise is None else columnwise
        return "_columnwise" if self.columnwise and (wanted or not self.rowwise) else "_rowwise"

    def kept_factors(self, buffers: dict[str, Tensor]) -> dict[str, Any]:
        """The op arguments (``scale``, ``amax``) that make an encode use the tensor-wide factors of ``buffers``."""
        return {}

    def is_requantization_safe(self) -> bool:
        """Whether quantizing the same data again gives the same bytes (False: delayed scaling, random rounding)."""
        return not (self.needs_scale or self.stochastic_rounding)

    # ---- calls -------------------------------------------------------------------------------------------

    def __call__(self, x: Tensor, **call: Any) -> Any:
        """The same as ``quantize``."""
        return self.quantize(x, **call)

    def quantize(
        self,
        x: Tensor,
        *,
        out: QuantizedTensorStorage | None = None,
        scale: Tensor | None = None,
        generator: torch.Generator | Tensor | None = None,
        amax_reduction_group: Any = None,
        noop_flag: Tensor | None = None,
    ) -> Any:
        """Quantize a tensor.

        Args:
            x: any shape; float32, bfloat16 or float16; any strides. One that has this quantizer already is answered with
                a tensor around its own buffers, as ``.to()`` does when there is nothing to convert.
            out: write into this tensor or storage instead of making a new one; it must have this quantizer and shape.
                Outside autograd, like every ``out=``: an input that requires grad is refused.
            scale: float32 (1,), the stored encode factor; delayed scaling only, where it is required.
            generator: for stochastic rounding: a ``torch.Generator``, or an int64 tensor (1,) used as the seed itself
                (the form that crosses a compile boundary). Default: the device's default generator.
            amax_reduction_group: a process group over which tensor-wide maxima are reduced first.
            noop_flag: with ``out``: a tensor of one element; non-zero leaves every byte of ``out`` as it is.

        Returns:
            A tensor subclass (or ``out``).

        Raises:
            QTensorError: bad dtype, layout or argument.
        """
        if out is not None:
            call = {
                "scale": scale,
                "generator": generator,
                "amax_reduction_group": amax_reduction_group,
            }
            refuse_gradient(self, x)
            return self.update_quantized(x, out, noop_flag=noop_flag, **call)
        if is_compiling():
            given = scale, generator, amax_reduction_group, noop_flag
            return quantize_traced(self.canonical, x, *given)
        check_call(self, x, scale, noop_flag, None)
        return quantized(self, x, scale, generator, amax_reduction_group)[0]

    def quantize_with_amax(self, x: Tensor, *, scale: Tensor) -> tuple[Any, Tensor]:
        """Delayed scaling: the tensor and its amax, float32 (1,), to be recorded in the amax history.

        Raises:
            UnsupportedError: the format has no delayed scaling.
        """
        if not self.returns_amax:
            fail(
                f"quantize_with_amax[{self.format}]",
                "only delayed scaling returns the amax",
                self.format,
                "Use fp8_delayed",
                UnsupportedError,
            )
        check_call(self, x, scale, None, None)
        tensor, amax = quantized(self, x, scale, None, None)
        return tensor, amax

    def assemble(
        self, buffers: Sequence[Tensor], shape: Shape | int, dtype: torch.dtype, bare: bool = False
    ) -> Any:
        """A tensor (or bare storage) around buffers in slot order: all of them, of that shape.

        Raises:
            QTensorError: another number of buffers, or one of another dtype, shape or device.
        """
        shape = as_shape(f"assemble[{self.format}]", shape)
        check_buffers(f"assemble[{self.format}]", self, buffers, shape, dtype)
        if bare:
            named = dict(zip(self.keywords, buffers, strict=True))
            return self.storage_cls(shape, dtype, self, **named)
        return self._assemble(buffers, shape, dtype)

    def _assemble(self, buffers: Sequence[Tensor], shape: Shape, dtype: torch.dtype) -> Any:
        """``assemble`` of what an op has allocated."""
        return assembled(self, buffers, shape, dtype)

    def update_quantized(
        self,
        src: Tensor,
        dst: QuantizedTensorStorage,
        *,
        noop_flag: Tensor | None = None,
        scale: Tensor | None = None,
        generator: torch.Generator | Tensor | None = None,
        amax_reduction_group: Any = None,
    ) -> QuantizedTensorStorage:
        """Requantize ``src`` into the buffers of ``dst``, outside autograd.

        Args:
            src: float32, bfloat16 or float16 of the shape of ``dst``.
            dst: a tensor or storage with this quantizer.
            noop_flag: one element; non-zero leaves every byte of ``dst`` as it is. Read on the device.
            scale: as in ``quantize``; by default the factor that ``dst`` holds.
            generator: as in ``quantize``.
            amax_reduction_group: as in ``quantize``.

        Raises:
            QTensorError: another shape or quantizer; ``dst`` is unchanged.
        """
        check_call(self, src, scale, noop_flag, dst)
        name = f"update_quantized[{self.format}]"
        got = getattr(dst, "_quantizer", None)
        if got != self:
            fail(
                name,
                "the destination must hold this quantizer's buffers",
                getattr(got, "canonical", type(dst).__name__),
                "Pass a tensor that this quantizer made, or leave out= away",
            )
        if getattr(dst, "_view_note", None) is not None:
            fail(
                name,
                "the destination must be a whole tensor",
                "a part of one",
                "Write into a part with part.copy_(values)",
            )
        if tuple(src.shape) != tuple(dst.shape):
            fail(
                name,
                "shapes must be equal",
                f"{tuple(src.shape)} into {tuple(dst.shape)}",
                "Quantize anew",
            )
        if noop_flag is not None and (
            not isinstance(noop_flag, torch.Tensor) or noop_flag.numel() != 1
        ):
            fail(
                name,
                "noop_flag must be a tensor of one element",
                repr(noop_flag),
                "Pass torch.tensor([0.0])",
            )
        check_whole(name, dst)
        if self.needs_scale and scale is None:
            scale = dst._scale_inv.reciprocal()
        src = src.detach()
        seed, amax = prepare(self, src, generator, amax_reduction_group)
        QUANTIZE_(src, self.canonical, dst.buffers(), scale, amax, seed, noop_flag)
        if isinstance(dst, torch.Tensor):
            # The op sees the buffers alone; autograd must see that the tensor changed.
            torch.autograd.graph.increment_version(dst)
        return dst

    # ---- data-free primitives ------------------------------------------------------------------------------

    def _describe_buffers(self, shape: Shape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """{attribute: (shape, dtype)} in slot order for a tensor of logical ``shape``."""
        sizes = buffer_shapes(self.slots, shape)
        return {slot.name: (size, slot.dtype) for slot, size in zip(self.slots, sizes, strict=True)}

    def _storage_metadata(self, dtype: torch.dtype) -> dict[str, Any]:
        """The class and the constructor arguments that are no tensors."""
        return {"cls": self.tensor_cls, "nontensor_kwargs": {"dtype": dtype, "quantizer": self}}

    def alloc_tensors(
        self, shape: Shape, *, device: torch.device | str | None = None
    ) -> dict[str, Tensor]:
        """Uninitialised buffers (padding zero) by attribute."""
        tensors = alloc_slots(self.slots, shape, torch.device(device or "cpu"))
        return {slot.name: tensor for slot, tensor in zip(self.slots, tensors, strict=True)}

    def create_metadata(
        self, shape: Shape, *, dtype: torch.dtype, requires_grad: bool = False
    ) -> Context:
        """The flatten context of a tensor that this quantizer makes. Sizes are not part of it."""
        return (self.tensor_cls.__qualname__, dtype, self, self.scale_layout)

    def make_empty(
        self,
        shape: Shape | int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> Any:
        """A tensor with uninitialised buffers, to be filled by ``quantize(x, out=)``.

        Raises:
            DtypeError: a nominal dtype that is not floating.
            QTensorError: sizes that are no integers, or negative.
        """
        op = f"make_empty[{self.format}]"
        check_nominal(op, dtype)
        shape = as_shape(op, shape)
        tensors = self.alloc_tensors(shape, device=device).values()
        tensor = self._assemble(list(tensors), shape, dtype)
        return tensor.requires_grad_() if requires_grad else tensor

    # ---- what a format defines -----------------------------------------------------------------------------

    def encode_(
        self,
        out: dict[str, Tensor],
        x: Tensor,
        scale: Tensor | None,
        amax: list[Tensor] | None,
        seed: Tensor | None,
    ) -> None:
        """Write every buffer of ``out`` from ``x`` (real tensors; inside the op)."""
        raise UnsupportedError(
            f"quantize[{self.format}]: {type(self).__qualname__} has no encode_. Define it."
        )

    def decode(
        self, buffers: dict[str, Tensor], shape: Shape, columnwise: bool | None = None
    ) -> Tensor:
        """Float32 values from the buffers of ``side(columnwise)``."""
        raise UnsupportedError(
            f"dequantize[{self.format}]: {type(self).__qualname__} has no decode. Define it."
        )

    def amax(self, x: Tensor) -> list[Tensor]:
        """The maxima behind tensor-wide factors; none for formats whose factors are all local."""
        return []

    def amax_shapes(self, shape: Shape) -> list[tuple[int, ...]]:
        """Shapes of what ``amax`` returns."""
        return []

    def derive(
        self, buffers: dict[str, Tensor], shape: Shape, usage: str
    ) -> dict[str, Tensor] | None:
        """Buffers of ``usage`` from those of the other direction, exactly, or None where that cannot be."""
        return None
