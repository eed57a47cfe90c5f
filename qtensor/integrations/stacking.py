"""Put quantized matrices into one 3-D tensor without rounding, and take them out again.

Matrices that were quantized apart may have separate tensor-wide factors. The 3-D tensor then holds
the factor of each row: FP8 as ``fp8_rowwise``, NVFP4 as ``nvfp4(row_scaled=True)``. Both decode to
the same values, because the arithmetic of an element stays the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from qtensor.api import quantizer_of
from qtensor.checkpoints.buffers import Parts, assemble, rowwise_parts
from qtensor.checkpoints.nvfp4_factor import factor_in
from qtensor.core.errors import UnsupportedError, fail
from qtensor.quantizers import (
    Float8CurrentScalingQuantizer,
    Float8RowwiseQuantizer,
    NVFP4Quantizer,
    Quantizer,
)
from qtensor.storage.tensor import QuantizedTensor

Grid = Sequence[Sequence[QuantizedTensor]]
"""``grid[e][p]``: part p of the rows of matrix e."""


def stack(grid: Grid, op: str = "stack") -> QuantizedTensor:
    """Return the matrices of a grid as one rowwise tensor, with the same codes and factors.

    The parts are (N_p, K), the same for all matrices; the tensor is (E, N, K), N their sum.
    """
    flat = [part for parts in grid for part in parts]
    first = flat[0]
    rows = sum(part.shape[0] for part in grid[0])
    shape = (len(grid), rows, first.shape[1])
    _check_alike(flat, grid, op)
    parts = [rowwise_parts(part) for part in flat]
    quantizer = quantizer_of(first)
    if quantizer.format == "nvfp4":
        return _stack_nvfp4(flat, parts, shape)
    codes = torch.cat([p.codes for p in parts])
    if quantizer.format == "fp8":
        return _stack_fp8(flat, parts, codes, shape)
    block = quantizer.spec.block
    square = block[1] if block is not None and quantizer.two_dimensional else 1
    if any(part.shape[0] % square for part in flat):
        got = f"{tuple(first.shape)} in {quantizer.canonical}"
        rule = f"each part has a multiple of {square} rows, so that no two share a factor"
        fail(op, rule, got, "Dequantize them first", UnsupportedError)
    scale = torch.cat([p.scale for p in parts])
    return assemble(quantizer, shape, first.dtype, Parts(codes, scale))


def _check_alike(flat: Sequence[QuantizedTensor], grid: Grid, op: str) -> None:
    """Refuse matrices whose formats, dtypes or shapes differ."""
    kinds = {(_kind(part), part.dtype, part.shape[1]) for part in flat}
    heights = {tuple([part.shape[0] for part in parts]) for parts in grid}
    if len(kinds) > 1 or len(heights) > 1 or any(part.ndim != 2 for part in flat):
        got = sorted({f"{tuple(part.shape)} {part.quantizer.canonical}" for part in flat})
        rule = "all matrices have one shape, dtype and format, with rowwise data alone"
        fail(op, rule, ", ".join(got), "Dequantize them first", UnsupportedError)


def _kind(tensor: QuantizedTensor) -> str:
    """Return the canonical text of a quantizer without the options that ``stack`` brings in line.

    A quantizer with columnwise data has a text of its own, which matches no other.
    """
    quantizer = quantizer_of(tensor)
    if isinstance(quantizer, NVFP4Quantizer) and not quantizer.columnwise:
        quantizer = dataclasses.replace(
            quantizer, e4m3_max=448.0, with_global_scale_inv=False, row_scaled=False
        )
    return quantizer.canonical


def _stack_nvfp4(
    flat: Sequence[QuantizedTensor], parts: Sequence[Parts], shape: tuple[int, ...]
) -> QuantizedTensor:
    """Stack NVFP4 matrices; the factors of different matrices become factors of rows."""
    codes = torch.cat([p.codes for p in parts])
    scale = torch.cat([p.scale for p in parts])
    quantizers = [cast(NVFP4Quantizer, part.quantizer) for part in flat]
    stored = any(p.factor is not None for p in parts) or len({q.e4m3_max for q in quantizers}) > 1
    base = dataclasses.replace(quantizers[0], e4m3_max=448.0) if stored else quantizers[0]
    quantizer = dataclasses.replace(base, row_scaled=True, with_global_scale_inv=stored)
    pairs = list(zip(parts, flat, strict=True))
    amax = torch.cat([_per_row(p.amax, t) for p, t in pairs])
    factor = torch.cat([_per_row(factor_in(t, p), t) for p, t in pairs]) if stored else None
    return assemble(quantizer, shape, flat[0].dtype, Parts(codes, scale, amax, factor))


def _stack_fp8(
    flat: Sequence[QuantizedTensor], parts: Sequence[Parts], codes: Tensor, shape: tuple[int, ...]
) -> QuantizedTensor:
    """Stack FP8 matrices; their factors become factors of rows."""
    quantizer = Float8RowwiseQuantizer(dtype=quantizer_of(flat[0]).element.name)
    scale = torch.cat([_per_row(p.scale, t) for p, t in zip(parts, flat, strict=True)])
    return assemble(quantizer, shape, flat[0].dtype, Parts(codes, scale.reshape(-1, 1)))


def _per_row(factor: Tensor | None, matrix: Tensor) -> Tensor:
    """Return a factor of a matrix, or of each of its rows, as one value for each row, (N,)."""
    assert factor is not None  # noqa: S101 - rowwise_parts gives each factor of the format
    return factor.reshape(-1).expand(matrix.shape[0])


def common_factors(tensor: QuantizedTensor) -> QuantizedTensor:
    """Return a tensor whose factors of rows are all equal as one with a tensor-wide factor.

    It undoes what ``stack`` did to the factors of one matrix; other tensors are returned as they
    are.
    """
    quantizer = quantizer_of(tensor)
    if quantizer.columnwise:
        return tensor
    if isinstance(quantizer, NVFP4Quantizer) and quantizer.row_scaled:
        parts = rowwise_parts(tensor)
        factor = None if parts.factor is None else _common(parts.factor)
        amax = _common(parts.amax)  # type: ignore[arg-type]
        if amax is None or (parts.factor is not None and factor is None):
            return tensor
        new = dataclasses.replace(quantizer, row_scaled=False)
        return assemble(new, tensor.shape, tensor.dtype, parts._replace(amax=amax, factor=factor))
    if quantizer.format == "fp8_rowwise":
        parts = rowwise_parts(tensor)
        scale = _common(parts.scale)
        if scale is not None:
            one = Float8CurrentScalingQuantizer(dtype=quantizer.element.name)
            return assemble(one, tensor.shape, tensor.dtype, parts._replace(scale=scale))
    return tensor


def _common(factor: Tensor) -> Tensor | None:
    """Return the only value of ``factor``, (1,), or None if there are several."""
    flat = factor.reshape(-1)
    return flat[:1].clone() if bool((flat == flat[0]).all()) else None


def quantize_each(x: Tensor, quantizer: Quantizer) -> QuantizedTensor:
    """Return values (E, N, K) with every matrix quantized apart."""
    if isinstance(quantizer, NVFP4Quantizer) or quantizer.format in ("fp8", "fp8_blockwise"):
        return stack([[quantizer(matrix)] for matrix in x], f"quantize[{quantizer.format}]")
    return quantizer(x)
