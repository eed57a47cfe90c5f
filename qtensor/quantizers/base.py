"""Define the base of quantizers: a frozen value that describes buffers and calls the ops."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, cast, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from qtensor.core.buffer_shapes import Shape, buffer_shapes
from qtensor.core.encoding import encode_call
from qtensor.core.errors import UnsupportedError, fail
from qtensor.core.formats import PLAIN, SWIZZLED, Element, FormatSpec, Slot, resolve_slots
from qtensor.core.quantizer_registry import (
    Factors,
    Move,
    QuantizerLike,
    alloc_slots,
    check_buffers,
    parse,
    register_quantizer,
)
from qtensor.library.quantize import QUANTIZE_
from qtensor.quantizers.call import (
    assembled,
    check_arguments,
    check_destination,
    constants_of,
    find_maxima,
    find_seed,
    quantize_call,
    refuse_gradient,
)
from qtensor.quantizers.methods import FormatMethods, Grid
from qtensor.quantizers.options import (
    check_choice,
    check_options,
    find_element,
    option_word,
    refuse_unknown,
)
from qtensor.storage import geometry
from qtensor.storage.base import Context, QuantizedTensorStorage
from qtensor.storage.checks import as_shape, check_nominal
from qtensor.storage.process_groups import Group
from qtensor.storage.tensor import QuantizedTensor

_FORMAT_ID = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Quantizer(FormatMethods):
    """Hold the options of a format as a value: hashable, equal by value, a compile-time constant.

    A quantizer holds no live state. Process groups, generators and the scales of delayed scaling
    are arguments of a call.

    Attributes:
        rowwise: produce data whose blocks run along the last dim.
        columnwise: produce data whose blocks run along the leading dims.
        columnwise_value: with both usages, dequantize the columnwise data. A transpose sets this
            option, so that values stay equal if the directions are quantized independently.
    """

    rowwise: bool = True
    columnwise: bool = False
    columnwise_value: bool = False

    format: ClassVar[str]
    """The id of the format."""
    spec: ClassVar[FormatSpec]
    tensor_cls: ClassVar[type[QuantizedTensor]]
    storage_cls: ClassVar[type[QuantizedTensorStorage]]
    per_tensor: ClassVar[bool] = False
    """True if the whole tensor has one factor, which a GEMM can apply at its end."""
    returns_amax: ClassVar[bool] = False
    """True if the quantize op returns the amax after the buffers (delayed scaling)."""
    needs_scale: ClassVar[bool] = False
    """True if a call must pass ``scale=`` (delayed scaling)."""
    grid_cls: ClassVar[type[Grid] | None] = None
    """Builds tensors from chosen codes and factors; None: the format only rounds to nearest."""
    stochastic_rounding: ClassVar[bool] = False
    """True if a call draws random bytes; some formats have a field with this name."""

    _option_names: ClassVar[tuple[str, ...]] = ("rowwise", "columnwise", "columnwise_value")
    canonical: ClassVar[str]
    """The canonical string, ``format(option=value,...)``, which is an argument of ops."""
    slots: ClassVar[tuple[Slot, ...]]
    """The buffers that this quantizer fills, in slot order."""
    slot_names: ClassVar[tuple[str, ...]]
    """Names of the slots."""
    keywords: ClassVar[tuple[str, ...]]
    """Constructor keywords of the slots."""
    attributes: ClassVar[tuple[tuple[str, str], ...]]
    """(attribute, constructor keyword) of each slot."""
    scale_layout: ClassVar[str]
    """``"plain"`` or ``"swizzled_32_4_4"``."""

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = [n for n, kind in inspect.get_annotations(cls).items() if "ClassVar" not in str(kind)]
        # dataclasses.fields does not trace on a class, so the class stores the names.
        cls._option_names = tuple(dict.fromkeys((*cls._option_names, *own)))
        if abstract:
            return
        if "format" not in cls.__dict__:
            fail(
                f"class {cls.__qualname__}",
                "a quantizer class needs its own format id, by which ops find the class",
                "none",
                'Add format = "my_format" to the class body',
            )
        if not _FORMAT_ID.fullmatch(cls.format):
            fail(
                f"class {cls.__qualname__}",
                "a format id is made of letters, digits and underscores",
                repr(cls.format),
                'Choose another id, for example format = "my_format"',
            )
        register_quantizer(cls.format, cls)

    def __new__(cls, *args: object, **options: object) -> Self:
        """Refuse unknown options with an error that lists the known ones."""
        refuse_unknown(cls.format, cls.option_names(), options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_options(self)
        if "dtype" in self._option_names:
            check_choice(self, "dtype", tuple(e.name for e in self.spec.elements))
        if self.columnwise_value and not (self.rowwise and self.columnwise):
            object.__setattr__(self, "columnwise_value", False)
        object.__setattr__(self, "slots", resolve_slots(self.spec, self))
        object.__setattr__(self, "slot_names", tuple(slot.name for slot in self.slots))
        object.__setattr__(self, "keywords", tuple(slot.keyword for slot in self.slots))
        object.__setattr__(self, "attributes", tuple((s.name, s.keyword) for s in self.slots))
        object.__setattr__(self, "canonical", self._canonical())
        object.__setattr__(
            self, "scale_layout", SWIZZLED if getattr(self, "swizzled", False) else PLAIN
        )

    def _canonical(self) -> str:
        """Return ``format(option=value,...)`` with the options that differ from their defaults."""
        words = {name: option_word(value) for name, value in self.changed_options().items()}
        return encode_call(self.format, words)

    def changed_options(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        changed = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value != self._default(f.name, f.default):
                changed[f.name] = value
        return changed

    def _default(self, name: str, value: object) -> object:
        """Return the default of an option; ``value`` is the default of its field."""
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return parse, (self.canonical,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return this object: it is immutable, and guards compare identical objects faster."""
        return self

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Return the names of the format's options."""
        return cls._option_names

    @functools.cached_property
    def element(self) -> Element:
        """Return the element named by the ``dtype`` option, or the first element of the format."""
        name = getattr(self, "dtype", None)
        return self.spec.elements[0] if name is None else find_element(self.spec.elements, name)

    # ---- values

    def with_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> Self:
        """Return a quantizer with the same options and other usages."""
        row = self.rowwise if rowwise is None else rowwise
        column = self.columnwise if columnwise is None else columnwise
        if row == self.rowwise and column == self.columnwise:
            return self
        return dataclasses.replace(self, rowwise=row, columnwise=column)

    def transposed(self) -> Self:
        """Return the quantizer of a transposed tensor; it swaps the usages."""
        return self._transposed

    @functools.cached_property
    def _transposed(self) -> Self:
        # Hot path: each `stack.mT` asks for it.
        return dataclasses.replace(self, **self._transposed_options())

    @property
    def two_dimensional(self) -> bool:
        """Return True if blocks are square and shared by both directions."""
        return False

    @property
    def square_block(self) -> int:
        """Return the rows, and columns, of a square block; 1 if blocks are not square."""
        block = self.spec.block
        return block[1] if block is not None and self.two_dimensional else 1

    def without_square_blocks(self) -> Self:
        """Return the quantizer of rows that were cut across square blocks."""
        return self

    @property
    def value_block(self) -> tuple[int, int] | None:
        """Return the (rows, columns) that share a factor of the data that ``dequantize`` reads.

        None means that the whole tensor, or a whole row, shares a factor.
        """
        block = self.spec.block
        if block is None or self.two_dimensional:
            return block and (block[1], block[1])
        return block if self.side() == "_rowwise" else block[::-1]

    @property
    def factors_are_local(self) -> bool:
        """Return True if a value depends on its own code and factors alone.

        A rotation mixes elements, so it makes this False.
        """
        return True

    @functools.cached_property
    def transpose_plan(self) -> tuple[QuantizerLike, tuple[Move, ...]]:
        """Return the cached ``geometry.transpose_plan`` of this value."""
        return geometry.transpose_plan(self)

    def _transposed_options(self) -> dict[str, Any]:
        """Return the options that change when a tensor is transposed."""
        independent = self.rowwise and self.columnwise and not self.spec.transpose_shares_bytes
        return {
            "rowwise": self.columnwise,
            "columnwise": self.rowwise,
            "columnwise_value": independent and not self.columnwise_value,
        }

    def side(self, columnwise: bool | None = None) -> str:
        """Return the buffers that a decode reads: ``"_rowwise"`` or ``"_columnwise"``.

        Args:
            columnwise: True to prefer columnwise data, False to prefer rowwise data, None for the
                data that hold the values.
        """
        wanted = self.columnwise_value if columnwise is None else columnwise
        return "_columnwise" if self.columnwise and (wanted or not self.rowwise) else "_rowwise"

    def stored_factors(self, buffers: dict[str, Tensor]) -> Factors:
        """Return arguments that make the quantize op use the tensor-wide factors of ``buffers``."""
        return {}

    def global_factors(self, buffers: dict[str, Tensor], side: str) -> Tensor | None:
        """Return the tensor-wide decode factors that multiply those of blocks; None without them.

        Args:
            buffers: by name.
            side: ``"_rowwise"`` or ``"_columnwise"``.

        Returns:
            float32, (1,) or one for each row of that side.
        """
        return None

    def is_requantization_safe(self) -> bool:
        """Return True if quantizing the same data again gives the same bytes.

        Delayed scaling and stochastic rounding give other bytes.
        """
        return not (self.needs_scale or self.stochastic_rounding)

    # ---- calls

    def __call__(self, x: Tensor, **call: Any) -> QuantizedTensor:
        """Quantize a tensor; see ``quantize``."""
        return self.quantize(x, **call)

    def quantize(
        self,
        x: Tensor,
        *,
        out: QuantizedTensorStorage | None = None,
        scale: Tensor | None = None,
        generator: torch.Generator | Tensor | None = None,
        amax_reduction_group: Group | None = None,
        noop_flag: Tensor | None = None,
    ) -> QuantizedTensor:
        """Return a quantized tensor.

        Args:
            x: any shape; float32, bfloat16 or float16; any strides. If ``x`` already has this
                quantizer, the result shares its buffers.
            out: write into this tensor or storage instead of making a new one; it must have this
                quantizer and shape. As with every ``out=``, an input that requires grad is refused.
            scale: float32 (1,), the stored encode factor; required by delayed scaling, refused by
                others.
            generator: for stochastic rounding: a ``torch.Generator``, or the seed as an int64
                tensor (1,), which can be an argument of a compiled function. Default: the
                device's generator.
            amax_reduction_group: a process group over which tensor-wide maxima are reduced first.
            noop_flag: with ``out``: a tensor of one element. If the element is not zero, no byte
                changes.

        Returns:
            A tensor subclass of the shape and dtype of ``x`` (or ``out``).

        Raises:
            QTensorError: an argument has a wrong dtype, layout or value.
        """
        group = amax_reduction_group
        if out is None:
            quantizer = constants_of(self.canonical) if is_compiling() else self
            return quantize_call(quantizer, x, scale, generator, group, noop_flag)[0]
        refuse_gradient(f"quantize[{self.format}]", x)
        filled = self.update_quantized(
            x,
            out,
            noop_flag=noop_flag,
            scale=scale,
            generator=generator,
            amax_reduction_group=group,
        )
        return cast("QuantizedTensor", filled)

    def quantize_with_amax(self, x: Tensor, *, scale: Tensor) -> tuple[QuantizedTensor, Tensor]:
        """Return the tensor that delayed scaling makes, and its amax.

        Args:
            x: any shape; float32, bfloat16 or float16.
            scale: float32 (1,), the stored encode factor.

        Returns:
            The tensor, and its amax, float32 (1,), to be recorded in the amax history.

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
        quantizer = constants_of(self.canonical) if is_compiling() else self
        return cast("tuple[QuantizedTensor, Tensor]", quantize_call(quantizer, x, scale))

    @overload
    def assemble(
        self,
        buffers: Sequence[Tensor],
        shape: Shape | int,
        dtype: torch.dtype,
        bare: Literal[False] = False,
    ) -> QuantizedTensor: ...

    @overload
    def assemble(
        self, buffers: Sequence[Tensor], shape: Shape | int, dtype: torch.dtype, bare: bool
    ) -> QuantizedTensorStorage: ...

    def assemble(
        self, buffers: Sequence[Tensor], shape: Shape | int, dtype: torch.dtype, bare: bool = False
    ) -> QuantizedTensorStorage:
        """Return a tensor or bare storage with existing buffers.

        Args:
            buffers: all inner buffers, in slot order.
            shape: the logical shape.
            dtype: the nominal dtype.
            bare: True to return a storage instead of a tensor.

        Raises:
            QTensorError: the number of buffers is wrong, or a buffer has a wrong dtype, shape or
                device.
        """
        op = f"assemble[{self.format}]"
        shape = as_shape(op, shape)
        check_nominal(op, dtype)
        check_buffers(op, self, buffers, shape)
        if bare:
            named = dict(zip(self.keywords, buffers, strict=True))
            return self.storage_cls(shape, dtype, self, **named)
        return self._assemble(buffers, shape, dtype)

    def _assemble(
        self, buffers: Sequence[Tensor], shape: Shape, dtype: torch.dtype
    ) -> QuantizedTensor:
        """Return a tensor with buffers that an op has allocated, without checks."""
        return assembled(self, buffers, shape, dtype)

    def update_quantized(
        self,
        src: Tensor,
        dst: QuantizedTensorStorage,
        *,
        noop_flag: Tensor | None = None,
        scale: Tensor | None = None,
        generator: torch.Generator | Tensor | None = None,
        amax_reduction_group: Group | None = None,
    ) -> QuantizedTensorStorage:
        """Quantize ``src`` into the buffers of ``dst`` without a gradient, and return ``dst``.

        Args:
            src: float32, bfloat16 or float16, of the shape of ``dst``.
            dst: a whole tensor or storage with this quantizer.
            noop_flag: a tensor of one element, read on the device. If the element is not zero, no
                byte of ``dst`` changes.
            scale: as in ``quantize``; by default the factor that ``dst`` holds.
            generator: as in ``quantize``.
            amax_reduction_group: as in ``quantize``.

        Raises:
            QTensorError: ``dst`` has another shape or quantizer, or is a part of a tensor. It stays
                unchanged.
        """
        check_arguments(self, src, scale, noop_flag, has_out=True)
        check_destination(self, src, dst, noop_flag)
        if self.needs_scale and scale is None:
            scale = dst._scale_inv.reciprocal()
        src = src.detach()
        seed = find_seed(self, src, generator)
        group = amax_reduction_group
        amax = None if group is None else find_maxima(self, src, group)
        QUANTIZE_(src, self.canonical, dst.buffers(), scale, amax, seed, noop_flag)
        if isinstance(dst, torch.Tensor):
            # The op changes only the buffers; autograd must know that the tensor changed.
            torch.autograd.graph.increment_version(dst)
        return dst

    # ---- data-free primitives

    def _describe_buffers(self, shape: Shape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return {attribute: (shape, dtype)} in slot order for a tensor of logical ``shape``."""
        sizes = buffer_shapes(self.slots, shape)
        return {slot.name: (size, slot.dtype) for slot, size in zip(self.slots, sizes, strict=True)}

    def _storage_metadata(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the class, and the constructor arguments that are not tensors."""
        return {"cls": self.tensor_cls, "nontensor_kwargs": {"dtype": dtype, "quantizer": self}}

    def alloc_tensors(
        self, shape: Shape, *, device: torch.device | str | None = None
    ) -> dict[str, Tensor]:
        """Return uninitialised buffers by attribute; padding is zero."""
        tensors = alloc_slots(self.slots, shape, torch.device(device or "cpu"))
        return {slot.name: tensor for slot, tensor in zip(self.slots, tensors, strict=True)}

    def create_metadata(
        self, shape: Shape, *, dtype: torch.dtype, requires_grad: bool = False
    ) -> Context:
        """Return the flatten context of a tensor that this quantizer makes; it holds no sizes."""
        return (self.tensor_cls.__qualname__, dtype, self, self.scale_layout)

    def make_empty(
        self,
        shape: Shape | int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        """Return a tensor with uninitialised buffers, which ``quantize(x, out=)`` can fill.

        Args:
            shape: the logical shape.
            dtype: the nominal dtype.
            device: device of the buffers; the CPU if None.
            requires_grad: True if the tensor requires grad.

        Raises:
            DtypeError: the nominal dtype is not floating.
            QTensorError: a size is not an integer, or is negative.
        """
        op = f"make_empty[{self.format}]"
        check_nominal(op, dtype)
        shape = as_shape(op, shape)
        tensors = self.alloc_tensors(shape, device=device).values()
        tensor = self._assemble(list(tensors), shape, dtype)
        if requires_grad:
            tensor.requires_grad_()
        return tensor
