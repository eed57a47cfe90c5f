"""Define the blockwise FP8 quantizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape, ceil_div, rows_cols
from qtensor.quantizers.base import Quantizer
from qtensor.quantizers.methods import ScaleGrid
from qtensor.quantizers.options import check_choice
from qtensor.reference import float8
from qtensor.reference.blocks import as_matrix, crop, to_blocks, write_padded_
from qtensor.storage.float8_blockwise import (
    FLOAT8_BLOCKWISE,
    Float8BlockwiseTensor,
    Float8BlockwiseTensorStorage,
)


class Float8BlockGrid(ScaleGrid):
    """The grid of blockwise FP8; a factor is an encode scale."""

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return (1, 128) or (128, 128)."""
        return (self.quantizer._rows, float8.BLOCK)

    def nearest(self, x: Tensor) -> Tensor:
        """Return the scales of the maxima."""
        q, overflow = self.quantizer, torch.finfo(self.dtype).max
        blocks = to_blocks(x, *self.block)
        return float8.block_scale(blocks, q.element, q.force_pow_2_scales, q.amax_epsilon, overflow)

    def fill_(self, out: dict[str, Tensor], codes: Tensor, factors: Tensor) -> None:
        """Write the codes and the reciprocals of the scales; 1-D factors are stored transposed."""
        data, stored = out["_rowwise_data"], out["_rowwise_scale_inv"]
        data.copy_(codes.view(data.shape))
        grid = stored.t() if self.quantizer.block_scaling_dim == 1 else stored
        write_padded_(grid, factors.reciprocal())

    def take(self, buffers: dict[str, Tensor]) -> Tensor:
        """Return the reciprocals of the stored factors."""
        stored = buffers["_rowwise_scale_inv"]
        grid = stored.t() if self.quantizer.block_scaling_dim == 1 else stored
        return crop(grid, *self.factor_counts()).reciprocal()


@dataclass(frozen=True, kw_only=True)
class Float8BlockQuantizer(Quantizer):
    """Quantize to FP8 with a float32 factor for each block.

    Blocks are 1x128 (activations, gradients) or 128x128 (weights). Any shape is legal: a partial
    block is padded with zeros to compute its amax. With 1-D blocks, columnwise data come from
    quantizing the transpose of the input; with 2-D blocks, they are the transposed rowwise data.

    Attributes:
        dtype: "e4m3" (default) or "e5m2", or the torch dtype.
        block_scaling_dim: 1 for 1x128 blocks, 2 for 128x128 blocks.
        force_pow_2_scales: round encode scales down to powers of two (default).
        amax_epsilon: lower bound of the amax.
    """

    dtype: str = "e4m3"
    block_scaling_dim: int = 1
    force_pow_2_scales: bool = True
    amax_epsilon: float = 0.0

    format = "fp8_blockwise"
    grid_cls = Float8BlockGrid
    spec = FLOAT8_BLOCKWISE
    tensor_cls = Float8BlockwiseTensor
    storage_cls = Float8BlockwiseTensorStorage

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "block_scaling_dim", (1, 2))

    @property
    def two_dimensional(self) -> bool:
        """Return True for 128x128 blocks."""
        return self.block_scaling_dim == 2

    @property
    def _rows(self) -> int:
        return 1 if self.block_scaling_dim == 1 else float8.BLOCK

    def encode_(
        self,
        out: dict[str, Tensor],
        x: Tensor,
        scale: Tensor | None,
        amax: list[Tensor] | None,
        seed: Tensor | None,
    ) -> None:
        """Write the codes and factors of each usage from ``x``."""
        matrix = as_matrix(x)
        for direction, source in (("_rowwise", matrix), ("_columnwise", matrix.t())):
            if f"{direction}_data" not in out:
                continue
            data, factors = out[f"{direction}_data"], out[f"{direction}_scale_inv"]
            # 1-D factors are stored as (blocks along K, M), the transpose of the block grid.
            grid = factors.t() if self.block_scaling_dim == 1 else factors
            codes = data.view(source.shape)
            float8.quantize_blocks_(
                codes,
                grid,
                source,
                self._rows,
                self.element,
                self.force_pow_2_scales,
                self.amax_epsilon,
                torch.finfo(x.dtype).max,
            )

    def decode(
        self, buffers: dict[str, Tensor], shape: Shape, columnwise: bool | None = None
    ) -> Tensor:
        """Return float(code) * scale_inv of its block, float32 of ``shape``."""
        direction = self.side(columnwise)
        use_column = direction == "_columnwise"
        rows, cols = rows_cols(shape)
        factors = buffers[f"{direction}_scale_inv"]
        grid = factors.t() if self.block_scaling_dim == 1 else factors
        codes = buffers[f"{direction}_data"].reshape((cols, rows) if use_column else (rows, cols))
        values = float8.decode_blocks(codes, grid, self._rows, self.element)
        return (values.t() if use_column else values).reshape(shape)

    def derive(
        self, buffers: dict[str, Tensor], shape: Shape, usage: str
    ) -> dict[str, Tensor] | None:
        """Return the buffers of ``usage``, the other direction transposed; None for 1-D blocks."""
        if self.block_scaling_dim == 1:
            return None
        rows, cols = rows_cols(shape)
        source, target = (
            ("_rowwise", "_columnwise") if usage == "columnwise" else ("_columnwise", "_rowwise")
        )
        only = self.with_usage(rowwise=usage == "rowwise", columnwise=usage == "columnwise")
        named = only.alloc_tensors(shape, device=buffers[f"{source}_data"].device)
        from_shape = (rows, cols) if usage == "columnwise" else (cols, rows)
        codes = buffers[f"{source}_data"].reshape(from_shape).t()
        named[f"{target}_data"].copy_(codes.reshape(named[f"{target}_data"].shape))
        grid = tuple(ceil_div(n, float8.BLOCK) for n in from_shape)
        factors = buffers[f"{source}_scale_inv"][: grid[0], : grid[1]].t()
        named[f"{target}_scale_inv"][: grid[1], : grid[0]].copy_(factors)
        return named
