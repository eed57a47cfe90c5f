"""Define the FP8 quantizers with one factor for the tensor, a row or a column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape, rows_cols
from qtensor.core.errors import fail
from qtensor.core.quantizer_registry import Factors
from qtensor.quantizers.base import Quantizer
from qtensor.quantizers.methods import ScaleGrid
from qtensor.quantizers.options import check_choice
from qtensor.reference import float8
from qtensor.reference.learned import slopes
from qtensor.reference.scaling import fp8_scale
from qtensor.storage.float8 import FLOAT8, Float8Tensor, Float8TensorStorage


class Float8Grid(ScaleGrid):
    """The grid of FP8 without blocks; a factor is the encode scale of the tensor, row or column."""

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the size of the tensor, of a row, or of a column."""
        if self.quantizer.per_tensor:
            return shape
        return (1, shape[1]) if self.quantizer.axis == -1 else (shape[0], 1)

    def nearest(self, x: Tensor) -> Tensor:
        """Return the scales of the maxima, (1, 1), (M, 1) or (1, K)."""
        q, amax = self.quantizer, self.quantizer.amax(x)[0]
        scale = fp8_scale(amax, q.element.max, q.force_pow_2_scales, q.amax_epsilon)
        return scale.reshape(1, 1) if q.per_tensor else scale

    def fill_(self, out: dict[str, Tensor], codes: Tensor, factors: Tensor) -> None:
        """Write the codes and the reciprocals of the scales."""
        out["_data"].copy_(codes.view(out["_data"].shape))
        scale_inv = out["_scale_inv"]
        torch.reciprocal(factors.reshape(scale_inv.shape), out=scale_inv)

    def take(self, buffers: dict[str, Tensor]) -> Tensor:
        """Return the reciprocals of the stored factors."""
        return buffers["_scale_inv"].reciprocal().reshape(self.factor_counts())


@dataclass(frozen=True, kw_only=True)
class _Float8(Quantizer, abstract=True):
    """Define the base of the FP8 quantizers without blocks.

    Any shape is legal, and nothing is padded.

    Attributes:
        dtype: "e4m3" (default) or "e5m2", or the torch dtype.
    """

    dtype: str = "e4m3"

    spec = FLOAT8
    tensor_cls = Float8Tensor
    storage_cls = Float8TensorStorage
    per_tensor = True

    @property
    def largest_code(self) -> float:
        """Return the largest magnitude of the element."""
        return float(self.element.max)

    def amax(self, x: Tensor) -> list[Tensor]:
        """Return [the amax of the tensor, float32 (1,)]."""
        return [float8.amax_tensor(x)]

    def amax_shapes(self, shape: Shape) -> list[tuple[int, ...]]:
        """Return [(1,)]."""
        return [(1,)]

    def decode(
        self, buffers: dict[str, Tensor], shape: Shape, columnwise: bool | None = None
    ) -> Tensor:
        """Return float(code) * scale_inv, float32 of ``shape``."""
        return float8.decode_scaled(buffers, tuple(shape), self.element)

    def stored_factors(self, buffers: dict[str, Tensor]) -> Factors:
        """Return the encode factor: the reciprocal of the stored one."""
        return {"scale": buffers["_scale_inv"].reciprocal()}

    def decode_codes(self, buffers: dict[str, Tensor], shape: Shape) -> tuple[Tensor, Tensor]:
        """Return element values (float32) and the (1,) factor that a GEMM applies at its end."""
        return float8.decode_codes(buffers, self.element).reshape(shape), buffers["_scale_inv"]

    def derive(
        self, buffers: dict[str, Tensor], shape: Shape, usage: str
    ) -> dict[str, Tensor] | None:
        """Return the buffers of ``usage``; both directions hold the same codes."""
        if usage == "columnwise":
            data = buffers["_data"]
            return {
                "_transpose": data.movedim(-1, 0).contiguous() if len(shape) else data.reshape(1)
            }
        transpose = buffers["_transpose"]
        return {
            "_data": transpose.movedim(0, -1).contiguous() if len(shape) else transpose.reshape(())
        }


