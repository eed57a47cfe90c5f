"""Views of quantized tensors whose bytes are not laid out in the shape of the view.

Such a view is a tensor of the class of its parts, and holds these parts instead of buffers.

| layout | shape | made by |
|---|---|---|
| transposed | (..., B, A) of a stack (..., A, B) | ``stack.mT`` |
| reshaped | (numel,) | ``view(-1)`` of a tensor whose codes or factors have no 1-D form |
| reshaped | (N, C, *kernel) | the weight of a convolution, the matrix (N, C * prod(kernel)) |
| stacked | (n * d0, ...) of n parts (d0, ...) | a gather of parts that do not make up one tensor |
| sliced | (..., d, ..., K), a part (d, ..., K) for each index before d | a slice of a middle dim |

``dequantize``, products, writes, and views that lead back to the parts use the parts. Reading a
buffer gives a new copy of the current bytes, or raises an error. The copy is not cached, so a later
read is never outdated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape, normalize, squeezed, unsqueezed
from qtensor.core.errors import UnsupportedError, fail
from qtensor.core.quantizer_registry import QuantizerLike
from qtensor.library.dequantize import DEQUANTIZE
from qtensor.library.same_rows import has_data
from qtensor.storage import geometry
from qtensor.storage.base import QuantizedTensorStorage, TensorOrStorage
from qtensor.storage.ops.table import Args, Op
from qtensor.storage.origin import FRESH, Origin
from qtensor.storage.rebuild import (
    FROM_PARTS,
    Q,
    of_parts,
    reshaped,
    same,
    set_origin,
    viewed_strides,
    with_buffers,
)

if TYPE_CHECKING:
    from qtensor.storage.tensor import QuantizedTensor

Shapes = Sequence[int]
Copy = Callable[[Tensor, Tensor], Tensor]
"""Copies into a tensor, as ``copy_into`` of ``write.py`` does."""
_ALIASES = ("detach", "alias", "lift_fresh")
_VIEWS = ("view", "_unsafe_view", "reshape")


class Layout:
    """How a view shows its parts."""

    def values(self, t: QuantizedTensorStorage, dtype: torch.dtype | None) -> Tensor:
        """Return the values of ``t``, plain."""
        raise NotImplementedError

    def laid_out(self, t: QuantizedTensor) -> QuantizedTensor:
        """Return a copy of ``t`` that has buffers.

        Raises:
            QTensorError: the bytes cannot be laid out in the shape of ``t``.
        """
        raise NotImplementedError

    def write(self, t: QuantizedTensor, src: Tensor, copy: Copy) -> None:
        """Write ``src``, a quantized or plain tensor of the shape of ``t``, into the parts.

        Args:
            t: the view.
            src: what is written.
            copy: copies into a part.
        """
        raise NotImplementedError

    def view(self, func: Op, t: QuantizedTensor, args: Args) -> Any:
        """Return the result of a view op, given its other arguments; None if there is none."""
        raise NotImplementedError


class Transposed(Layout):
    """A stack with its last two dims swapped; its parts and views are transposes of the stack's."""

    def values(self, t: QuantizedTensorStorage, dtype: torch.dtype | None) -> Tensor:
        """Return the values of the stack, transposed."""
        return values(t._parts[0], dtype).transpose(-2, -1).contiguous()

    def laid_out(self, t: QuantizedTensor) -> QuantizedTensor:
        """Return a copy of the transposed stack."""
        with torch.inference_mode(t.is_inference()):
            buffers = geometry.transpose_each(t._parts[0], t._quantizer)
        return with_buffers(t, buffers, origin=FRESH)

    def write(self, t: QuantizedTensor, src: Tensor, copy: Copy) -> None:
        """Write into the stack."""
        copy(t._parts[0], src.transpose(-2, -1))

    def view(self, func: Op, t: QuantizedTensor, args: Args) -> Any:
        """Return the transpose of what the op makes of the stack."""
        name, (stack,) = _name(func), t._parts
        if name in ("transpose", "permute"):
            order = list(range(t.ndim))
            if name == "permute":
                order = [normalize(dim, t.ndim) for dim in args[0]]
            else:
                a, b = (normalize(dim, t.ndim) for dim in args[:2])
                order[a], order[b] = order[b], order[a]
            if order == list(range(t.ndim)):
                return same(t)
            back = [*range(t.ndim - 2), t.ndim - 1, t.ndim - 2]
            return same(stack) if order == back else None
        if name in ("slice", "select", "unbind", "split", "split_with_sizes"):
            at = 0 if name in ("slice", "select", "unbind") else 1
            dim = normalize(args[at] if len(args) > at else 0, t.ndim)
            turned = dim if dim < t.ndim - 2 else 2 * t.ndim - 3 - dim
            result = func(stack, *args[:at], turned, *args[at + 1 :])
            drops = name in ("select", "unbind") and dim >= t.ndim - 2
            parts = result if isinstance(result, (list, tuple)) else [result]
            parts = parts if drops else [_mT(part) for part in parts]
            return parts if isinstance(result, (list, tuple)) else parts[0]
        if name in _VIEWS:
            shape = _known_sizes(t, args[0])
            if shape[-2:] == tuple(t.shape[-2:]):
                return _mT(func(stack, (*shape[:-2], *tuple(stack.shape[-2:]))))
            # A reshape arrives here too: torch copies where the strides have no such view.
            if viewed_strides(t, shape):
                return None
            copy = func(self.laid_out(t), shape)
            if not all(isinstance(n, int) for n in (*t.shape, *shape)):
                # Torch may have a view here, so that the copy must refuse writes.
                set_origin(copy, copy._origin._replace(is_part=True, is_copy=True))
            return copy
        return None


