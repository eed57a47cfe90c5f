"""A product as those who compute it see it: sizes, formats and directions, without data."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtensor.layout import Shape, buffer_shapes
from qtensor.library.codec import Codec, parse

SCALAR_FORMATS = ("fp8", "fp8_delayed")
"""FP8 with one factor a tensor."""


@dataclass(frozen=True)
class Operand:
    """One side of a product.

    Attributes:
        quantizer: canonical string, or "" for a plain tensor.
        shape: logical.
        dtype: of a plain tensor, else uint8.
        columnwise: the direction that is read where there are two; None: the quantizer's own.
        contracted: the logical dim that is summed over: -1 or -2.
    """

    quantizer: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    columnwise: bool | None
    contracted: int

    @functools.cached_property
    def codec(self) -> Codec | None:
        """The quantizer."""
        return parse(self.quantizer) if self.quantizer else None

    @property
    def label(self) -> str:
        """For messages."""
        if self.codec is None:
            return str(self.dtype).removeprefix("torch.")
        return self.codec.format

    @property
    def element(self) -> str | None:
        """Name of the element code, or None for plain tensors."""
        return None if self.codec is None else self.codec.element.name  # type: ignore[attr-defined]

    @functools.cached_property
    def side(self) -> str:
        """Prefix of the buffers that are read: "_rowwise" or "_columnwise"."""
        return "" if self.codec is None else self.codec.side(self.columnwise)

    @functools.cached_property
    def _slots(self) -> dict[str, int]:
        return {} if self.codec is None else {s.name: i for i, s in enumerate(self.codec.slots)}

    def slot(self, name: str) -> int | None:
        """Index of a buffer, or None where there is none of that name."""
        return self._slots.get(name)

    @functools.cached_property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the buffers of a whole tensor."""
        if self.codec is None:
            return (self.shape,)
        return tuple(tuple(size) for size in buffer_shapes(self.codec.slots, self.shape))

    def option(self, name: str, default: Any = None) -> Any:
        """An option of the quantizer."""
        return getattr(self.codec, name, default)

    @property
    def rotated(self) -> bool:
        """Whether the data that are read are rotated (NVFP4 with a Hadamard transform)."""
        return bool(self.option("with_rht")) and f"_{self.option('rht_side')}" == self.side

    @property
    def factors_follow(self) -> bool:
        """Whether factors of rows or columns (fp8_rowwise) are one for each line that is not contracted."""
        return (self.option("axis", -1) == -1) == (self.contracted == -1)


@dataclass(frozen=True)
class Problem:
    """One product.

    Attributes:
        a: left operand.
        b: right operand.
        layout: TN, NN or NT.
        dtype: of the result.
        bias: shape and dtype of the bias, or None.
        device: type of the device.
        capability: compute capability of a CUDA device, else None.
        processors: multiprocessors of it.
        fast: fast accumulation is allowed.
    """

    a: Operand
    b: Operand
    layout: str
    dtype: torch.dtype
    bias: tuple[tuple[int, ...], torch.dtype] | None = None
    device: str = "cuda"
    capability: tuple[int, int] | None = None
    processors: int = 132
    fast: bool = False

    @property
    def rows(self) -> tuple[int, ...]:
        """Dims of ``a`` that the result keeps, the batch included."""
        shape = self.a.shape
        return (*shape[:-2], shape[-1]) if self.layout == "NT" else shape[:-1]

    @property
    def batched(self) -> bool:
        """Whether each matrix of a batch has a factor of its own."""
        return len(self.b.shape) > 2 or (self.layout == "NT" and len(self.a.shape) > 2)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(batch, M, N, K). Without a batch in ``b``, all rows of ``a`` are one matrix."""
        k = self.a.shape[self.a.contracted]
        n = self.b.shape[-2] if self.layout == "TN" else self.b.shape[-1]
        if not self.batched:
            return 1, math.prod(self.rows), n, k
        return math.prod(self.rows[:-1]), self.rows[-1], n, k

    @property
    def arch(self) -> str:
        """As kernels name it: "sm_90a"; "cpu" elsewhere."""
        if self.capability is None:
            return self.device
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")

    def text(self) -> str:
        """The product in words."""
        batch, m, n, k = self.sizes
        dtype = str(self.dtype).removeprefix("torch.")
        many = f"{batch} x " if batch > 1 else ""
        bias = " + bias" if self.bias else ""
        sizes = f"{many}M={m} N={n} K={k}"
        return (
            f"{self.a.label} x {self.b.label}{bias} -> {dtype}, {self.layout}, {sizes}, {self.arch}"
        )


def operands(
    a: tuple[str, Shape, torch.dtype], b: tuple[str, Shape, torch.dtype], layout: str
) -> tuple[Operand, Operand]:
    """Both sides of a product from (canonical string or "", logical shape, dtype of the first buffer).

    With both quantized, the sides count whose blocks run along the contraction; alone, an operand's value counts.
    """
    both = bool(a[0] and b[0])
    left = Operand(
        a[0], tuple(a[1]), a[2], layout == "NT" if both else None, -2 if layout == "NT" else -1
    )
    right = Operand(
        b[0], tuple(b[1]), b[2], layout != "TN" if both else None, -1 if layout == "TN" else -2
    )
    return left, right


def whole(operand: Operand, buffers: list[Tensor], slots: tuple[int, ...]) -> bool:
    """Whether buffers have the sizes of a whole tensor; parts of padded factors lack what kernels read."""
    sizes = operand.sizes
    return all(buffers[i].shape == sizes[i] for i in slots)
