"""Define the tensor subclass: a wrapper around inner buffers with a dispatch table."""

from __future__ import annotations

import sys
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_exporting

from qtensor.errors import ArgumentTypeError, UnsupportedError, fail
from qtensor.layout import Shape
from qtensor.library.define import watched
from qtensor.library.dequantize import DEQUANTIZE_TENSOR, refuse_dtype
from qtensor.registry import QuantizerLike, parse
from qtensor.storage import assignment, coalesced, whole_products
from qtensor.storage.base import (
    Context,
    QuantizedTensorStorage,
    ViewNote,
    describe,
    refuse_buffers,
    unflatten,
)
from qtensor.storage.checkpoint_part import CheckpointPart
from qtensor.storage.dispatch import dispatch
from qtensor.storage.export import record_construction
from qtensor.storage.indexing import is_element, read_element
from qtensor.storage.rebuild import KEYS
from qtensor.storage.serialize import deepcopy, reduce
from qtensor.storage.shards import GatheredWeight, Shards
from qtensor.storage.transposed_stack import MissingBuffer
from qtensor.storage.write import plain
from qtensor.version import fingerprint

assignment.install()
coalesced.install()
whole_products.install()
_STAGER = "torch.distributed.checkpoint._state_dict_stager"
_make = torch.Tensor._make_wrapper_subclass
_STRIDED = torch.strided


def _decoded(t: QuantizedTensor, dtype: torch.dtype | None) -> Tensor:
    """Return the values of ``t``, without autograd and dispatch (20 us) where neither is needed."""
    if (
        torch.compiler.is_compiling()
        or watched()
        or not t._dispatches_here
        or (t.requires_grad and torch.is_grad_enabled())
    ):
        return DEQUANTIZE_TENSOR(t, dtype)
    return plain(t, dtype)


def _traced_properties(t: Tensor) -> str:
    """Return a string of the properties of ``t`` on which a compiled graph depends."""
    flags = "requires_grad" * t.requires_grad + "inference" * t.is_inference()
    return f"{t.dtype}{list(t.shape)}{list(t.stride())}{t.device}{flags}"


_OFFLOAD = "call disk_offload of qtensor.integrations.offload"


def _as_parameter(cls: type[Any], tensor: Any, requires_grad: bool) -> Any:
    """Return a parameter that shares the buffers of ``tensor``.

    Libraries that move parameters rebuild them as ``type(parameter)(tensor, requires_grad=...)``.

    Raises:
        ArgumentTypeError: ``tensor`` is not of class ``cls``.
    """
    if type(tensor) is not cls:
        fail(
            cls.__name__,
            f"the only argument must be an instance of {cls.__name__}",
            type(tensor).__name__,
            "Quantize it first, or pass the shape, the nominal dtype, the quantizer and buffers. "
            f"accelerate's disk_offload stores plain arrays: {_OFFLOAD}",
            ArgumentTypeError,
        )
    return torch.nn.Parameter(tensor, requires_grad=requires_grad)


