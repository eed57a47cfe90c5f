"""Describe tensors without data, for example the result of an op before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.errors import ArgumentTypeError, check, fail
from qtensor.core.quantizer_registry import parse
from qtensor.quantizers.base import Quantizer
from qtensor.storage.base import Context, QuantizedTensorStorage
from qtensor.storage.checks import as_shape


@dataclass(init=False)
class TensorProto:
    """Describe a tensor: shape, dtype, device and, if quantized, the quantizer that makes it.

    Attributes:
        shape: logical shape; sizes may be symbolic.
        dtype: nominal dtype.
        quantizer: None for a plain tensor; a format id or canonical string is parsed.
            ``update_usage`` replaces it.
        requires_grad: True if the tensor that ``create_tensor`` makes requires grad.
        device: device of the buffers.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    quantizer: Quantizer | None
    requires_grad: bool
    device: torch.device | str

    def __init__(
        self,
        shape: Shape | int,
        dtype: torch.dtype,
        quantizer: Quantizer | str | None = None,
        requires_grad: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        if isinstance(quantizer, str):
            quantizer = cast(Quantizer, parse(quantizer))
        if quantizer is not None and not isinstance(quantizer, Quantizer):
            rule = "the quantizer is a quantizer, a format's id or None"
            fix = 'Pass a quantizer, for example qtensor.quantizer("mxfp8")'
            fail("TensorProto", rule, repr(quantizer), fix, ArgumentTypeError)
        if not isinstance(dtype, torch.dtype):
            rule = "the dtype must be a torch.dtype"
            fix = "Pass one, for example torch.float32"
            fail("TensorProto", rule, repr(dtype), fix, ArgumentTypeError)
        self.shape = as_shape("TensorProto", shape)
        self.dtype = dtype
        self.quantizer = quantizer
        self.requires_grad = requires_grad
        self.device = device

    @property
    def is_quantized(self) -> bool:
        """Return True if this describes a quantized tensor."""
        return self.quantizer is not None

    def update_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Change the usages of this description; the caller's quantizer stays as it is.

        Raises:
            QTensorError: the tensor is plain, or no usage is left.
        """
        if self.quantizer is None:
            fail(
                "TensorProto.update_usage",
                "only quantized tensors have usages",
                "a plain one",
                "Set .quantizer first",
            )
        self.quantizer = self.quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)

    def inner_names(self) -> list[str]:
        """Return the names of the inner buffers in slot order; [] for a plain tensor."""
        return [slot.name for slot in self.quantizer.slots] if self.quantizer is not None else []

    def create_metadata(self) -> Context | None:
        """Return the flatten context of the tensor; None for a plain tensor."""
        if self.quantizer is None:
            return None
        return self.quantizer.create_metadata(
            self.shape, dtype=self.dtype, requires_grad=self.requires_grad
        )

    def create_inner_tensors(self) -> list[Tensor]:
        """Return uninitialised buffers in slot order, with zero padding, or one plain tensor."""
        if self.quantizer is None:
            return [torch.empty(tuple(self.shape), dtype=self.dtype, device=self.device)]
        return list(self.quantizer.alloc_tensors(self.shape, device=self.device).values())

    def assemble(self, flat: Sequence[Tensor]) -> Tensor:
        """Return a tensor of this description with the given buffers.

        Args:
            flat: inner buffers in slot order, or one plain tensor.

        Raises:
            QTensorError: the number of buffers is wrong.
        """
        expected = len(self.inner_names()) or 1
        check(
            len(flat) == expected,
            "TensorProto.assemble",
            f"{expected} buffers are needed: {', '.join(self.inner_names()) or 'the tensor'}",
            len(flat),
            "Pass the list that create_inner_tensors returns",
        )
        tensor = (
            flat[0]
            if self.quantizer is None
            else self.quantizer.assemble(flat, self.shape, self.dtype)
        )
        return tensor.requires_grad_() if self.requires_grad else tensor

    def create_tensor(self) -> Tensor:
        """Return an uninitialised tensor of this description; ``torch.compile`` can trace this."""
        return self.assemble(self.create_inner_tensors())


def to_tensor_proto(t: Tensor | QuantizedTensorStorage) -> TensorProto:
    """Return the description of a plain tensor, a quantized tensor or a bare storage.

    Raises:
        ArgumentTypeError: ``t`` is neither a tensor nor a storage.
    """
    if not isinstance(t, torch.Tensor | QuantizedTensorStorage):
        fail(
            "to_tensor_proto",
            "a tensor or storage is needed",
            type(t).__name__,
            "Pass a torch.Tensor",
            ArgumentTypeError,
        )
    quantizer = getattr(t, "_quantizer", None)
    return TensorProto(
        tuple(t.shape), t.dtype, quantizer, bool(getattr(t, "requires_grad", False)), t.device
    )
