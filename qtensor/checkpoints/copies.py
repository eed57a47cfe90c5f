"""Keep the dtypes and the shapes of stored factors in a copy of the same layout."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from qtensor.checkpoints.containers.base import STORED_TYPES, TensorInfo

_Form = tuple[torch.dtype, tuple[int, ...]]


class Forms:
    """Give stored tensors the dtype and the shape that the source has, where nothing is lost.

    Our tensors hold float32 factors of one shape, and files bfloat16 or E8M0 ones of several
    shapes. The form of a tensor is decided when it is met first, so that a header and its data
    agree.
    """

    def __init__(self) -> None:
        self._forms: dict[str, _Form] = {}

    def restored(
        self, stored: Mapping[str, Tensor], source: Mapping[str, TensorInfo]
    ) -> dict[str, Tensor]:
        """Return the stored tensors of a weight, as the writer makes them, in the source's forms.

        Tensors on the meta device are quantized again: they keep their form.
        """
        found = {}
        for name, tensor in stored.items():
            if name not in self._forms:
                self._forms[name] = _form(tensor, source.get(name))
            dtype, shape = self._forms[name]
            found[name] = _converted(tensor, dtype).reshape(shape)
        return found


def _form(tensor: Tensor, info: TensorInfo | None) -> _Form:
    """Return dtype and shape of the source's tensor if both lose nothing, else the own ones."""
    own = tensor.dtype, tuple(tensor.shape)
    if info is None or tensor.is_meta or info.dtype not in STORED_TYPES or info.dtype == "F4":
        return own
    dtype, shape = STORED_TYPES[info.dtype].torch_dtype, tuple(info.shape)
    if math.prod(shape) != tensor.numel() or dtype.is_complex:
        return own
    back = _converted(_converted(tensor, dtype), tensor.dtype)
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (back, tensor)]
    return (dtype, shape) if torch.equal(*raw) else own


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in another dtype: bytes as bytes, E8M0 codes and floats by value."""
    if dtype.itemsize == tensor.dtype.itemsize == 1:
        return tensor.view(dtype)
    if dtype == torch.uint8:
        return tensor.to(torch.float8_e8m0fnu).view(dtype)
    if tensor.dtype == torch.uint8:
        tensor = tensor.view(torch.float8_e8m0fnu)
    return tensor.to(dtype)
