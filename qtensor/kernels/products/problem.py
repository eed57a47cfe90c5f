"""Describe a product for backends: formats, sizes and directions, and the call itself."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape, buffer_shapes
from qtensor.core.operand import Operand
from qtensor.core.quantizer_registry import QuantizerLike, parse

SCALAR_FORMATS = ("fp8", "fp8_delayed")
"""FP8 formats with one factor for the whole tensor."""


class Pair(NamedTuple):
    """Both operands of a product.

    Attributes:
        a: left operand, (..., M, K), or (..., K, M) in layout NT.
        b: right operand, (N, K) in layout TN, else (K, N); or with the batch dims of ``a``.
    """

    a: Operand
    b: Operand


class Product(NamedTuple):
    """The arguments of a product.

    Attributes:
        operands: what is multiplied.
        layout: TN, NN or NT.
        bias: float tensor that broadcasts to the product, or None.
        backend: "auto" or the name of a backend.
        fast: sums may stay in narrow accumulators (FP8 on sm_90a).
    """

    operands: Pair
    layout: str
    bias: Tensor | None = None
    backend: str = "auto"
    fast: bool = False


@dataclass(frozen=True)
class GemmSide:
    """An operand of a product without its data: all that the choice of a backend depends on.

    Choices are cached by it, so it holds values only.

    Attributes:
        canonical: text of the quantizer, or "" for a plain tensor.
        shape: logical.
        dtype: of a plain tensor, else uint8.
        columnwise: the direction that is read where there are two; None: the quantizer's own.
        contracted: the logical dim that is summed over: -1 or -2.
        strided: the codes of one sum are known not to be adjacent in memory. Only `explain` looks;
            a call finds out when it runs, so that one choice serves all strides.
    """

    canonical: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    columnwise: bool | None
    contracted: int
    strided: bool = False

    @functools.cached_property
    def quantizer(self) -> QuantizerLike | None:
        """The quantizer, or None for a plain tensor."""
        return parse(self.canonical) if self.canonical else None

    @property
    def label(self) -> str:
        """Name of the format, or of the dtype of a plain tensor, for messages."""
        if self.quantizer is None:
            return str(self.dtype).removeprefix("torch.")
        return self.quantizer.format

    @property
    def element(self) -> str | None:
        """Name of the element code, or None for plain tensors."""
        return None if self.quantizer is None else self.quantizer.element.name

    @functools.cached_property
    def side(self) -> str:
        """Prefix of the buffers that are read: "_rowwise" or "_columnwise"."""
        return "" if self.quantizer is None else self.quantizer.side(self.columnwise)

    @functools.cached_property
    def _slots(self) -> dict[str, int]:
        return (
            {}
            if self.quantizer is None
            else {s.name: i for i, s in enumerate(self.quantizer.slots)}
        )

    def slot(self, name: str) -> int | None:
        """Index of a buffer, or None where there is none of that name."""
        return self._slots.get(name)

    @functools.cached_property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the buffers of a whole tensor."""
        if self.quantizer is None:
            return (self.shape,)
        return tuple(tuple(size) for size in buffer_shapes(self.quantizer.slots, self.shape))

    def option(self, name: str, default: Any = None) -> Any:
        """Return an option of the quantizer."""
        return getattr(self.quantizer, name, default)

    @property
    def global_buffer(self) -> str | None:
        """Name of the buffer with the tensor-wide factor of a two-level format, or None."""
        return None if self.quantizer is None else global_buffer(self.quantizer, self.side)

    @property
    def rotated(self) -> bool:
        """True if the data that are read are rotated (NVFP4 with a Hadamard transform)."""
        return bool(self.option("with_rht")) and f"_{self.option('rht_side')}" == self.side

    @property
    def factors_follow(self) -> bool:
        """True if fp8_rowwise factors belong to lines that are not contracted."""
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
        device: name of the device.
        capability: compute capability of a CUDA device, else None.
        processors: number of multiprocessors of a CUDA device.
        fast: fast accumulation is allowed.
    """

    a: GemmSide
    b: GemmSide
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
        """True if each matrix of a batch has a factor of its own."""
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
        """Name of the architecture in kernels: "sm_90a"; "cpu" elsewhere."""
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


def rotations_cancel(problem: Problem) -> bool:
    """Return True if both sides are rotated alike along the contraction, which cancels."""
    a, b = problem.a, problem.b
    alike = a.option("with_random_sign_mask") == b.option("with_random_sign_mask")
    return a.rotated and b.rotated and alike and problem.sizes[3] % 16 == 0 and not problem.batched


def global_buffer(quantizer: QuantizerLike, side: str) -> str | None:
    """Return the buffer from which a decode of ``side`` gets the tensor-wide factor (NVFP4).

    Its numbers are divided by ``quantizer.global_divisor``. None for formats without that level.
    """
    find = getattr(quantizer, "global_buffer", None)
    return None if find is None else str(find(side))


OperandFacts = tuple[str, Shape, torch.dtype]
"""Canonical text, logical shape, and dtype of the first buffer of an operand."""


def facts_of(operand: Operand) -> OperandFacts:
    """Return what the choice of a backend must know of an operand."""
    return operand.canonical, tuple(operand.shape), operand.buffers[0].dtype


def sides(a: OperandFacts, b: OperandFacts, layout: str) -> tuple[GemmSide, GemmSide]:
    """Return both sides of a product.

    If both are quantized, each is read in the direction with blocks along the contraction. A single
    quantized side is read in the direction that holds its value.
    """
    both = bool(a[0] and b[0])
    left = GemmSide(
        a[0], tuple(a[1]), a[2], layout == "NT" if both else None, -2 if layout == "NT" else -1
    )
    right = GemmSide(
        b[0], tuple(b[1]), b[2], layout != "TN" if both else None, -1 if layout == "TN" else -2
    )
    return left, right


def whole(operand: GemmSide, buffers: list[Tensor], slots: tuple[int, ...]) -> bool:
    """Return whether buffers have the sizes of a whole tensor.

    Slices of padded factors lack the padding that kernels read.
    """
    sizes = operand.sizes
    return all(buffers[i].shape == sizes[i] for i in slots)
