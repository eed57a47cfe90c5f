"""Define the base of storages and tensors: buffers, a nominal dtype and a quantizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, Self, SupportsIndex

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.errors import QTensorError, UnsupportedError, check, fail
from qtensor.core.formats import FormatSpec
from qtensor.core.quantizer_registry import QuantizerLike
from qtensor.library.dequantize import DEQUANTIZE, refuse_dtype
from qtensor.storage.numbers import Numbers, text_of_first_values
from qtensor.storage.origin import FRESH, Origin
from qtensor.storage.rebuild import FROM_PARTS, of_parts, set_origin, wrap
from qtensor.storage.registry import lookup, register
from qtensor.storage.serialize import deepcopy, reduce
from qtensor.storage.usages import memory_of, note_partners

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from qtensor.storage.tensor import QuantizedTensor

Context = tuple[str, torch.dtype, QuantizerLike, str]
"""The flatten context: qualname, nominal dtype, quantizer, scale layout.

The context holds no size, device or tensor. The layout of a part of a tensor ends with its origin:
``plain;shared=_scale_inv`` (``Origin.suffix``).
"""


@dataclass(frozen=True)
class SavedLayout:
    """Hold the arguments of ``restore_from_saved`` that are not tensors."""

    cls: type[QuantizedTensorStorage]
    shape: tuple[int, ...]
    dtype: torch.dtype
    quantizer: QuantizerLike
    origin: Origin


class QuantizedTensorStorage(Numbers):
    """Hold inner buffers, the logical shape, the nominal dtype and the quantizer.

    The quantizer's usages decide which buffers exist; the others are None.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        _quantizer: QuantizerLike
        shape: torch.Size
        dtype: torch.dtype
        device: torch.device
        ndim: int
        nbytes: int
        _scale_inv: Tensor
        """The decode factor of the FP8 formats without blocks."""
        _origin: Origin

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def numel(self) -> int:
            """Return the number of logical elements."""

    spec: ClassVar[FormatSpec]
    _parts: tuple[QuantizedTensor, ...] = ()
    """What a tensor without buffers shows (``ops/lazy_view.py``)."""
    _FLATTEN_TENSOR_BUFFERS: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(attribute, constructor keyword) of each inner buffer, in slot order."""

    def __init_subclass__(cls, spec: FormatSpec | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if spec is not None:
            cls.spec = spec
            cls._FLATTEN_TENSOR_BUFFERS = tuple((name, name[1:]) for name in spec.attributes)
        if cls._FLATTEN_TENSOR_BUFFERS:
            register(cls)

    @property
    def quantizer(self) -> QuantizerLike:
        """Return the quantizer that describes the buffers; it is immutable."""
        return self._quantizer

    @property
    def scale_layout(self) -> str:
        """Return the order of the scale bytes: ``"plain"`` or ``"swizzled_32_4_4"``."""
        return self._quantizer.scale_layout

    def buffers(self) -> list[Tensor]:
        """Return the inner buffers that exist, in slot order."""
        return [getattr(self, slot.name) for slot in self._quantizer.slots]

    def _repr_html_(self) -> str:
        """Return the repr and a table of the buffers, for notebooks.

        ``qtensor.debug.show`` shows the values.
        """
        return describe_html(self)

    def get_usages(self) -> dict[str, bool]:
        """Return a dict that tells whether "rowwise" and "columnwise" data exist."""
        return {"rowwise": self._quantizer.rowwise, "columnwise": self._quantizer.columnwise}

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values as a plain tensor, rounded once from float32.

        Args:
            dtype: dtype of the result; the nominal dtype if None.

        Returns:
            A tensor of the logical shape.

        Raises:
            DtypeError: ``dtype`` is not a dtype, or cannot hold the values.
        """
        dtype = self.dtype if dtype is None else dtype
        if not isinstance(dtype, torch.dtype):
            refuse_dtype(self._quantizer.format, dtype)
        return DEQUANTIZE(self.buffers(), self._quantizer.canonical, self.shape, dtype)

    def update_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Drop a direction in place, or build one from the other where that is exact.

        Args:
            rowwise: True to have rowwise data, False to drop them, None to leave them unchanged.
            columnwise: the same for columnwise data.

        Raises:
            UnsupportedError: the requested direction needs the high-precision data.
            QTensorError: no direction would be left.
        """
        old = self._quantizer
        new = old.with_usage(rowwise=rowwise, columnwise=columnwise)
        if new == old:
            return
        name = f"update_usage[{old.format}]"
        if self._parts:
            rule = "a view without buffers has the data of its parts"
            fix = "Call it on the tensor that it shows, or on a copy: view.clone()"
            fail(name, rule, self.get_usages(), fix, UnsupportedError)
        missing = [u for u in ("rowwise", "columnwise") if getattr(new, u) and not getattr(old, u)]
        present = {slot.name: getattr(self, slot.name) for slot in old.slots}
        if missing:
            derived = old.derive(present, self.shape, missing[0])
            if derived is None:
                fail(
                    name,
                    f"{missing[0]} data cannot be derived from the other direction",
                    self.get_usages(),
                    f"Quantize the high-precision tensor with {missing[0]}=True",
                    UnsupportedError,
                )
            present.update(derived)
        remaining = {slot.name: present.pop(slot.name) for slot in new.slots}
        kept = memory_of([b for name, b in remaining.items() if name in old.slot_names])
        dropped = memory_of(present.values())
        gained = memory_of([b for name, b in remaining.items() if name not in old.slot_names])
        present.clear()
        for attribute, _ in self._FLATTEN_TENSOR_BUFFERS:
            setattr(self, attribute, remaining.get(attribute))
        self._set_quantizer(new)
        # An alias may hold what this tensor has dropped, or lack what it has gained.
        note_partners(kept, dropped + gained)

    def _set_quantizer(self, quantizer: QuantizerLike) -> None:
        self._quantizer = quantizer  # type: ignore[misc]

    def quantize_(self, src: Tensor, *, noop_flag: Tensor | None = None, **call: Any) -> Self:
        """Quantize ``src`` into the existing buffers and return this object.

        Args:
            src: float32, bfloat16 or float16, of the logical shape.
            noop_flag: as in ``Quantizer.update_quantized``.
            **call: other arguments of ``Quantizer.update_quantized``.

        Raises:
            QTensorError: the shapes differ, this object is a part of a tensor, or an argument does
                not apply.
        """
        self._quantizer.update_quantized(src, self, noop_flag=noop_flag, **call)
        return self

    def prepare_for_saving(self) -> tuple[list[Tensor | None], SavedLayout]:
        """Return all buffers in slot order (None where absent), and a layout without tensors.

        The storage itself stays as it is.
        """
        tensors = [getattr(self, attribute) for attribute, _ in self._FLATTEN_TENSOR_BUFFERS]
        return tensors, SavedLayout(
            type(self), tuple(self.shape), self.dtype, self._quantizer, self._origin
        )

    @staticmethod
    def restore_from_saved(
        layout: SavedLayout, tensors: Sequence[Tensor | None]
    ) -> tuple[QuantizedTensorStorage, list[Tensor | None]]:
        """Rebuild a storage from its layout and the first of ``tensors``.

        Returns:
            The storage, and the tensors that are left over.

        Raises:
            QTensorError: fewer tensors than the layout needs.
        """
        count = len(layout.cls._FLATTEN_TENSOR_BUFFERS)
        check(
            len(tensors) >= count,
            f"restore_from_saved[{layout.quantizer.format}]",
            f"{count} tensors or None are needed",
            len(tensors),
            "Pass the list that prepare_for_saving returned",
        )
        named = {
            keyword: tensor
            for (_, keyword), tensor in zip(
                layout.cls._FLATTEN_TENSOR_BUFFERS, tensors, strict=False
            )
        }
        storage = layout.cls(layout.shape, layout.dtype, layout.quantizer, **named)
        if layout.origin is not FRESH:
            set_origin(storage, layout.origin)
        return storage, list(tensors[count:])


TensorOrStorage = Tensor | QuantizedTensorStorage
"""A plain tensor, or a quantized tensor or storage."""


def is_quantized(t: object) -> TypeIs[QuantizedTensor]:
    """Return whether a tensor is quantized, for callers that get no bare storages."""
    return isinstance(t, QuantizedTensorStorage)


class BareStorage(QuantizedTensorStorage):
    """Hold buffers without being a tensor: no autograd, no dispatch."""

    __slots__ = ("_dtype", "_origin", "_quantizer", "_shape")

    def __init__(
        self, shape: Shape, dtype: torch.dtype, quantizer: QuantizerLike, **buffers: Tensor | None
    ) -> None:
        if quantizer.spec is not self.spec or len(buffers) < len(quantizer.slots):
            refuse_buffers(type(self), quantizer, buffers)
        self._shape = shape
        self._dtype = dtype
        self._quantizer = quantizer
        self._origin = FRESH
        for attribute, keyword in self._FLATTEN_TENSOR_BUFFERS:
            setattr(self, attribute, buffers.get(keyword))

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Return the logical shape."""
        return torch.Size(self._shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Return the nominal dtype, which is the default dtype of ``dequantize()``."""
        return self._dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the device of the buffers."""
        return self.buffers()[0].device

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Return the total number of bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers())

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Return the rank of the logical shape."""
        return len(self._shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the logical shape, or its size along ``dim``."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of logical elements."""
        return self.shape.numel()

    def stride(self) -> tuple[int, ...]:
        """Return the strides of a contiguous tensor of the logical shape."""
        return torch.empty(self.shape, device="meta").stride()

    def __repr__(self) -> str:
        return describe(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return reduce(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensorStorage:
        return deepcopy(self, memo)

    def __tensor_flatten__(self) -> tuple[list[str], Context]:
        return [slot.name for slot in self._quantizer.slots], make_context(self)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Context, outer_size: Shape, outer_stride: Shape
    ) -> QuantizedTensorStorage:
        return unflatten(inner, context, outer_size)


def make_context(storage: QuantizedTensorStorage) -> Context:
    """Return the flatten context of a storage or tensor."""
    quantizer = storage._quantizer
    layout = quantizer.scale_layout + storage._origin.suffix()
    return (type(storage).__qualname__, storage.dtype, quantizer, layout)


class _Known(NamedTuple):
    """Cache the parts of a checked flatten context."""

    context: Context
    cls: type[Any]
    names: list[str]
    origin: Origin


_KNOWN: dict[int, _Known] = {}
"""Checked contexts by identity: a compiled graph passes the same object with every tensor."""
_MOST = 4096


def _known(context: Context) -> _Known:
    """Return the parts of a flatten context after checking it; checked contexts are cached.

    Raises:
        QTensorError: ``context`` is not a flatten context.
    """
    known = _KNOWN.get(id(context))
    if known is not None and known.context is context:
        return known
    if not isinstance(context, tuple) or len(context) != 4 or not isinstance(context[0], str):
        raise QTensorError(
            "unflatten: the context must be (qualname, dtype, quantizer, scale layout); "
            f"got {context!r}. Use the context that __tensor_flatten__ returned."
        )
    name, dtype, quantizer, layout = context
    cls = lookup(name)
    slots = getattr(quantizer, "slots", None)
    if (
        slots is None
        or not isinstance(dtype, torch.dtype)
        or not str(layout).startswith(quantizer.scale_layout)
    ):
        raise QTensorError(
            f"unflatten[{name}]: the context must hold a dtype, a quantizer and its scale layout; "
            f"got {dtype!r}, {quantizer!r}, {layout!r}. Use the context that __tensor_flatten__ "
            "returned."
        )
    origin = Origin.parse(layout.removeprefix(quantizer.scale_layout).removeprefix(";"))
    if len(_KNOWN) >= _MOST:
        _KNOWN.clear()
    known = _KNOWN[id(context)] = _Known(context, cls, [slot.name for slot in slots], origin)
    return known


def unflatten(inner: dict[str, Tensor], context: Context, outer_size: Shape) -> Any:
    """Return a storage or tensor from its inner buffers and flatten context.

    Raises:
        QTensorError: ``context`` is not a flatten context, or the buffers do not match it.
    """
    _, cls, names, origin = _known(context)
    name, dtype, quantizer, _ = context
    if origin.layout:
        parts: list[Any] = [*inner.values()]
        if origin.layout in FROM_PARTS:
            return FROM_PARTS[origin.layout](parts)
        return of_parts(cls, outer_size, dtype, quantizer, parts, origin, context)
    if list(inner) != names or cls.spec is not quantizer.spec:
        raise QTensorError(
            f"unflatten[{name}]: the buffers must be {names} of {quantizer.spec.name}; got "
            f"{list(inner)} of {cls.spec.name}. Pass the inner tensors that __tensor_flatten__ "
            "named."
        )
    if issubclass(cls, BareStorage):
        storage = cls(outer_size, dtype, quantizer, **{k[1:]: v for k, v in inner.items()})
        set_origin(storage, origin)
        return storage
    return wrap(cls, outer_size, dtype, quantizer, [*inner.values()], origin, context)


def refuse_buffers(
    cls: type[QuantizedTensorStorage], quantizer: QuantizerLike, buffers: Mapping[str, object]
) -> NoReturn:
    """Raise an error that says why the buffers do not make a tensor or storage.

    Raises:
        QTensorError: always.
    """
    needed = [slot.keyword for slot in quantizer.slots]
    fail(
        f"{cls.__qualname__}",
        f"it holds {cls.spec.name} buffers, and {quantizer.canonical} needs {', '.join(needed)}",
        ", ".join(buffers) or "none",
        "Use the quantizer's own class and pass all its buffers, or quantizer.assemble(...)",
    )


def describe(storage: QuantizedTensorStorage) -> str:
    """Return a repr: metadata, and the first values of a tensor in the memory of the CPU.

    It never waits for a device.
    """
    quantizer, values = storage._quantizer, text_of_first_values(storage)
    metadata = f"shape={tuple(storage.shape)}, dtype={storage.dtype}"
    shown = f"{metadata}, quantizer={quantizer.canonical!r}"
    return f"{type(storage).__name__}({shown}{f', values={values}' * bool(values)})"


def describe_html(storage: QuantizedTensorStorage) -> str:
    """Return the repr of a tensor and the metadata of its buffers as HTML."""
    # Only notebooks need it.
    import html  # noqa: PLC0415

    numel = math.prod(storage.shape)
    title = f"{describe(storage)} on {storage.device}"
    if numel:
        title += f", {8 * storage.nbytes / numel:.2f} bits per value"
    rows = ["<tr><th>buffer</th><th>dtype</th><th>shape</th><th>bytes</th></tr>"]
    for slot, buffer in zip(storage._quantizer.slots, storage.buffers(), strict=True):
        shape = "x".join(map(str, buffer.shape)) or "scalar"
        cells = (slot.name, str(buffer.dtype), shape, f"{buffer.nbytes:,}")
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<p><code>{html.escape(title, quote=False)}</code></p><table>{''.join(rows)}</table>"
