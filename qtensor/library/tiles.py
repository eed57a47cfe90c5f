"""Products with a large quantized weight on a CPU: decode some rows, multiply, go on; never the whole weight at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtensor.kernels import table
from qtensor.kernels.cpu import native
from qtensor.layout import Shape, rows_cols
from qtensor.library.codec import Codec
from qtensor.reference.gemm import matmul
from qtensor.reference.scaling import quotient

SMALL = 1 << 18
"""Elements of a weight below which tiles cost more than they save."""
TILE_BYTES = 16 << 20
"""Of decoded rows: large enough that a matmul runs at its full speed."""
LEAST_SCALE = 24
"""E8M0 codes below it could make values that a bfloat16 product takes for zero."""


@dataclass(frozen=True)
class Operand:
    """The buffers of a quantized matrix whose rowwise data count, or ([x], no codec) a plain one."""

    codec: Codec | None
    buffers: list[Tensor]
    shape: Shape


def is_large(shape: Shape) -> bool:
    """Whether a matrix is worth tiles."""
    return len(shape) == 2 and shape[0] * shape[1] > SMALL


def multiply_(out: Tensor, a: Operand, weight: Operand, bias: Tensor | None) -> bool:
    """``out = a @ weight.T + bias`` by tiles of rows of the weight.

    Args:
        out: (..., N), contiguous.
        a: (..., K).
        weight: (N, K), quantized.
        bias: broadcastable to (N,), or None.

    Returns:
        False, with nothing written, where no kernel decodes the weight.
    """
    if _by_dot_products(out, a, weight, bias):
        return True
    left, factor = _decoded(a, torch.float32)
    if left is None or weight.codec is None:
        return False
    rows, cols = weight.shape
    step = max(1, min(rows, TILE_BYTES // (cols * left.dtype.itemsize)))
    tile = torch.empty((step, cols), dtype=left.dtype)
    left, result = left.reshape(rows_cols(a.shape)), out.view(-1, rows)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        part = native.Part(first, count, columnwise=False)
        if not table.dequantize_(weight.codec, weight.buffers, weight.shape, tile[:count], part):
            return False
        added = None if bias is None else bias.expand(rows)[first : first + count]
        product = matmul(left, tile[:count].t(), None, None)
        if factor is not None:
            product = product * factor.unsqueeze(-1)
        result[:, first : first + count] = product if added is None else product + added.float()
    return True


def _by_dot_products(out: Tensor, a: Operand, weight: Operand, bias: Tensor | None) -> bool:
    """By the CPU's bfloat16 dot products, where both operands are exact in bfloat16 but for factors of rows."""
    if weight.codec is None or not (_is_exact(a) and _is_exact(weight)):
        return False
    left, factor = _decoded(a, torch.bfloat16)
    if left is None:
        return False
    added = None if bias is None else bias.float().expand(weight.shape[0]).contiguous()
    return native.linear_(weight, left, factor, added, out)


def _is_exact(operand: Operand) -> bool:
    """Whether every value is a normal bfloat16 number or 0, times the factor of its row or of the tensor."""
    codec = operand.codec
    if codec is None:
        return operand.buffers[0].dtype == torch.bfloat16
    if codec.spec.block is None:
        return getattr(codec, "axis", -1) == -1
    if codec.spec.scale == "e4m3":
        return codec.factors_are_local
    scales = next(
        buffer
        for slot, buffer in zip(codec.slots, operand.buffers, strict=False)
        if "scale" in slot.name
    )
    if codec.spec.scale == "e8m0":
        return bool(scales.amin() >= LEAST_SCALE)
    pow2 = getattr(codec, "force_pow_2_scales", False)
    return bool(pow2 and scales.amin() >= 2.0 ** (LEAST_SCALE - 127))


def _decoded(operand: Operand, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Values in ``dtype`` without the factors of rows or of the tensor, which follow (None: there are none)."""
    codec, buffers = operand.codec, list(operand.buffers)
    if codec is None:
        return buffers[0].to(dtype).contiguous(), None
    factor = None
    for i, slot in enumerate(codec.slots[: len(buffers)]):
        if slot.name == "_scale_inv" and getattr(codec, "axis", -1) == -1:
            factor = buffers[i].reshape(-1).contiguous()
            buffers[i] = torch.ones_like(buffers[i])
        elif slot.name == "_amax_rowwise":
            top = 6.0 * codec.e4m3_max  # type: ignore[attr-defined]
            factor = quotient(buffers[i], top).contiguous()
            buffers[i] = torch.full_like(buffers[i], top)
    values = torch.empty(tuple(operand.shape), dtype=dtype)
    part = native.Part(columnwise=False)
    if not table.dequantize_(codec, buffers, operand.shape, values, part):
        return None, None
    return values, factor