class Reshaped(Layout):
    """A tensor under a shape in which its codes and factors have no form.

    Libraries store a tensor as (numel,) and take its shape back later. The weight of a convolution
    is a matrix, of which each row holds the values of an output channel.
    """

    def values(self, t: QuantizedTensorStorage, dtype: torch.dtype | None) -> Tensor:
        """Return the values of the tensor under the other shape."""
        return values(t._parts[0], dtype).view(t.shape)

    def laid_out(self, t: QuantizedTensor) -> NoReturn:
        """Refuse: codes and factors have no form with this shape.

        Raises:
            UnsupportedError: always.
        """
        tensor = t._parts[0]
        fail(
            f"view[{t._quantizer.format}]",
            f"a view {tuple(t.shape)} of codes or factors that have no form of this shape only "
            "holds the tensor",
            f"{t._quantizer.canonical} {tuple(tensor.shape)}",
            f"View it back to {tuple(tensor.shape)} first, or call .dequantize() before the view"
            + geometry.BUCKETS * (t.ndim == 1),
            UnsupportedError,
        )

    def write(self, t: QuantizedTensor, src: Tensor, copy: Copy) -> None:
        """Write into the tensor."""
        copy(t._parts[0], src.reshape(t._parts[0].shape))

    def view(self, func: Op, t: QuantizedTensor, args: Args) -> Any:
        """Return the tensor under its own shape or another one, or some of its rows."""
        name, (tensor,) = _name(func), t._parts
        if name in _VIEWS:
            shape = _known_sizes(t, args[0])
            if shape == tuple(t.shape):
                return same(t)
            if shape == tuple(tensor.shape):
                return same(tensor)
            return reshaped(tensor, shape) if t.ndim == 1 else func(tensor, args[0])
        if name in ("slice", "split", "split_with_sizes") and t.shape[0] == tensor.shape[0]:
            at = 0 if name == "slice" else 1
            if normalize(args[at] if len(args) > at else 0, t.ndim):
                return None
            result = func(tensor, *args)
            parts = result if isinstance(result, (list, tuple)) else [result]
            parts = [reshaped(part, (part.shape[0], *t.shape[1:])) for part in parts]
            return parts if isinstance(result, (list, tuple)) else parts[0]
        return None


