"""Products by ``torch._scaled_mm``."""

from __future__ import annotations

import torch
from torch import Tensor

from qtensor.kernels.products.problem import SCALAR_FORMATS, Problem, whole
from qtensor.kernels.products.reading import Reading, reading

_SCALED_MM_CAPABILITY = (8, 9)
_BLOCK_SCALED_CAPABILITY = (10, 0)
_MULTIPLE = 16
_HALVES = (torch.bfloat16, torch.float16)
_CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class ScaledMM:
    """Compute products with ``torch._scaled_mm`` if it has float32 sums and one rounding."""

    name = "scaled_mm"
    detail = ""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        recipe = "mxfp8" if problem.a.label == "mxfp8" else "fp8"
        self.a, self.b = reading(problem.a, recipe), reading(problem.b, recipe)

    @staticmethod
    def refusal(problem: Problem) -> str | None:
        """Return why it does not compute the problem, or None."""
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
        """Write ``out``; or return why torch cannot take these tensors."""
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