class QuantizedTensor(GatheredWeight, QuantizedTensorStorage, torch.Tensor):
    """Wrap a storage as a ``torch.Tensor`` of the nominal dtype and the logical shape.

    Make one with a quantizer, ``quantizer(x)``, or from buffers:
    ``cls(shape, dtype, quantizer, rowwise_data=...)``.
    """

    _context: Context
    _view_note: ViewNote | None = None
    """Describes a part of a tensor; writes use it to leave the rest of the tensor unchanged."""

    _is_gathered: bool = False
    """True for a result of a gather: nothing else holds its memory, so that a part of it is a copy.

    DTensor takes parts of gathered tensors, and keeps them.
    """

    _is_scattered: bool = False
    """True for a result of a scatter: if it ends with zeros, a part without them is a copy.

    DTensor pads shards before a scatter, and keeps the part before the padding.
    """

    _is_zeros: bool = False
    """True for a result of ``new_zeros``: its first rows may end inside of a block.

    fully_shard pads shards so, and keeps the rows before the padding.
    """

    _stack: QuantizedTensor | None = None
    """The stack of which this is the transpose, while it has no buffers of its own."""

    _loaded_areas: tuple[Any, ...] | None = None
    """Rectangles that a distributed checkpoint has loaded so far."""

    _splits: tuple[Any, ...] | None = None
    """How the ranks split the DTensor of which this is a part; None if that is not known."""

    _dispatches_here: ClassVar[bool] = True
    """True unless a subclass replaces ``__torch_dispatch__``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherited: Any = QuantizedTensor.__torch_dispatch__
        own: Any = cls.__torch_dispatch__
        cls._dispatches_here = own.__func__ is inherited.__func__
        for attribute, _ in cls._FLATTEN_TENSOR_BUFFERS:
            # __new__ sets only existing buffers, which hide these.
            setattr(cls, attribute, MissingBuffer(attribute))

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor],
        shape: Any,
        dtype: torch.dtype | None = None,
        quantizer: QuantizerLike | str | None = None,
        *,
        requires_grad: bool = False,
        **buffers: Any,
    ) -> QuantizedTensor:
        """Make a tensor around buffers.

        Args:
            cls: the tensor class.
            shape: the logical shape; or a tensor of this class, to make a parameter around its
                buffers.
            dtype: the nominal dtype.
            quantizer: describes the buffers; a quantizer or its canonical string.
            requires_grad: True if the new tensor requires grad.
            **buffers: the inner buffers by constructor keyword.

        Raises:
            QTensorError: the quantizer describes other buffers.
        """
        if quantizer is None or dtype is None:
            return _as_parameter(cls, shape, requires_grad)
        if isinstance(quantizer, str):
            quantizer = parse(quantizer)
        if quantizer.spec is not cls.spec:
            refuse_buffers(cls, quantizer, buffers)
        try:
            device = buffers[quantizer.keywords[0]].device
            # Positional arguments: torch takes 0.2 us to match names.
            self = _make(
                cls, shape, None, None, None, dtype, _STRIDED, device, False, requires_grad, *KEYS
            )
            for name, keyword in quantizer.attributes:
                setattr(self, name, buffers[keyword])
        except KeyError:
            refuse_buffers(cls, quantizer, buffers)
        self._quantizer = quantizer
        self._context = (cls.__qualname__, dtype, quantizer, quantizer.scale_layout)
        return self

    def __init__(
        self,
        shape: Any,
        dtype: torch.dtype | None = None,
        quantizer: QuantizerLike | str | None = None,
        *,
        requires_grad: bool = False,
        **buffers: Any,
    ) -> None:
        """Record the construction for ``torch.export``; ``__new__`` has set every attribute."""
        if is_exporting() and quantizer is not None:
            canonical = quantizer if isinstance(quantizer, str) else quantizer.canonical
            record_construction(self, shape, dtype, canonical, buffers)

    def _set_quantizer(self, quantizer: QuantizerLike) -> None:
        self._quantizer = quantizer
        layout = quantizer.scale_layout + (self._view_note.suffix() if self._view_note else "")
        self._context = (type(self).__qualname__, self.dtype, quantizer, layout)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return describe(self)

    def _whole_quantizer(self) -> QuantizerLike:
        return self._quantizer

    def _sent_buffers(self, sent: Any, shards: Shards) -> dict[str, Tensor]:
        return {slot.name: getattr(self, slot.name) for slot in sent.slots}

    def __tensor_flatten__(self) -> tuple[list[str], Context]:
        # Guards of a compiled graph come here twice a call.
        return [*self._quantizer.slot_names], self._context

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Context, outer_size: Shape, outer_stride: Any
    ) -> QuantizedTensor:
        return unflatten(inner, context, outer_size)

    def __coerce_tangent_metadata__(self) -> Tensor:
        """Return a plain tensor: the gradient of a quantized tensor is plain.

        AOTAutograd (torch 2.11 to 2.13) accepts any result that can be flattened, and a plain
        tensor with no inner tensors can be. tests/test_compile_autograd.py watches this on every
        torch version.
        """
        gradient = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        gradient.__tensor_flatten__ = lambda: ([], None)  # type: ignore[attr-defined]
        return gradient

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values as a plain tensor; the gradient passes unchanged.

        Args:
            dtype: dtype of the result; the nominal dtype if None.

        Returns:
            A tensor of the logical shape.

        Raises:
            DtypeError: ``dtype`` is not a dtype, or cannot hold the values.
        """
        if dtype is not None and not isinstance(dtype, torch.dtype):
            refuse_dtype(self._quantizer.format, dtype)
        return _decoded(self, dtype)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Return the total number of bytes of all buffers, whatever the nominal dtype."""
        if (stack := self._stack) is not None:
            return stack.nbytes
        return sum(buffer.nbytes for buffer in self.buffers())

    @property
    def data(self) -> Tensor:
        """Return a detached tensor that shares the buffers."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Take over the buffers of a tensor of this class; become plain if ``value`` is plain.

        Raises:
            QTensorError: ``value`` has another quantized class or another shape.
            UnsupportedError: ``value`` is a view of a plain tensor.
        """
        if (
            not isinstance(value, QuantizedTensor)
            and value.shape == self.shape
            and value.is_floating_point()
        ):
            self._check_own_memory(value)
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
        self._stack = None
        self._set_quantizer(value._quantizer)

    def _check_own_memory(self, value: Tensor) -> None:
        """Refuse a view of a plain tensor, which libraries assign that join parameters.

        Raises:
            UnsupportedError: ``value`` is a view.
        """
        if value._base is not None:
            fail(
                f"data[{self._quantizer.format}]",
                "a view of a plain tensor cannot replace a quantized tensor, whose codes would be "
                "lost",
                f"a view {tuple(value.shape)}",
                "Leave out parameters_as_bucket_view=True of ZeroRedundancyOptimizer and similar "
                "options, or assign a clone to make the tensor plain",
                UnsupportedError,
            )

    def _become(self, value: Tensor) -> None:
        """Turn this object into a plain tensor or parameter with the values of ``value``."""
        plain = value.detach()
        if getattr(self, "_is_param", False):
            plain = torch.nn.Parameter(plain, requires_grad=self.requires_grad)
        torch.utils.swap_tensors(self, plain)

    def __getitem__(self, index: Any) -> Tensor:
        """Return the part of the tensor that ``index`` addresses.

        One integer per dim addresses one element. Its value is a plain 0-d tensor, a copy: writing
        to it does not change this tensor. Every other index follows torch's rules and
        docs/op_matrix.md.
        """
        if is_element(index, self.ndim):
            return read_element(self, index)
        return super().__getitem__(index)

    def tolist(self) -> Any:
        """Return the dequantized values as nested lists of Python floats."""
        return self.dequantize().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the dequantized values as a NumPy array of the nominal dtype.

        The array is a copy: writing to it does not change this tensor.

        Args:
            force: detach the tensor and move it to the CPU first, as in ``torch.Tensor.numpy``.
        """
        return self.dequantize().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the dequantized values as a NumPy array; ``numpy.asarray(q)`` calls this.

        Raises:
            ValueError: ``copy=False``, because decoding always makes a copy.
        """
        if copy is False:
            raise ValueError(
                f"numpy[{self._quantizer.format}]: decoding always makes a copy; got copy=False. "
                "Leave copy= at its default."
            )
        values = self.numpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error: there is no single buffer of the nominal dtype to export.

        Raises:
            UnsupportedError: always.
        """
        self._refuse_memory("dlpack", "Export t.buffers(), or t.dequantize()")

    def data_ptr(self) -> int:
        """Raise an error: each inner buffer has its own address.

        Libraries that write raw memory, such as safetensors, stop here instead of saving wrong
        bytes.

        Raises:
            UnsupportedError: always.
        """
        if sys._getframe(1).f_globals.get("__name__") == _STAGER:
            # The stager of async_save asks for an address to tell wrappers from memory, and copies
            # the attributes of a tensor without an address: its buffers. torch offers no hook.
            return 0
        fix = (
            "Use t.buffers() for the bytes. To save, use torch.save, or qtensor.checkpoints.save "
            "for safetensors; or give safetensors the tensors in t.buffers() and rebuild with "
            "t.quantizer.assemble(buffers, shape, dtype). "
            f"To offload a model to disk, {_OFFLOAD}"
        )
        self._refuse_memory("data_ptr", fix)

    def storage(self) -> Any:
        """Raise an error, as ``data_ptr`` does.

        Raises:
            UnsupportedError: always.
        """
        self._refuse_memory("storage", "Use t.buffers() for the bytes")

    def _refuse_memory(self, op: str, fix: str) -> NoReturn:
        rule = "a quantized tensor is not one block of memory; its inner buffers hold its bytes"
        fail(f"{op}[{self._quantizer.format}]", rule, type(self).__name__, fix, UnsupportedError)

    def _refuse_elementwise(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error: Python functions on elements need plain values.

        Raises:
            UnsupportedError: always.
        """
        rule = "a Python function cannot change the elements of a quantized tensor in place"
        fix = "Call it on t.dequantize() and quantize the result"
        fail(f"apply_[{self._quantizer.format}]", rule, type(self).__name__, fix, UnsupportedError)

    apply_ = map_ = map2_ = _refuse_elementwise

    def share_memory_(self) -> QuantizedTensor:
        """Move every buffer to shared memory and return this tensor."""
        for buffer in self.buffers():
            buffer.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return True if every buffer is in shared memory."""
        return all(buffer.is_shared() for buffer in self.buffers())

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduce(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        return deepcopy(self, memo)

    def __get_tensor_shard__(self, index: Any) -> CheckpointPart:
        """Return what ``torch.distributed.checkpoint`` saves, or writes to."""
        return CheckpointPart(self, entry=getattr(index, "fqn", ""))

    def _stable_hash_for_caching(self) -> str:
        """Return the key of this tensor for AOTAutograd's cache."""
        name, dtype, quantizer, layout = self._context
        tensors = " ".join(map(_traced_properties, (self, *self.buffers())))
        return f"{name}:{dtype}:{quantizer.canonical}:{layout}:{tensors}:{fingerprint()}"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(func, types, args, kwargs or {})


def _keep_out_dynamo(code: Any) -> None:
    """Have Dynamo run a function, and what it calls, as they are.

    Dynamo skips the code of torch's own layers. Where such a layer is compiled by itself, it would
    compile the frames below, and it cannot trace ours. ``torch.compiler.disable`` costs 0.7 us a
    call, and imports Dynamo.
    """
    eval_frame: Any = getattr(torch._C._dynamo, "eval_frame", None)
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))


_keep_out_dynamo(QuantizedTensor.__dict__["__torch_dispatch__"].__func__.__code__)
