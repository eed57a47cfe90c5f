"""Products of two operands of 4- or 6-bit codes on a CPU, with exact sums in each block."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from qtensor.kernels import table
from qtensor.kernels.cpu.integer_products import Lines, integer_products_
from qtensor.kernels.products.matrix_backend import MatrixBackend, sides_refusal
from qtensor.kernels.products.problem import GemmSide, Problem, rotations_cancel
from qtensor.kernels.products.stacks import batch_refusal, of_each
from qtensor.kernels.quantizers import NVFP4Like
from qtensor.reference.scaling import quotient

_ELEMENTS = ("e2m1", "e2m3")
"""Elements whose values are small integers times one power of two."""
_BLOCKS = (16, 32)


class IntegerProducts(MatrixBackend):
    """Multiply codes as integers, and add the blocks in order.

    The order of the sums is a contract (docs/numerics.md): a result depends neither on the other
    rows and columns nor on threads nor on the instruction set.
    """

    name = "integer"
    detail = ": codes are multiplied as integers, blocks are added in order"

    @staticmethod
    def refusal(problem: Problem) -> str | None:
        """Return why this backend does not serve a problem, or None."""
        if problem.capability is not None or not problem.device.startswith("cpu"):
            return "it runs on CPUs"
        if problem.batched:
            reason = _batch_refusal(problem)
            if reason is not None:
                return reason
            problem = of_each(problem)
        if 0 in problem.sizes:
            return "a product without elements needs no kernel"
        reason = sides_refusal(problem, _side_refusal)
        if reason is not None:
            return reason
        a, b = (side.quantizer for side in (problem.a, problem.b))
        if a.spec.block != b.spec.block:  # type: ignore[union-attr]
            return "the blocks of the operands differ in size"
        if (problem.a.rotated or problem.b.rotated) and not rotations_cancel(problem):
            return "the operands are not rotated alike (with_rht)"
        return None

    def multiply(
        self, out: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None
    ) -> str | None:
        """Write a product of matrices; or return why these tensors cannot be taken."""
        left, right = lines_of(self.problem.a, a), lines_of(self.problem.b, b)
        if left is None or right is None:
            return "tiles of factors are not whole"
        added = None if bias is None else bias.float().expand(right.number).contiguous()
        length = self.problem.sizes[3]
        if integer_products_(left, right, length, added, out):
            return None
        return "no kernel reads these buffers"


def _batch_refusal(problem: Problem) -> str | None:
    if problem.layout != "TN":
        return "blocks of a batch run along the last dim alone"
    return batch_refusal(problem)


def _side_refusal(side: GemmSide) -> str | None:
    """Return why an operand is not read as lines of small integers, or None."""
    quantizer = side.quantizer
    if quantizer is None:
        return "it is not quantized"
    if quantizer.element.name not in _ELEMENTS:
        return f"products of {quantizer.element.name} codes are not small integers"
    if quantizer.spec.block is None or quantizer.spec.block[1] not in _BLOCKS:
        return "it has no blocks of 16 or 32"
    if side.side != ("_rowwise" if side.contracted == -1 else "_columnwise"):
        return "its blocks do not run along the contraction"
    return table.refusal(quantizer, torch.float32, "cpu")


def lines_of(side: GemmSide, buffers: list[Tensor]) -> Lines | None:
    """Return an operand as the kernel reads it; None if it has parts of tiles of factors."""
    quantizer = side.quantizer
    assert quantizer is not None  # noqa: S101 - refusal() has checked it
    slots = [side.slot(f"{side.side}{name}") for name in ("_data", "_scale_inv")]
    codes, scales = (buffers[cast(int, slot)] for slot in slots)
    across = side.contracted == -2 and quantizer.slots[cast(int, slots[0])].dims[0].axis != "k"
    if across:
        codes = codes.t()
    if side.option("swizzled"):
        # The tiles are those of lines and blocks in both directions.
        scales = scales.reshape(scales.shape[::-1] if across else scales.shape)
        if scales.shape[0] % 128 or scales.shape[1] % 4 or not scales.is_contiguous():
            return None
    elif across:
        scales = scales.t()
    shape = side.shape
    count = math.prod(shape[:-1]) if side.contracted == -1 else shape[-1]
    name = side.global_buffer
    factors = None
    if name is not None:
        divisor = cast(NVFP4Like, quantizer).global_divisor
        factors = quotient(buffers[cast(int, side.slot(name))].reshape(-1), divisor).contiguous()
    return Lines(side.canonical, codes.reshape(count, -1), scales, factors, count)
