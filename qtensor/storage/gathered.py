"""Define the result of a gather whose parts have no common blocks.

``all_gather_into_tensor`` stacks the parts of all ranks along dim 0. torch then splits the result
and concatenates the parts along the sharded dim, if that is another one. The stacked parts may not
be a quantized tensor themselves: a part may end inside a block, or have factors of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from qtensor.library.same_rows import has_data
from qtensor.storage import geometry

_SPLITS = ("aten::split", "aten::split_with_sizes")
_SAME = (
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
    "aten::detach",
    "aten::alias",
)


class GatheredTensor(torch.Tensor):
    """Hold quantized parts of one shape, stacked along dim 0.

    A split gives the parts back. Every other op reads the parts as one quantized tensor, and raises
    an error if they do not make up one.
    """

    parts: list[Any]

    @staticmethod
    def __new__(cls: type[GatheredTensor], parts: Sequence[Any]) -> GatheredTensor:
        """Make a tensor of shape (ranks * d0, d1, ...) from one part of (d0, d1, ...) a rank."""
        first = parts[0]
        shape = (len(parts) * first.shape[0], *first.shape[1:])
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=first.dtype, device=first.device
        )
        self.parts = list(parts)
        return self

    def joined(self) -> Any:
        """Return the parts as one quantized tensor.

        Raises:
            QTensorError: a part ends inside a block, or the parts have different factors.
        """
        return torch.ops.aten.cat(self.parts, 0)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values of the parts as a plain tensor."""
        return torch.cat([part.dequantize(dtype) for part in self.parts])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredTensor({len(self.parts)} parts of {self.parts[0]!r})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [f"part{i}" for i in range(len(self.parts))]
        for name, part in zip(names, self.parts, strict=True):
            setattr(self, name, part)
        return names, None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], context: Any, outer_size: Any, outer_stride: Any
    ) -> Any:
        # A compiled graph could not compare the factors of the parts; here they are known.
        return stack_parts(list(inner.values()))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, gathered = func._schema.name, args[0] if args else None
        if isinstance(gathered, GatheredTensor):
            if name in _SAME:
                return GatheredTensor(gathered.parts)
            if name in _SPLITS and gathered._splits_into_parts(*args[1:], **kwargs):
                return list(gathered.parts)
            if name == "aten::view" and (dim := gathered._gather_dim(args[1])) is not None:
                return torch.ops.aten.cat(gathered.parts, dim)
        plain_args, plain_kwargs = pytree.tree_map_only(
            GatheredTensor, GatheredTensor.joined, (args, kwargs)
        )
        return func(*plain_args, **plain_kwargs)

    def _splits_into_parts(self, sizes: Any, dim: int = 0) -> bool:
        rows = self.parts[0].shape[0]
        if geometry.normalize(dim, self.ndim):
            return False
        if isinstance(sizes, (list, tuple)):
            return list(sizes) == [rows] * len(self.parts)
        return bool(sizes == rows)

    def _gather_dim(self, shape: Sequence[int]) -> int | None:
        """Return the dim along which the parts of a view of ``shape`` are, or None.

        If each part has one row, torch moves the parts to another dim by a view.
        """
        part = tuple(self.parts[0].shape)
        for dim in range(1, len(part)):
            wanted = (*part[:dim], len(self.parts) * part[dim], *part[dim + 1 :])
            if tuple(shape) == wanted and set(part[:dim]) == {1}:
                return dim
        return None


def stack_parts(parts: Sequence[Any]) -> Any:
    """Return the parts of all ranks, stacked along dim 0.

    The result is a quantized tensor where the parts make up one, else a ``GatheredTensor``.
    """
    if len(parts) == 1:
        return parts[0]
    return torch.ops.aten.cat(list(parts), 0) if _joins(parts) else GatheredTensor(parts)


def _joins(parts: Sequence[Any]) -> bool:
    """Return True if the parts make up one tensor and no view is needed to take them apart."""
    first = parts[0]
    rows = first.shape[0]
    if first.ndim < 2 or rows == 1:
        return False
    inner = geometry.rows_cols(first.shape)[0]
    quantizer = first._quantizer
    if quantizer.two_dimensional and inner % quantizer.spec.block[1]:
        return False
    for slot in quantizer.slots:
        axes = {dim.axis: dim for dim in slot.dims}
        if "m" in axes:
            if inner % geometry.granule(slot, axes["m"]):
                return False
        elif "k" in axes and "lead" not in axes and not _equal(parts, slot.name):
            return False
    return True


def _equal(parts: Sequence[Any], name: str) -> bool:
    """Return True if the factors ``name`` of all parts are equal; a trace cannot know."""
    first, *others = [getattr(part, name) for part in parts]
    return has_data(first) and all(torch.equal(other, first) for other in others)