class Stacked(Layout):
    """Parts of one shape, concatenated along dim 0, as a gather returns them."""

    def values(self, t: QuantizedTensorStorage, dtype: torch.dtype | None) -> Tensor:
        """Return the values of all parts."""
        return torch.cat([values(part, dtype) for part in t._parts])

    def laid_out(self, t: QuantizedTensor) -> QuantizedTensor:
        """Return the parts as one tensor with buffers.

        Raises:
            QTensorError: a part ends inside a block, or the parts have different factors.
        """
        return torch.ops.aten.cat(list(t._parts), 0)

    def write(self, t: QuantizedTensor, src: Tensor, copy: Copy) -> None:
        """Write into each part."""
        for part, own in zip(t._parts, src.split(t._parts[0].shape[0]), strict=True):
            copy(part, own)

    def view(self, func: Op, t: QuantizedTensor, args: Args) -> Any:
        """Return the parts, or their concatenation along another dim."""
        name, parts = _name(func), t._parts
        if name in ("split", "split_with_sizes"):
            rows, dim = parts[0].shape[0], args[1] if len(args) > 1 else 0
            sizes = args[0] if isinstance(args[0], (list, tuple)) else None
            whole = sizes is not None and list(sizes) == [rows] * len(parts)
            if not normalize(dim, t.ndim) and (whole or args[0] == rows):
                return [same(part) for part in parts]
        if name in _VIEWS and (dim := self._gather_dim(t, _known_sizes(t, args[0]))) is not None:
            return torch.ops.aten.cat(list(parts), dim)
        # Other views read a copy, so writes to them raise an error.
        copied = self.laid_out(t)
        set_origin(copied, Origin(is_part=True, is_copy=True, may_be_padded=True))
        return func(copied, *args)

    @staticmethod
    def _gather_dim(t: QuantizedTensor, shape: tuple[int, ...]) -> int | None:
        """Return the dim along which the parts of a view of ``shape`` are, or None.

        If each part has one row, torch moves the parts to another dim by a view.
        """
        part = tuple(t._parts[0].shape)
        for dim in range(1, len(part)):
            wanted = (*part[:dim], len(t._parts) * part[dim], *part[dim + 1 :])
            if shape == wanted and set(part[:dim]) == {1}:
                return dim
        return None


class Sliced(Stacked):
    """A slice of a middle dim, whose factors are not evenly spaced."""

    def values(self, t: QuantizedTensorStorage, dtype: torch.dtype | None) -> Tensor:
        """Return the values of all parts."""
        return super().values(t, dtype).view(t.shape)

    def laid_out(self, t: QuantizedTensor) -> QuantizedTensor:
        """Return the parts as one tensor with buffers."""
        return torch.ops.aten.view.default(super().laid_out(t), t.shape)

    def write(self, t: QuantizedTensor, src: Tensor, copy: Copy) -> None:
        """Write into each part."""
        first = t._parts[0].shape
        src = src.clone() if getattr(src, "_parts", ()) else src
        super().write(t, src.reshape(len(t._parts) * first[0], *first[1:]), copy)

    def view(self, func: Op, t: QuantizedTensor, args: Args) -> Any:
        """Return a slice of the parts, or some of them."""
        name, parts = _name(func), t._parts
        own, split = tuple(parts[0].shape), t.ndim - parts[0].ndim
        if name not in ("slice", "select") or tuple(t.shape[split:]) != own:
            return same(t) if name in _VIEWS and tuple(args[0]) == tuple(t.shape) else None
        dim, *bounds = args or (0,)
        dim = normalize(dim, t.ndim)
        shape = func(torch.empty(t.shape, device="meta"), dim, *bounds).shape
        if dim < split:
            grid = torch.arange(len(parts)).view(t.shape[:split])
            kept = [parts[i] for i in func(grid, dim, *bounds).flatten().tolist()]
            # Without a part there is no value either, and nothing to write.
            return sliced(kept, shape) if kept else func(self.laid_out(t), dim, *bounds)
        if name == "select":  # The parts keep the dim, so that rows stay rows.
            index = bounds[0] % t.shape[dim]
            func, bounds = torch.ops.aten.slice.Tensor, [index, index + 1]
        cut = [func(part, dim - split, *bounds) for part in parts]
        return sliced([inner for part in cut for inner in (part._parts or (part,))], shape)


