"""The quantizer base: a frozen value that knows its buffers, its canonical string and how to call the ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from qtensor.errors import DtypeError, QTensorError, UnsupportedError, check, fail
from qtensor.formats import Element, FormatSpec, Slot, resolve_slots
from qtensor.layout import Shape, buffer_shape
from qtensor.library.codec import alloc_slots, parse, register_codec
from qtensor.library.quantize import AMAX, QUANTIZE, QUANTIZE_, RANDOM_SEED
from qtensor.quantizers.autograd import QuantizeFunction
from qtensor.quantizers.options import canonical_value, check_options
from qtensor.storage.base import Context, QuantizedTensorStorage, scale_layout
from qtensor.storage.tensor import QuantizedTensor


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """Options of a format as a value: hashable, equal by value, safe as a compile-time constant.

    Live state (process groups, generators, delayed-scaling scales) is never inside: it comes as arguments of the call.

    Attributes:
        rowwise: produce data whose blocks run along the last dim.
        columnwise: produce data whose blocks run along the leading dims.
    """

    rowwise: bool = True
    columnwise: bool = False

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

    canonical: ClassVar[str]
    slots: ClassVar[tuple[Slot, ...]]

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
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

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "slots", resolve_slots(self.spec, self))
        object.__setattr__(self, "canonical", self._canonical())

    def _canonical(self) -> str:
        """``format(option=value,...)`` with the options that differ from their defaults."""
        changed = [
            f"{f.name}={canonical_value(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != self._default(f.name, f.default)
        ]
        return f"{self.format}({','.join(changed)})" if changed else self.format

    def _default(self, name: str, value: Any) -> Any:
        """What an option is when it is not given; ``value`` is the field's default."""
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return parse, (self.canonical,)

    @classmethod
    def option_names(cls) -> str:
        """The options of the format, comma separated."""
        return ", ".join(f.name for f in dataclasses.fields(cls))

    @property
    def element(self) -> Element:
        """The element that the ``dtype`` option names, or the format's only one."""
        return self.spec.elements[0]

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
        return self.with_usage(rowwise=self.columnwise, columnwise=self.rowwise)

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
            x: any shape; float32, bfloat16 or float16; any strides.
            out: write into this tensor or storage instead of making a new one; it must have this quantizer and shape.
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
            call = {"scale": scale, "generator": generator, "amax_reduction_group": amax_reduction_group}
            return self.update_quantized(x, out, noop_flag=noop_flag, **call)
        self._check_call(x, scale, noop_flag)
        return self._quantize(x, scale, generator, amax_reduction_group)[0]

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
        self._check_call(x, scale, None)
        tensor, amax = self._quantize(x, scale, None, None)
        return tensor, amax

    def _quantize(
        self, x: Tensor, scale: Tensor | None, generator: torch.Generator | Tensor | None, group: Any
    ) -> tuple[Any, ...]:
        if x.requires_grad and torch.is_grad_enabled():
            seed, amax = self._prepare(x.detach(), generator, group)
            return QuantizeFunction.apply(x, self, scale, amax, seed)
        seed, amax = self._prepare(x, generator, group)
        buffers = QUANTIZE(x, self.canonical, scale, amax, seed)
        return self.assemble(buffers, x.shape, x.dtype), *buffers[len(self.slots) :]

    def assemble(self, buffers: Sequence[Tensor], shape: Shape, dtype: torch.dtype, bare: bool = False) -> Any:
        """A tensor (or bare storage) around buffers in slot order."""
        named = {slot.name[1:]: buffer for slot, buffer in zip(self.slots, buffers, strict=False)}
        cls = self.storage_cls if bare else self.tensor_cls
        return cls(shape, dtype, self, **named)

    def _check_call(self, x: Tensor, scale: Tensor | None, noop_flag: Tensor | None) -> None:
        name = f"quantize[{self.format}]"
        if not isinstance(x, torch.Tensor):
            fail(name, "the input must be a torch.Tensor", type(x).__name__, "Convert it with torch.as_tensor", DtypeError)
        if noop_flag is not None:
            fail(name, "noop_flag keeps bytes that exist", "no out=", "Pass out= as well")
        if (scale is not None) != self.needs_scale:
            rule = "delayed scaling needs scale=" if self.needs_scale else "only delayed scaling takes scale="
            fmt = "Pass scale=" if self.needs_scale else "Drop scale=, or use fp8_delayed"
            fail(name, rule, "none" if scale is None else "one", fmt)

    def _prepare(
        self, x: Tensor, generator: torch.Generator | Tensor | None, group: Any
    ) -> tuple[Tensor | None, list[Tensor] | None]:
        """The seed and the reduced maxima of a call, None where the op does without."""
        seed = amax = None
        if self.stochastic_rounding:
            if generator is None:
                seed = RANDOM_SEED(x)
            elif isinstance(generator, torch.Tensor):
                seed = generator
            else:
                seed = torch.empty(1, dtype=torch.int64, device=generator.device)
                seed = seed.random_(generator=generator).to(x.device)
        if group is not None:
            amax = [_reduce_max(a, group) for a in AMAX(x, self.canonical)]
        return seed, amax

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
        """Requantize ``src`` into the buffers of ``dst``.

        Args:
            src: float32, bfloat16 or float16 of the shape of ``dst``.
            dst: a tensor or storage with this quantizer.
            noop_flag: one element; non-zero leaves every byte of ``dst`` as it is. Read on the device.
            scale, generator, amax_reduction_group: as in ``quantize``.

        Raises:
            QTensorError: another shape or quantizer; ``dst`` is unchanged.
        """
        name = f"update_quantized[{self.format}]"
        got = getattr(dst, "_quantizer", None)
        if got != self:
            fail(name, "dst must hold this quantizer's buffers", f"{got!r}", "Use dst.quantizer, or quantize anew")
        if tuple(src.shape) != tuple(dst.shape):
            fail(name, "shapes must be equal", f"{tuple(src.shape)} into {tuple(dst.shape)}", "Quantize anew")
        if self.needs_scale and scale is None:
            scale = dst._scale_inv.reciprocal()
        seed, amax = self._prepare(src, generator, amax_reduction_group)
        QUANTIZE_(src.detach(), self.canonical, dst.buffers(), scale, amax, seed, noop_flag)
        return dst

    # ---- data-free primitives ------------------------------------------------------------------------------

    def _describe_buffers(self, shape: Shape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """{attribute: (shape, dtype)} in slot order for a tensor of logical ``shape``."""
        return {slot.name: (buffer_shape(slot.dims, shape), slot.dtype) for slot in self.slots}

    def _storage_metadata(self, dtype: torch.dtype) -> dict[str, Any]:
        """The class and the constructor arguments that are no tensors."""
        return {"cls": self.tensor_cls, "nontensor_kwargs": {"dtype": dtype, "quantizer": self}}

    def alloc_tensors(self, shape: Shape, *, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Uninitialised buffers (padding zero) by attribute."""
        tensors = alloc_slots(self.slots, shape, torch.device(device or "cpu"))
        return {slot.name: tensor for slot, tensor in zip(self.slots, tensors, strict=True)}

    def create_metadata(self, shape: Shape, *, dtype: torch.dtype, requires_grad: bool = False) -> Context:
        """The flatten context of a tensor that this quantizer makes. Sizes are not part of it."""
        return (self.tensor_cls.__qualname__, dtype, self, scale_layout(self))

    def make_empty(
        self, shape: Shape, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> Any:
        """A tensor with uninitialised buffers, to be filled by ``quantize(x, out=)``."""
        tensors = self.alloc_tensors(shape, device=device).values()
        tensor = self.assemble(list(tensors), shape, dtype)
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
        raise UnsupportedError(f"quantize[{self.format}]: {type(self).__qualname__} has no encode_. Define it.")

    def decode(self, buffers: dict[str, Tensor], shape: Shape, columnwise: bool = False) -> Tensor:
        """Float32 values from buffers, from the columnwise ones where asked or where they are all there is."""
        raise UnsupportedError(f"dequantize[{self.format}]: {type(self).__qualname__} has no decode. Define it.")

    def amax(self, x: Tensor) -> list[Tensor]:
        """The maxima behind tensor-wide factors; none for formats whose factors are all local."""
        return []

    def amax_shapes(self, shape: Shape) -> list[tuple[int, ...]]:
        """Shapes of what ``amax`` returns."""
        return []

    def derive(self, buffers: dict[str, Tensor], shape: Shape, usage: str) -> dict[str, Tensor] | None:
        """Buffers of ``usage`` from those of the other direction, exactly, or None where that cannot be."""
        return None


def _reduce_max(amax: Tensor, group: Any) -> Tensor:
    """MAX over a process group, by the functional collective, which traces."""
    check(
        torch.distributed.is_available() and torch.distributed.is_initialized(),
        "quantize",
        "amax_reduction_group needs torch.distributed",
        "not initialised",
        "Call torch.distributed.init_process_group first",
        QTensorError,
    )
    return torch.distributed._functional_collectives.all_reduce(amax, "max", group)
