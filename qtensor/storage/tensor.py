"""Define the tensor subclass: a wrapper around inner buffers with a dispatch table."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, SupportsIndex

import torch
from torch import Tensor
from torch.compiler import is_exporting

from qtensor.core.buffer_shapes import Shape
from qtensor.core.errors import ArgumentTypeError, UnsupportedError, fail
from qtensor.core.quantizer_registry import QuantizerLike, parse
from qtensor.core.torch_state import keep_out_dynamo, no_torch_function, watched
from qtensor.core.version import fingerprint
from qtensor.library.dequantize import DEQUANTIZE_TENSOR, refuse_dtype
from qtensor.storage import usages
from qtensor.storage.base import (
    Context,
    QuantizedTensorStorage,
    describe,
    refuse_buffers,
    unflatten,
)
from qtensor.storage.export import record_construction
from qtensor.storage.ops import assignment, whole_products
from qtensor.storage.ops.dispatch import dispatch
from qtensor.storage.ops.indexing import is_element, read_element
from qtensor.storage.ops.lazy_view import MissingBuffer, layout_of
from qtensor.storage.ops.lost_changes import WarnsOfLostChanges
from qtensor.storage.ops.part_values import read_values
from qtensor.storage.ops.products import ScaledArguments
from qtensor.storage.ops.table import FILLED_LATE, Args, Kwargs, Op
from qtensor.storage.ops.write import plain
from qtensor.storage.origin import FRESH, Origin
from qtensor.storage.process_groups import group_of_mesh
from qtensor.storage.processes import share
from qtensor.storage.ranks import functional_collectives  # noqa: F401 - it fills a table
from qtensor.storage.ranks.checkpoint_part import CheckpointPart, begin_load
from qtensor.storage.ranks.fully_shard import Gathered, GatheredWeight, gathered_shard
from qtensor.storage.rebuild import KEYS, is_row_major, part_names, strides_of, take_over
from qtensor.storage.serialize import deepcopy, reduce

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch.distributed.device_mesh import DeviceMesh

# The module needs torch.distributed, which some builds of torch lack.
FILLED_LATE["c10d"] = "qtensor.storage.ranks.c10d_collectives"
assignment.install()
whole_products.install()
_make = torch.Tensor._make_wrapper_subclass
_STRIDED = torch.strided


def _decoded(t: QuantizedTensor, dtype: torch.dtype | None) -> Tensor:
    """Return the values of ``t``; autograd and dispatch run only where they are needed."""
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


def _as_parameter(cls: type[QuantizedTensor], tensor: object, requires_grad: bool) -> Any:
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


class QuantizedTensor(
    GatheredWeight, ScaledArguments, WarnsOfLostChanges, QuantizedTensorStorage, torch.Tensor
):
    """Wrap a storage as a ``torch.Tensor`` of the nominal dtype and the logical shape.

    Make one with a quantizer, ``quantizer(x)``, or from buffers:
    ``cls(shape, dtype, quantizer, rowwise_data=...)``.
    """

    _context: Context
    _origin: Origin = FRESH
    """How the bytes relate to those of other tensors and ranks; writes obey it."""

    _dispatches_here: ClassVar[bool] = True
    """True unless a subclass replaces ``__torch_dispatch__``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own, inherited = cls.__torch_dispatch__, QuantizedTensor.__torch_dispatch__
        cls._dispatches_here = own.__func__ is inherited.__func__  # type: ignore[attr-defined]
        ForkingPickler.register(cls, share)
        for attribute, _ in cls._FLATTEN_TENSOR_BUFFERS:
            # __new__ sets only existing buffers, which hide these.
            setattr(cls, attribute, MissingBuffer(attribute))

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor],
        shape: Shape,
        dtype: torch.dtype | None = None,
        quantizer: QuantizerLike | str | None = None,
        *,
        requires_grad: bool = False,
        **buffers: Tensor,
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
            # Hot path: torch matches positional arguments faster than names.
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
        shape: Shape,
        dtype: torch.dtype | None = None,
        quantizer: QuantizerLike | str | None = None,
        *,
        requires_grad: bool = False,
        **buffers: Tensor,
    ) -> None:
        """Record the construction for ``torch.export``; ``__new__`` has set every attribute."""
        if is_exporting() and quantizer is not None:
            canonical = quantizer if isinstance(quantizer, str) else quantizer.canonical
            record_construction(self, shape, dtype, canonical, buffers)

    def _set_quantizer(self, quantizer: QuantizerLike) -> None:
        self._quantizer = quantizer
        layout = quantizer.scale_layout + self._origin.suffix()
        self._context = (type(self).__qualname__, self.dtype, quantizer, layout)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return describe(self)

    def _whole_quantizer(self) -> QuantizerLike:
        return self._quantizer

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Gathered]:
        """Return the bytes of this rank's shard, and what ``fsdp_post_all_gather`` needs.

        torch would pass the shape of the weight too, but then it refuses shards of different sizes.

        Args:
            mesh: the mesh over which the parameter is sharded, one dim.

        Raises:
            QTensorError: the ranks have different quantizers, or a shard ends inside a block.
            UnsupportedError: the weight is not sharded along dim 0.
        """
        return gathered_shard(self, group_of_mesh(mesh, None, "fully_shard"))

    def __tensor_flatten__(self) -> tuple[list[str], Context]:
        # Guards of a compiled graph come here twice a call.
        context = self._context
        if usages.lacks_usage(self):
            origin = self._origin._replace(lacks_usage=True)
            context = (*context[:3], self._quantizer.scale_layout + origin.suffix())
        if self._parts:
            return part_names(len(self._parts)), context
        return [*self._quantizer.slot_names], context

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Context, outer_size: Shape, outer_stride: Shape
    ) -> QuantizedTensor:
        return unflatten(inner, context, outer_size)

    def __coerce_tangent_metadata__(self) -> Tensor:
        """Return a plain tensor: the gradient of a quantized tensor is plain.

        AOTAutograd (torch 2.11 to 2.13) accepts any result that can be flattened, and a plain
        tensor with no inner tensors can be. tests/compile/test_compile_autograd.py watches this on
        every torch version.
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

    def buffers(self) -> list[Tensor]:
        """Return the inner buffers that exist, in slot order.

        A view without buffers, such as ``stack.mT``, returns copies of its current bytes.
        """
        layout = layout_of(self)
        return super().buffers() if layout is None else layout.laid_out(self).buffers()

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        """Return this tensor, or a copy of a part or transpose that is not in row-major order."""
        if is_row_major(self):
            return super().contiguous(memory_format=memory_format)
        return self.clone(memory_format=memory_format)

    def reshape(self, *shape: Any, **named: Any) -> Tensor:
        """Return a view with another shape, or a copy where torch returns one."""
        if self._origin.strides is not None:
            strides = strides_of(self)
            plain = torch.empty_strided(self.shape, strides or (0,) * self.ndim, device="meta")
            moved = plain.reshape(*shape, **named).untyped_storage()
            if not strides or moved._cdata != plain.untyped_storage()._cdata:
                return torch.Tensor.reshape(self.clone(), *shape, **named)
        return super().reshape(*shape, **named)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Return the total number of bytes of all buffers, whatever the nominal dtype."""
        inner = self._parts or self.buffers()
        return sum(each.nbytes for each in inner)

    @property
    def data(self) -> Tensor:
        """Return a detached tensor that shares the buffers."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Take over the buffers of a tensor of this class; become plain if ``value`` is plain.

        If ``value`` is a part of a tensor, this becomes the same part of it.

        Raises:
            QTensorError: ``value`` has another quantized class or another shape.
            UnsupportedError: ``value`` is a view of a plain tensor, or a graph holds this tensor.
        """
        if (
            not isinstance(value, QuantizedTensor)
            and value.shape == self.shape
            and value.is_floating_point()
        ):
            self._check_own_memory(value)
            assignment.become_plain(self, value)
            return
        if type(value) is not type(self) or value.shape != self.shape:
            fail(
                f"data[{self._quantizer.format}]",
                f"the new data must be a {type(self).__name__} of shape {tuple(self.shape)}",
                f"{type(value).__name__} of shape {tuple(value.shape)}",
                "Quantize it first, or use copy_()",
            )
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        take_over(self, value)

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

    def __getitem__(self, index: Any) -> Tensor:
        """Return the part of the tensor that ``index`` addresses.

        One integer per dim addresses one element. Its value is a plain 0-d tensor, a copy: writing
        to it does not change this tensor. A part whose codes cannot be cut out is read as values
        that cannot be written to (``PartValues``), if an integer is in the index or the part is
        small. Every other index follows torch's rules and docs/op_matrix.md.
        """
        if is_element(index, self.ndim):
            return read_element(self, index)
        try:
            return super().__getitem__(index)
        except UnsupportedError:
            values = read_values(self, index)
            if values is None:
                raise
            return values

    def tolist(self) -> Any:
        """Return the dequantized values as nested lists of Python floats."""
        return self.dequantize().tolist()

    def numpy(self, *, force: bool = False) -> npt.NDArray[Any]:
        """Return the dequantized values as a NumPy array of the nominal dtype.

        The array is a copy: writing to it does not change this tensor.

        Args:
            force: detach the tensor and move it to the CPU first, as in ``torch.Tensor.numpy``.
        """
        return self.dequantize().numpy(force=force)

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
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

    def __dlpack__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise an error: there is no single buffer of the nominal dtype to export.

        Raises:
            UnsupportedError: always.
        """
        self._refuse_memory("dlpack", "Export t.buffers(), or t.dequantize()")

    def data_ptr(self) -> int:
        """Raise an error: each inner buffer has its own address.

        Libraries that write raw memory, such as safetensors, stop here instead of saving wrong
        bytes. An address of 0 would not stop accelerate, which takes tensors with one address for
        one tied weight.

        Raises:
            UnsupportedError: always.
        """
        fix = (
            "Use t.buffers() for the bytes. To save, use torch.save, or qtensor.checkpoints.save "
            "for safetensors; before save_pretrained of a model of transformers, call "
            "attach(model) of qtensor.integrations.transformers; or give safetensors the tensors "
            "in t.buffers() and rebuild with t.quantizer.assemble(buffers, shape, dtype). For "
            "async_save of torch.distributed.checkpoint, pass "
            "async_stager=qtensor.distributed.Stager(). In place of accelerate's functions of the "
            "same names, call disk_offload or dispatch_model of qtensor.integrations.offload"
        )
        self._refuse_memory("data_ptr", fix)

    def storage(self) -> NoReturn:
        """Raise an error, as ``data_ptr`` does.

        Raises:
            UnsupportedError: always.
        """
        self._refuse_memory("storage", "Use t.buffers() for the bytes")

    def _refuse_memory(self, op: str, fix: str) -> NoReturn:
        rule = "a quantized tensor is not one block of memory; its inner buffers hold its bytes"
        fail(f"{op}[{self._quantizer.format}]", rule, type(self).__name__, fix, UnsupportedError)

    def _refuse_elementwise(self, *args: object, **kwargs: object) -> NoReturn:
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
        for each in self._parts or self.buffers():
            each.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return True if every buffer is in shared memory."""
        return all(each.is_shared() for each in self._parts or self.buffers())

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return reduce(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        return deepcopy(self, memo)

    def __get_tensor_shard__(self, index: object) -> CheckpointPart:
        """Return what ``torch.distributed.checkpoint`` saves, or writes to."""
        return CheckpointPart(self, entry=getattr(index, "fqn", ""))

    @property
    def __create_chunk_list__(self) -> NoReturn:
        """Begin a load of ``torch.distributed.checkpoint``, which asks for this attribute then.

        Without the attribute, torch describes the tensor itself, as it does a plain one. A load
        that stopped must not leave its rectangles to the next one.
        """
        begin_load(self)
        raise AttributeError("torch describes the tensor itself")

    def _stable_hash_for_caching(self) -> str:
        """Return the key of this tensor for AOTAutograd's cache."""
        name, dtype, quantizer, layout = self._context
        inner = self._parts or self.buffers()
        tensors = " ".join(map(_traced_properties, (self, *inner)))
        return f"{name}:{dtype}:{quantizer.canonical}:{layout}:{tensors}:{fingerprint()}"

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Op, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})


keep_out_dynamo(QuantizedTensor.__dict__["__torch_dispatch__"].__func__.__code__)