LAYOUTS: dict[str, Layout] = {
    "transposed": Transposed(),
    "reshaped": Reshaped(),
    "stacked": Stacked(),
    "sliced": Sliced(),
}
"""Layouts by the name that an origin holds."""


def layout_of(t: QuantizedTensorStorage) -> Layout | None:
    """Return how ``t`` shows its parts; None for a tensor or storage with buffers."""
    return LAYOUTS[t._origin.layout] if t._parts else None


def stack_of(t: TensorOrStorage) -> QuantizedTensor | None:
    """Return the stack of which ``t`` is the transpose; None for every other tensor."""
    if isinstance(t, QuantizedTensorStorage) and isinstance(layout_of(t), Transposed):
        return t._parts[0]
    if isinstance(t, Tensor) and isinstance(t, QuantizedTensorStorage) and _is_permuted_stack(t):
        return cast("QuantizedTensor", t.mT)
    return None


def _is_permuted_stack(t: QuantizedTensorStorage) -> bool:
    """Return whether t is a ``stack.mT`` with permuted codes, of a format with one factor."""
    if len(t.shape) != 3 or not t._quantizer.per_tensor or not t._quantizer.rowwise:
        return False
    codes = t.buffers()[0]
    return codes.stride(1) == 1 and codes.stride(2) >= codes.shape[1] > 1


def values(t: QuantizedTensorStorage, dtype: torch.dtype | None = None) -> Tensor:
    """Return the dequantized values of a tensor or storage, without a gradient.

    Args:
        t: quantized tensor or storage.
        dtype: dtype of the result; the nominal dtype if None.

    Returns:
        A plain tensor of the logical shape.
    """
    layout = layout_of(t)
    if layout is not None:
        return layout.values(t, dtype)
    return DEQUANTIZE(t.buffers(), t._quantizer.canonical, t.shape, dtype or t.dtype)


def _name(func: Op) -> str:
    return str(func._schema.name.removeprefix("aten::"))


def _mT(t: QuantizedTensor) -> QuantizedTensor:
    return torch.ops.aten.transpose.int(t, -2, -1)


