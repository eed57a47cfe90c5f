"""Products by torch's own kernels: ``torch._scaled_mm``, and exact dequantization to 16 bits before a 16-bit matmul."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from qtensor.kernels import table
from qtensor.kernels.cpu.native import Part
from qtensor.library.codec import by_name
from qtensor.library.gemm_cutlass import Reading, reading
from qtensor.library.problem import SCALAR_FORMATS, Operand, Problem, whole
from qtensor.reference.scaling import quotient

_SCALED_MM_CAPABILITY = (8, 9)
_BLOCK_SCALED_CAPABILITY = (10, 0)
_MULTIPLE = 16
_FP4_MAX = 6.0
_HALVES = (torch.bfloat16, torch.float16)
_CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

# ------------------------------------------------------------------------------------------- torch._scaled_mm


class ScaledMM:
    """``torch._scaled_mm``, where its arithmetic is that of a quantized product: float32 sums, one rounding."""

    name = "scaled_mm"

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        recipe = "mxfp8" if problem.a.label == "mxfp8" else "fp8"
        self.a, self.b = reading(problem.a, recipe), reading(problem.b, recipe)

    @staticmethod
    def refusal(problem: Problem) -> str | None:
        """Why it does not compute the problem, or None."""
        a, b, (_, _, n, k) = problem.a, problem.b, problem.sizes
        if problem.capability is None or problem.capability < _SCALED_MM_CAPABILITY:
            return "torch._scaled_mm needs a CUDA device of compute capability 8.9 or later"
        kinds = {operand.label for operand in (a, b)}
        if not (kinds <= set(SCALAR_FORMATS) or kinds in ({"fp8_rowwise"}, {"mxfp8"})):
            return f"torch._scaled_mm is not used for {a.label} x {b.label}"
        if problem.batched or 0 in problem.sizes:
            return "torch._scaled_mm multiplies single matrices with elements"
        if a.element == b.element == "e5m2":
            return "torch._scaled_mm does not multiply e5m2 by e5m2"
        if n % _MULTIPLE or k % _MULTIPLE:
            return f"torch._scaled_mm needs N and K at multiples of {_MULTIPLE}; got N={n}, K={k}"
        if "fp8_rowwise" in kinds:
            if not (a.factors_follow and b.factors_follow):
                return "factors run along the contraction"
            if problem.dtype != torch.bfloat16:
                return "torch._scaled_mm with factors of rows writes bfloat16"
        if "mxfp8" in kinds and (
            problem.layout != "TN" or problem.capability < _BLOCK_SCALED_CAPABILITY
        ):
            return "torch._scaled_mm takes MXFP8 in layout TN on compute capability 10.0 or later"
        if problem.dtype not in (*_HALVES, torch.float32):
            return f"torch._scaled_mm does not write {problem.dtype}"
        if problem.bias is not None:
            shape, dtype = problem.bias
            if dtype != problem.dtype or dtype not in _HALVES or shape != (n,):
                return "torch._scaled_mm adds a bias of N values in the result's 16-bit dtype"
        return None

    def __call__(
        self, out: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None
    ) -> str | None:
        """Write ``out``; or say why these tensors cannot be taken."""
        problem, (_, m, n, k) = self.problem, self.problem.sizes
        if not (whole(problem.a, a, self.a.slots) and whole(problem.b, b, self.b.slots)):
            return "buffers must be those of whole tensors; these are of slices"
        left = self.a.codes(a).view(_CODES[str(problem.a.element)]).reshape(m, k)
        right = self.b.codes(b).view(_CODES[str(problem.b.element)]).reshape(n, k)
        scale_a, scale_b = _scale(self.a, a), _scale(self.b, b)
        if problem.a.label == "fp8_rowwise":
            scale_a, scale_b = scale_a.reshape(m, 1), scale_b.reshape(1, n)
        torch.ops.aten._scaled_mm.out(
            left,
            right.t(),
            scale_a,
            scale_b,
            bias=bias,
            out_dtype=problem.dtype,
            use_fast_accum=problem.fast,
            out=out.view(m, n),
        )
        return None


def _scale(side: Reading, buffers: list[Tensor]) -> Tensor:
    if side.scale is not None:
        return side.scale(buffers)
    if side.factors is None:
        raise ValueError("an operand without factors")
    return side.factors(buffers).view(torch.float8_e8m0fnu)


# ------------------------------------------------------------------------------------------- dequantize, then multiply


def _exact_dtypes(problem: Problem, operand: Operand) -> tuple[torch.dtype, ...] | str:
    """16-bit dtypes that hold every value of an operand but for factors applied at the end; or why there is none.

    E4M3 and E5M2 codes have at most 4 significant bits, products of E2M1 codes with E4M3 factors 6, bfloat16 8 and
    float16 11. A power of two as a factor keeps bits and needs the exponent range of bfloat16.
    """
    label, codec = operand.label, operand.codec
    if codec is None:
        if operand.dtype in _HALVES:
            return (operand.dtype,)
        return f"{operand.dtype} would be rounded"
    if label in SCALAR_FORMATS:
        return _HALVES
    if label == "fp8_rowwise":
        return _HALVES if operand.factors_follow else "factors run along the contraction"
    if label == "fp8_blockwise":
        if not operand.option("force_pow_2_scales"):
            return "factors of blocks that are no powers of two do not fit 16 bits"
        return (torch.bfloat16,)
    if label == "nvfp4":
        if operand.rotated and not _rotations_cancel(problem):
            return "one operand alone is rotated (with_rht)"
        if operand.option("row_scaled") and not _amax_follows(operand):
            return "factors run along the contraction"
        return _HALVES
    if codec.spec.scale == "e8m0":
        return (torch.bfloat16,)
    return f"{label} is not known to fit 16 bits"


def _rotations_cancel(problem: Problem) -> bool:
    """Whether both sides are rotated alike along the contraction, so that the product is that of the tensors."""
    a, b = problem.a, problem.b
    alike = a.option("with_random_sign_mask") == b.option("with_random_sign_mask")
    return a.rotated and b.rotated and alike and problem.sizes[3] % 16 == 0 and not problem.batched


def _amax_follows(operand: Operand) -> bool:
    """Whether the amaxes of lines belong to lines that are not contracted."""
    return (operand.side == "_rowwise") == (operand.contracted == -1)


class Dequant:
    """Both operands exactly in bfloat16 (or float16), factors of tensors and rows aside; then one matmul.

    Sums are float32, factors and bias are applied to them in float32, and the result is rounded once. Values whose last
    bit is below 2^-133, the smallest bfloat16, are rounded: factors of about 2^-120 and less.
    """

    name = "dequant"

    def __init__(self, problem: Problem, dtype: torch.dtype) -> None:
        self.problem, self.dtype = problem, dtype

    @staticmethod
    def choose(problem: Problem) -> torch.dtype | str:
        """The dtype to multiply in, or why there is none."""
        if problem.capability is None or problem.capability < (8, 0):
            return "it needs a CUDA device with bfloat16 instructions (compute capability 8.0)"
        if 0 in problem.sizes:
            return "a product without elements needs no kernel"
        dtypes = []
        for name, operand in (("a", problem.a), ("b", problem.b)):
            found = _exact_dtypes(problem, operand)
            if isinstance(found, str):
                return f"operand {name}: {found}"
            dtypes.append(found)
        both = [dtype for dtype in _HALVES if all(dtype in side for side in dtypes)]
        return both[0] if both else "no 16-bit dtype holds both operands exactly"

    def __call__(
        self, out: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None
    ) -> str | None:
        """Write ``out``; never refuses."""
        problem = self.problem
        left, left_factor = self._values(problem.a, a)
        right, right_factor = self._values(problem.b, b)
        left = left.mT if problem.layout == "NT" else left
        right = right.mT if problem.layout == "TN" else right
        result = product(left, right)
        if left_factor is not None:
            many = left_factor.numel() > 1
            result = result * (left_factor.reshape(*left.shape[:-1], 1) if many else left_factor)
        if right_factor is not None:
            result = result * right_factor
        out.copy_(result if bias is None else result + bias.float())
        return None

    def _values(self, operand: Operand, buffers: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Values of the logical shape, and factors that follow (one, or one a line)."""
        codec: Any = operand.codec
        if codec is None:
            return buffers[0], None
        buffers, factor = list(buffers), None
        for i, slot in enumerate(codec.slots[: len(buffers)]):
            if slot.name == "_scale_inv":
                factor, buffers[i] = buffers[i].reshape(-1), torch.ones_like(buffers[i])
            elif slot.name == f"_amax{operand.side}":
                top = _FP4_MAX * codec.e4m3_max
                factor, buffers[i] = quotient(buffers[i], top), torch.full_like(buffers[i], top)
        if operand.rotated:
            # Rotated alike, both sides give the product of the tensors without being rotated back.
            codec = dataclasses.replace(codec, with_rht=False)
        values = torch.empty(operand.shape, dtype=self.dtype, device=buffers[0].device)
        columnwise = operand.columnwise
        if not table.dequantize_(
            codec, buffers, operand.shape, values, Part(columnwise=columnwise)
        ):
            values.copy_(codec.decode(by_name(codec, buffers), operand.shape, columnwise))
        return values, factor


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of 16-bit operands in float32, each product exact."""
    if not a.is_cuda:
        return torch.matmul(a.float(), b.float())
    if b.ndim == 2:
        flat = torch.mm(a.reshape(-1, a.shape[-1]), b, out_dtype=torch.float32)
        return flat.view(*a.shape[:-1], b.shape[-1])
    batch = a.shape[:-2]
    left, right = a.reshape(-1, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    result = torch.bmm(left, right.reshape(-1, *b.shape[-2:]), out_dtype=torch.float32)
    return result.view(*batch, *result.shape[-2:])
