"""Copy, pickle and share quantized tensors as names and plain tensors."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from qtensor.core.errors import fail
from qtensor.core.quantizer_registry import check_buffers, parse
from qtensor.storage.checks import as_shape, check_nominal
from qtensor.storage.rebuild import part_names, reshaped, tensor_of
from qtensor.storage.registry import lookup

if TYPE_CHECKING:
    from qtensor.storage.base import QuantizedTensorStorage

S = TypeVar("S", bound="QuantizedTensorStorage")
_OP = "rebuild"
_FIX = "Load files that torch.save, pickle or copy wrote"


def rebuild(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    canonical: str,
    buffers: dict[str, Tensor],
    requires_grad: bool,
    is_parameter: bool,
    attributes: dict[str, Any] | None = None,
) -> Any:
    """Return the tensor or storage that ``reduce`` took apart.

    The arguments may come from a file, so each of them is checked before an object is made.

    Args:
        name: qualname of the class.
        shape: the logical shape.
        dtype: the nominal dtype.
        canonical: canonical string of the quantizer.
        buffers: inner buffers by constructor keyword.
        requires_grad: True if the tensor requires grad; storages ignore it.
        is_parameter: True if the tensor is a ``torch.nn.Parameter``.
        attributes: other attributes of the object.

    Raises:
        QTensorError: the class or quantizer is unknown, or the buffers do not fit the quantizer.
    """
    if not isinstance(name, str) or not isinstance(canonical, str):
        got = f"{name!r} and {canonical!r}"
        fail(_OP, "the names of the class and of the quantizer must be strings", got, _FIX)
    cls: Any = lookup(name)
    quantizer = parse(canonical)
    op, keywords = f"{_OP}[{name}]", quantizer.keywords
    if cls.spec is not quantizer.spec:
        fail(op, f"the class holds {cls.spec.name} buffers", canonical, _FIX)
    if not isinstance(buffers, dict) or set(buffers) != set(keywords):
        got = list(buffers) if isinstance(buffers, dict) else type(buffers).__name__
        fail(op, f"{canonical} needs the buffers {list(keywords)}", got, _FIX)
    sizes = as_shape(op, shape)
    check_nominal(op, dtype)
    check_buffers(op, quantizer, [buffers[k] for k in keywords], sizes)
    if any(buffer.requires_grad for buffer in buffers.values()):
        fail(op, "buffers do not require grad", "one that does", _FIX)
    if not issubclass(cls, torch.Tensor):
        return cls(torch.Size(sizes), dtype, quantizer, **buffers)
    tensor = cls(torch.Size(sizes), dtype, quantizer, requires_grad=bool(requires_grad), **buffers)
    if is_parameter:
        tensor._is_param = True
    if attributes:
        _restore_attributes(op, tensor, attributes)
    return tensor


def rebuild_view(
    tensor: Any,
    shape: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
    attributes: dict[str, Any] | None = None,
) -> Any:
    """Return the reshaped view that ``reduce`` took apart.

    Args:
        tensor: the tensor in the view.
        shape: the shape of the view.
        requires_grad: True if the view requires grad.
        is_parameter: True if the view is a ``torch.nn.Parameter``.
        attributes: other attributes of the object.

    Raises:
        QTensorError: ``tensor`` is not a quantized tensor with as many elements.
    """
    sizes, known = as_shape(_OP, shape), getattr(tensor, "_quantizer", None) is not None
    if not (known and isinstance(tensor, Tensor) and tensor.numel() == math.prod(sizes)):
        got = f"{sizes} of a {type(tensor).__name__}"
        fail(_OP, "a view holds a quantized tensor with as many elements", got, _FIX)
    view: Any = reshaped(cast(Any, tensor), sizes)
    view.requires_grad_(bool(requires_grad))
    if is_parameter:
        view._is_param = True
    if attributes:
        _restore_attributes(_OP, view, attributes)
    return view


def _restore_attributes(
    op: str, tensor: QuantizedTensorStorage, attributes: dict[str, Any]
) -> None:
    """Set additional attributes on ``tensor``.

    Raises:
        QTensorError: the class already uses one of the names.
    """
    names = list(attributes) if isinstance(attributes, dict) else [type(attributes)]
    own = _own_names(tensor)
    if not all(isinstance(n, str) and n not in own and not hasattr(tensor, n) for n in names):
        fail(op, "attributes have names that the class does not use", names, _FIX)
    tensor.__dict__.update(attributes)


def _own_names(t: QuantizedTensorStorage) -> set[str]:
    """Return the names of the attributes that make up a tensor."""
    inner = {attribute for attribute, _ in t._FLATTEN_TENSOR_BUFFERS}
    own = {"_parts", "_origin", "_quantizer", "_context", "_is_param"}
    return inner | own | set(part_names(len(t._parts)))


def attributes_of(t: QuantizedTensorStorage) -> dict[str, Any]:
    """Return the attributes that others have set on ``t``."""
    own = _own_names(t)
    return {k: v for k, v in getattr(t, "__dict__", {}).items() if k not in own}


def state(t: QuantizedTensorStorage) -> tuple[Any, ...]:
    """Return the arguments of ``rebuild`` that make an equal tensor or storage."""
    buffers = dict(zip(t._quantizer.keywords, t.buffers(), strict=True))
    about = (type(t).__qualname__, tuple(t.shape), t.dtype, t._quantizer.canonical)
    return (*about, buffers, *_flags(t))


def _flags(t: QuantizedTensorStorage) -> tuple[Any, ...]:
    """Return the last arguments of ``rebuild`` and ``rebuild_view``."""
    attributes = attributes_of(t)
    return (
        bool(getattr(t, "requires_grad", False)),
        bool(getattr(t, "_is_param", False)),
        # An empty dict is left out, so that files do not grow.
        *((attributes,) if attributes else ()),
    )


def reduce(t: QuantizedTensorStorage) -> tuple[Any, ...]:
    """Return ``rebuild`` or ``rebuild_view`` and its arguments, for ``__reduce_ex__``."""
    if (tensor := tensor_of(t)) is not t:
        return rebuild_view, (tensor, tuple(t.shape), *_flags(t))
    saved = list(state(t))
    if t._origin.is_part:
        # A part is saved as a tensor of its own. Sharing bytes would also require the view note.
        saved[4] = {keyword: buffer.clone() for keyword, buffer in saved[4].items()}
    return rebuild, tuple(saved)


def deepcopy(t: S, memo: dict[int, Any]) -> S:
    """Return a copy that shares no buffer or attribute with ``t``, for ``__deepcopy__``."""
    if id(t) in memo:
        return memo[id(t)]
    copied: Any
    if (tensor := tensor_of(t)) is not t:
        copied = rebuild_view(deepcopy(tensor, {}), tuple(t.shape), *_flags(t)[:2])
    else:
        saved = list(state(t)[:7])
        saved[4] = {keyword: buffer.clone() for keyword, buffer in saved[4].items()}
        copied = rebuild(*saved)
    memo[id(t)] = copied
    attributes = copy.deepcopy(attributes_of(t), memo)
    if attributes:
        copied.__dict__.update(attributes)
    return cast(S, copied)


# Older files use the second name.
torch.serialization.add_safe_globals([
    rebuild,
    rebuild_view,
    parse,
    (parse, "qtensor.registry.parse"),
])