def _known_sizes(t: QuantizedTensor, shape: Shapes) -> tuple[int, ...]:
    """Return the sizes of a view, with the one that is -1 filled in."""
    if -1 not in shape:
        return tuple(shape)
    known = math.prod([n for n in shape if n != -1])
    return tuple([t.numel() // max(known, 1) if n == -1 else n for n in shape])


def view_op(func: Op, t: QuantizedTensor, args: Args) -> Any:
    """Return the result of a view op on a view without buffers.

    Raises:
        UnsupportedError: the result would need a copy, which would not follow later writes.
    """
    name = _name(func)
    if name in _ALIASES:
        return same(t)
    if name == "expand":
        fits = all(n in (-1, own) for n, own in zip(args[0], t.shape, strict=False))
        return same(t) if fits and len(args[0]) == t.ndim else values(t).expand(args[0])
    if name in ("squeeze", "unsqueeze"):
        change = squeezed if name == "squeeze" else unsqueezed
        func, args = torch.ops.aten.view.default, (change(t.shape, *args),)
    cause = None
    try:
        result = LAYOUTS[t._origin.layout].view(func, t, args)
    except UnsupportedError as error:
        cause, result = error, None
    if result is not None:
        return result
    try:
        fail(
            f"{name}[{t._quantizer.format}]",
            f"a {t._origin.layout} view has only the views that its parts have",
            f"{tuple(t.shape)} and {list(args)}",
            "Call .clone() first, which copies it",
            UnsupportedError,
        )
    except UnsupportedError as error:
        raise error from cause


# ---- making views


def transposed_stack(stack: Q) -> Q:
    """Return ``stack.mT``, (..., B, A), of a quantized stack (..., A, B) of three dims or more."""
    quantizer = stack._quantizer.transposed()
    square = quantizer.square_block
    if any(n % square for n in stack.shape[-2:]):
        quantizer = quantizer.without_square_blocks()
    shape = (*stack.shape[:-2], stack.shape[-1], stack.shape[-2])
    # Another object: the caller may give `stack` other buffers.
    return _lazy(shape, quantizer, [same(stack)], "transposed")


def stacked(parts: Sequence[Q]) -> Q:
    """Return the parts of all ranks, each of shape (d0, ...), concatenated along dim 0.

    The result has buffers where the parts make up one tensor.
    """
    if len(parts) == 1:
        return parts[0]
    if _joins(parts):
        return torch.ops.aten.cat(list(parts), 0)
    first = parts[0]
    quantizer = first._quantizer
    # One buffer holds the factors that the parts have in common.
    shared = [s.name for s in quantizer.slots if not any(d.axis in ("m", "lead") for d in s.dims)]
    for part in parts if shared else ():
        set_origin(part, part._origin._replace(is_part=True, shared=tuple(shared)))
    if first.ndim > 1 and _cuts_squares(first):
        quantizer = quantizer.without_square_blocks()
    return _lazy((len(parts) * first.shape[0], *first.shape[1:]), quantizer, parts, "stacked")


FROM_PARTS["stacked"] = stacked


def sliced(parts: Sequence[Q], shape: Shape) -> Q:
    """Return the slices (d, ..., K) of all indices before a middle dim, as one view ``shape``.

    ``shape`` lacks d after a select, which then leaves the parts too if they remain matrices.
    """
    own = tuple(parts[0].shape)
    if len(own) > 2 and tuple(shape)[-len(own) :] != own:
        parts = [torch.ops.aten.view.default(part, own[1:]) for part in parts]
    return _lazy(shape, parts[0]._quantizer, parts, "sliced")


def _lazy(shape: Shape, quantizer: QuantizerLike, parts: Sequence[Q], layout: str) -> Q:
    first = parts[0]
    origin = Origin(
        is_copy=any(part._origin.is_copy for part in parts),
        layout=layout,
        may_be_padded=first._origin.may_be_padded,
    )
    return of_parts(type(first), shape, first._context[1], quantizer, parts, origin)


def _cuts_squares(part: QuantizedTensor) -> bool:
    """Return whether a part (d0, ...) with square blocks ends inside one."""
    return geometry.rows_cols(part.shape)[0] % part._quantizer.square_block != 0


def _joins(parts: Sequence[QuantizedTensor]) -> bool:
    """Return whether the parts make up one tensor, and dim 0 is enough to split them again."""
    first = parts[0]
    if first.ndim < 2 or first.shape[0] == 1 or _cuts_squares(first):
        return False
    inner = geometry.rows_cols(first.shape)[0]
    for slot in first._quantizer.slots:
        axes = {dim.axis: dim for dim in slot.dims}
        if "m" in axes:
            if inner % geometry.granule(slot, axes["m"]):
                return False
        elif "k" in axes and "lead" not in axes and not _equal(parts, slot.name):
            return False
    return True


def _equal(parts: Sequence[QuantizedTensor], name: str) -> bool:
    """Return True if the factors ``name`` of all parts are equal; a trace cannot know."""
    first, *others = [getattr(part, name) for part in parts]
    return has_data(first) and all(torch.equal(other, first) for other in others)


# ---- what the class needs


class MissingBuffer:
    """Descriptor for a buffer that a tensor does not hold: None, or the current bytes of a view.

    Python uses it only if the tensor itself has no such attribute.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, t: QuantizedTensor | None, owner: type | None = None) -> Any:
        if t is None or not t._parts or self.name not in t._quantizer.slot_names:
            return None
        return getattr(LAYOUTS[t._origin.layout].laid_out(t), self.name)
