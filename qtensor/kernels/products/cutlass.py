"""Choose the generated CUTLASS kernel of a product and prepare its buffers."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from qtensor.cutlass_gemm import tuning
from qtensor.cutlass_gemm.launch import Launcher, Tensors, fault, oversize
from qtensor.cutlass_gemm.spec import ARCH_OF, OUTPUTS, KernelSpec
from qtensor.cutlass_gemm.tuning import Want
from qtensor.kernels.products.problem import SCALAR_FORMATS, GemmSide, Problem, whole
from qtensor.kernels.products.reading import reading

_HADAMARD = 16


def _recipe(operand: GemmSide) -> str | None:
    """Return the recipe of the kernels for a format, or None."""
    if operand.label in (*SCALAR_FORMATS, "fp8_rowwise"):
        return "fp8"
    return operand.label if operand.label in ("fp8_blockwise", "mxfp8", "mxfp4", "nvfp4") else None


def want(problem: Problem) -> Want | str:
    """Return what a kernel must compute for the problem, or why no kernel can."""
    a, b = problem.a, problem.b
    if problem.capability is None:
        return "kernels run on CUDA devices"
    arch = ARCH_OF.get(problem.capability)
    if arch is None:
        return f"no kernels for compute capability {problem.capability[0]}.{problem.capability[1]}"
    recipe, other = _recipe(a), _recipe(b)
    if recipe is None or other != recipe:
        return f"no kernel multiplies {a.label} by {b.label}"
    if problem.dtype not in OUTPUTS:
        return f"no kernel writes {problem.dtype}"
    why = _operand_refusal(problem, recipe)
    if why is not None:
        return why
    block: tuple[int, ...] = ()
    if recipe == "fp8_blockwise":
        block = (1, 128 if b.option("block_scaling_dim") == 2 else 1, 128)
    # Only MXFP8 stores columnwise codes as the rowwise ones; elsewhere all layouts have K
    # contiguous.
    layout = problem.layout if recipe == "mxfp8" else "TN"
    fast = problem.fast and recipe == "fp8" and arch == "sm_90a"
    elements = str(a.element), str(b.element)
    return Want(recipe, arch, *elements, OUTPUTS[problem.dtype], layout, block, fast)


def _operand_refusal(problem: Problem, recipe: str) -> str | None:
    """Return why kernels of the recipe do not read the stored operands, or None."""
    a, b, sizes = problem.a, problem.b, problem.sizes
    if 0 in sizes:
        return "a product without elements needs no kernel"
    if (why := oversize(sizes)) is not None:
        return why
    if problem.batched and not (
        problem.layout == "TN" and a.label in SCALAR_FORMATS and b.label in SCALAR_FORMATS
    ):
        return "batched kernels take fp8 with one factor a tensor, in layout TN"
    if recipe == "fp8_blockwise" and a.option("block_scaling_dim") == 2:
        return "kernels take 128x128 blocks for b, and 1x128 blocks for a"
    for name, operand in (("a", a), ("b", b)):
        if operand.label == "fp8_rowwise" and not operand.factors_follow:
            axis = -1 if operand.contracted == -1 else 0
            return f"the factors of {name} run along the contraction; quantize it with axis={axis}"
        if operand.label == "fp8_rowwise" and problem.batched:
            return "batched kernels take one factor a tensor"
    if a.rotated != b.rotated:
        return "one operand alone is rotated (with_rht)"
    if a.rotated:
        signs = {operand.option("with_random_sign_mask") for operand in (a, b)}
        if len(signs) > 1 or sizes[3] % _HADAMARD:
            return "rotated operands need equal signs and K a multiple of 16"
    return _bias_refusal(problem)


def _bias_refusal(problem: Problem) -> str | None:
    if problem.bias is None:
        return None
    shape = problem.bias[0]
    if len(shape) > 1 and any(size != 1 for size in shape[:-1]):
        return f"kernels add a bias of N values; got {shape}"
    if problem.batched:
        return "batched kernels add no bias"
    return None


def kernels(problem: Problem) -> tuple[KernelSpec, ...] | str:
    """Return the kernels that can compute the problem, the best first; or why there is none."""
    wanted = want(problem)
    if isinstance(wanted, str):
        return wanted
    if wanted.fast and not tuning.candidates(wanted):
        # Fast accumulation is a permission.
        wanted = dataclasses.replace(wanted, fast=False)
    known = tuning.candidates(wanted)
    if not known:
        return f"there is no kernel {wanted.text()}"
    _, m, n, k = problem.sizes
    possible = tuple(
        spec
        for spec in tuning.ranked(wanted, (m, n, k), problem.processors)
        if spec.refusal(m, n, k) is None
    )
    return possible or str(known[0].refusal(m, n, k))


class Cutlass:
    """A kernel bound to a problem.

    Args:
        problem: what to compute.
        spec: a kernel that ``kernels(problem)`` names.
        launcher: of the library, for the sizes of the problem.
    """

    name = "cutlass"

    def __init__(self, problem: Problem, spec: KernelSpec, launcher: Launcher) -> None:
        self.problem, self.spec, self.launcher = problem, spec, launcher
        self.detail = f": {spec.name}"
        self.a, self.b = reading(problem.a, spec.recipe), reading(problem.b, spec.recipe)
        plain = [name for name in ("a", "b") if getattr(self, name).rearranges]
        if plain:
            self.detail += (
                f"; the factors of {' and '.join(plain)} are put into tiles at every call: "
                "quantize with swizzled=True"
            )

    def __call__(
        self,
        out: Tensor,
        a: list[Tensor],
        b: list[Tensor],
        bias: Tensor | None,
        beta: float = 0.0,
    ) -> str | None:
        """Write ``out``; or, with nothing written, return why the kernel refuses the tensors."""
        if not (whole(self.problem.a, a, self.a.slots) and whole(self.problem.b, b, self.b.slots)):
            return "buffers must be those of whole tensors; these are of slices"
        tensors = self.tensors(out, a, b, bias)
        why = fault(tensors)
        if why is None:
            self.launcher.launch(tensors, beta)
        return why

    def tensors(
        self, out: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None
    ) -> Tensors:
        """Return the tensors that the kernel reads and writes."""
        left, right = self.a, self.b
        if bias is not None:
            bias = bias.float().reshape(-1).expand(self.problem.sizes[2]).contiguous()
        return Tensors(
            left.codes(a),
            right.codes(b),
            out,
            left.factors(a) if left.factors else None,
            right.factors(b) if right.factors else None,
            left.scale(a) if left.scale else None,
            right.scale(b) if right.scale else None,
            bias,
        )


def alpha(problem: Problem) -> float:
    """Return the number by which the product is multiplied.

    The kernels multiply by the buffers of the tensor-wide factors of NVFP4, as they are stored:
    amaxes, which stand for amax / (6 * e4m3_max), or factors.
    """
    if problem.a.label != "nvfp4":
        return 1.0
    divisors = [operand.option("global_divisor") for operand in (problem.a, problem.b)]
    return 1.0 / (divisors[0] * divisors[1])