@dataclass(frozen=True, kw_only=True)
class _CurrentScaling(_Float8, abstract=True):
    """Compute factors from the tensor's own maxima.

    Attributes:
        force_pow_2_scales: floor the encode scales to powers of two.
        amax_epsilon: lower bound of the amax.
    """

    force_pow_2_scales: bool = False
    amax_epsilon: float = 0.0

    grid_cls = Float8Grid

    def encode_(
        self,
        out: dict[str, Tensor],
        x: Tensor,
        scale: Tensor | None,
        amax: list[Tensor] | None,
        seed: Tensor | None,
    ) -> None:
        """Write the codes and the decode factors; ``scale`` replaces the factor from the amax."""
        factors = self.amax_shapes(x.shape)[0]
        if scale is None:
            maximum = amax[0] if amax else self.amax(x)[0]
            scale = fp8_scale(maximum, self.element.max, self.force_pow_2_scales, self.amax_epsilon)
        # The shape decides whether rows, columns or the whole tensor share a factor.
        scale = scale.reshape(factors)
        float8.encode_scaled_(out, x, scale, self.element)


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScalingQuantizer(_CurrentScaling):
    """Quantize to FP8 with one factor for the tensor, from the tensor's own amax.

    Attributes:
        force_pow_2_scales: floor the factor to a power of two.
        amax_epsilon: lower bound of the amax.
    """

    format = "fp8"

    @property
    def learns_factor(self) -> bool:
        """Return True without options but the element."""
        return set(self.changed_options()) <= {"dtype"}

    def factor_slopes(self, buffers: dict[str, Tensor], x: Tensor, factor: Tensor) -> Tensor:
        """Return ``code - x / factor``, or the code where it is clipped."""
        codes = float8.decode_codes(buffers, self.element).double().reshape(x.shape)
        return slopes(x.double(), codes, factor, self.largest_code)


@dataclass(frozen=True, kw_only=True)
class Float8Quantizer(_Float8):
    """Quantize to FP8 with delayed scaling, where the caller passes the factor.

    ``q(x, scale=scale)`` returns the tensor. ``q.quantize_with_amax(x, scale=scale)`` returns the
    tensor and its amax. The caller owns the scale and the amax history as tensors; see
    ``qtensor.delayed_scaling_update``.
    """

    format = "fp8_delayed"
    returns_amax = True
    needs_scale = True

    def encode_(
        self,
        out: dict[str, Tensor],
        x: Tensor,
        scale: Tensor | None,
        amax: list[Tensor] | None,
        seed: Tensor | None,
    ) -> None:
        """Write cast(x * scale) and 1 / scale."""
        if scale is None or scale.numel() != 1 or scale.dtype != torch.float32:
            fail(
                "quantize[fp8_delayed]",
                "scale must be one float32",
                "none" if scale is None else f"{tuple(scale.shape)} {scale.dtype}",
                "Pass the stored factor of shape (1,)",
            )
        float8.encode_scaled_(out, x, scale.reshape(1), self.element)


@dataclass(frozen=True, kw_only=True)
class Float8RowwiseQuantizer(_CurrentScaling):
    """Quantize to FP8 with one factor for each row of the (M, K) view.

    Attributes:
        axis: -1 (default): amax over the last dim, one factor for each row. 0: one factor for each
            column, for the operand whose contraction runs along the rows.
        force_pow_2_scales: round the encode scale down to a power of two.
        amax_epsilon: lower bound of the amax.
    """

    axis: int = -1
    format = "fp8_rowwise"
    per_tensor = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "axis", (-1, 0))

    def _transposed_options(self) -> dict[str, Any]:
        """Return the options that a transpose changes, among them the axis."""
        return {**super()._transposed_options(), "axis": 0 if self.axis == -1 else -1}

    def amax(self, x: Tensor) -> list[Tensor]:
        """Return [the amax of rows, float32 (M, 1), or of columns, (1, K)]."""
        return [float8.amax_axis(x, self.axis)]

    def amax_shapes(self, shape: Shape) -> list[tuple[int, ...]]:
        """Return [(M, 1)] or [(1, K)]."""
        rows, cols = rows_cols(shape)
        return [(rows, 1) if self.axis == -1 else (1, cols)]
