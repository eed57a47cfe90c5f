"""The tensor subclass: a wrapper around inner buffers with a dispatch table."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from qtensor.errors import UnsupportedError, fail
from qtensor.layout import Shape
from qtensor.library.codec import Codec, parse
from qtensor.library.dequantize import DEQUANTIZE_TENSOR, refuse_dtype
from qtensor.library.direct import watched
from qtensor.storage.base import (
    Context,
    QuantizedTensorStorage,
    ViewNote,
    describe,
    refuse_buffers,
    unflatten,
)
from qtensor.storage.dispatch import dispatch
from qtensor.storage.serialize import deepcopy, reduce
from qtensor.storage.write import plain
from qtensor.version import fingerprint

_make = torch.Tensor._make_wrapper_subclass
_STRIDED = torch.strided


def _decoded(t: QuantizedTensor, dtype: torch.dtype | None) -> Tensor:
    """``dequantize_tensor``; past autograd and dispatch, 20 us together, where they would only come to the handler."""
    if (
        torch.compiler.is_compiling()
        or watched()
        or not t._dispatches_here
        or (t.requires_grad and torch.is_grad_enabled())
    ):
        return DEQUANTIZE_TENSOR(t, dtype)
    return plain(t, dtype)


def _facts(t: Tensor) -> str:
    """What a graph is bound to of a tensor."""
    flags = "requires_grad" * t.requires_grad + "inference" * t.is_inference()
    return f"{t.dtype}{list(t.shape)}{list(t.stride())}{t.device}{flags}"


class QuantizedTensor(QuantizedTensorStorage, torch.Tensor):
    """A storage that is a ``torch.Tensor`` of the nominal dtype and the logical shape.

    Build one with a quantizer, ``quantizer(x)``, or from buffers: ``cls(shape, dtype, quantizer, rowwise_data=...)``.
    """

    _context: Context
    _view_note: ViewNote | None = None
    """Set on a part of a tensor: what writes must know of the whole."""

    _dispatches_here: ClassVar[bool] = True
    """No subclass has taken over ``__torch_dispatch__``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        table: Any = QuantizedTensor.__torch_dispatch__
        own: Any = cls.__torch_dispatch__
        cls._dispatches_here = own.__func__ is table.__func__
        for attribute, _ in cls._FLATTEN_TENSOR_BUFFERS:
            # What an absent usage reads as; __new__ sets only what is there.
            setattr(cls, attribute, None)

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor],
        shape: Shape,
        dtype: torch.dtype,
        quantizer: Codec | str,
        *,
        requires_grad: bool = False,
        **buffers: Any,
    ) -> QuantizedTensor:
        """Wrap buffers given by constructor keyword, as the quantizer (a value or its canonical string) describes them."""
        if isinstance(quantizer, str):
            quantizer = parse(quantizer)
        if quantizer.spec is not cls.spec:
            refuse_buffers(cls, quantizer, buffers)
        try:
            device = buffers[quantizer.keywords[0]].device
            # By place: names take torch 0.2 us to match.
            self = _make(
                cls, shape, None, None, None, dtype, _STRIDED, device, False, requires_grad
            )
            for name, keyword in quantizer.attributes:
                setattr(self, name, buffers[keyword])
        except KeyError:
            refuse_buffers(cls, quantizer, buffers)
        self._quantizer = quantizer
        self._context = (cls.__qualname__, dtype, quantizer, quantizer.scale_layout)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: ``__new__`` has set every attribute."""

    def _set_quantizer(self, quantizer: Codec) -> None:
        self._quantizer = quantizer
        layout = quantizer.scale_layout + (self._view_note.text() if self._view_note else "")
        self._context = (type(self).__qualname__, self.dtype, quantizer, layout)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return describe(self)

    def __tensor_flatten__(self) -> tuple[list[str], Context]:
        return [slot.name for slot in self._quantizer.slots], self._context

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Context, outer_size: Shape, outer_stride: Any
    ) -> QuantizedTensor:
        return unflatten(inner, context, outer_size)

    def __coerce_tangent_metadata__(self) -> Tensor:
        """A gradient of a quantized tensor is a plain tensor.

        AOTAutograd (torch 2.11 to 2.13) takes any result that can be flattened; a plain tensor with no inner tensors
        can. tests/test_compile_autograd.py watches this on every torch version.
        """
        gradient = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        gradient.__tensor_flatten__ = lambda: ([], None)  # type: ignore[attr-defined]
        return gradient

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of ``dtype`` (the nominal dtype if None); the gradient passes unchanged.

        Raises:
            DtypeError: no dtype, or none that holds the values.
        """
        if dtype is not None and not isinstance(dtype, torch.dtype):
            refuse_dtype(self._quantizer.format, dtype)
        return _decoded(self, dtype)

    def float(self) -> Tensor:
        """The dequantized values as float32. ``.to(torch.float32)`` changes the nominal dtype instead."""
        return _decoded(self, torch.float32)

    def half(self) -> Tensor:
        """The dequantized values as float16. ``.to(torch.float16)`` changes the nominal dtype instead."""
        return _decoded(self, torch.float16)

    def bfloat16(self) -> Tensor:
        """The dequantized values as bfloat16. ``.to(torch.bfloat16)`` changes the nominal dtype instead."""
        return _decoded(self, torch.bfloat16)

    def double(self) -> Tensor:
        """The dequantized values as float64."""
        return _decoded(self, torch.float64)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of all buffers, not of the nominal dtype."""
        return sum(buffer.nbytes for buffer in self.buffers())

    @property
    def data(self) -> Tensor:
        """A detached tensor that shares the buffers."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Take over another tensor's buffers. With plain values the tensor becomes a plain one, as in ``module.half()``.

        Raises:
            QTensorError: another quantized class, or another shape (torch would leave the buffers stale).
        """
        if (
            not isinstance(value, QuantizedTensor)
            and value.shape == self.shape
            and value.is_floating_point()
        ):
            self._become(value)
            return
        if type(value) is not type(self) or value.shape != self.shape:
            fail(
                f"data[{self._quantizer.format}]",
                f"the new data must be a {type(self).__name__} of shape {tuple(self.shape)}",
                f"{type(value).__name__} of shape {tuple(value.shape)}",
                "Quantize it first, or use copy_()",
            )
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        for attribute, _ in self._FLATTEN_TENSOR_BUFFERS:
            setattr(self, attribute, getattr(value, attribute))
        self._set_quantizer(value._quantizer)

    def _become(self, value: Tensor) -> None:
        """Turn this object into a plain tensor or parameter with the values of ``value``."""
        plain = value.detach()
        if getattr(self, "_is_param", False):
            plain = torch.nn.Parameter(plain, requires_grad=self.requires_grad)
        torch.utils.swap_tensors(self, plain)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: there is no single buffer of the nominal dtype.

        Raises:
            UnsupportedError: always.
        """
        rule = "a quantized tensor is no single buffer"
        fail(
            f"dlpack[{self._quantizer.format}]",
            rule,
            type(self).__name__,
            "Export t.buffers() instead",
            UnsupportedError,
        )

    def _no_array(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: arrays are made of values, not codes.

        Raises:
            UnsupportedError: always.
        """
        rule = "a quantized tensor is no array"
        fix = "Call .dequantize().numpy() or .dequantize().tolist()"
        fail(f"numpy[{self._quantizer.format}]", rule, type(self).__name__, fix, UnsupportedError)

    numpy = tolist = __array__ = apply_ = map_ = map2_ = _no_array

    def share_memory_(self) -> QuantizedTensor:
        """Move every buffer to shared memory."""
        for buffer in self.buffers():
            buffer.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether every buffer is in shared memory."""
        return all(buffer.is_shared() for buffer in self.buffers())

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduce(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        return deepcopy(self, memo)

    def _stable_hash_for_caching(self) -> str:
        """What a compiled graph depends on, for AOTAutograd's cache, which asks for nothing else."""
        name, dtype, quantizer, layout = self._context
        tensors = " ".join(map(_facts, (self, *self.buffers())))
        return f"{name}:{dtype}:{quantizer.canonical}:{layout}:{tensors}:{fingerprint()}"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(func, types, args, kwargs or {})
