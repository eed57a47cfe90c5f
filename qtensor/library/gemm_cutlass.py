"""Products by generated CUTLASS kernels: which kernel a problem wants, and its buffers as that kernel reads them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from qtensor.cutlass_gemm import tuning
from qtensor.cutlass_gemm.launch import Launcher, Tensors, fault
from qtensor.cutlass_gemm.spec import ARCHS, OUTPUTS, KernelSpec
from qtensor.cutlass_gemm.tuning import Want
from qtensor.errors import QTensorError
from qtensor.library.problem import SCALAR_FORMATS, Operand, Problem, whole
from qtensor.reference.blocks import swizzle

_ARCH_OF = {capability: arch for arch, capability in ARCHS.items()}
_FP4_MAX = 6.0
_HADAMARD = 16

Reader = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True)
class Reading:
    """How a kernel gets the buffers of an operand: functions from the buffers to what it reads.

    Attributes:
        codes: to the matrix of codes, in the kernel's layout, contiguous.
        slots: indices of the buffers in use, which must be whole.
        factors: to block factors, or None.
        scale: to one float32 factor, or one a line; None where there is none.
        lines: ``scale`` has one entry a line.
    """

    codes: Reader
    slots: tuple[int, ...]
    factors: Reader | None = None
    scale: Reader | None = None
    lines: bool = False


def _recipe(operand: Operand) -> str | None:
    """The kernels' recipe for a format."""
    if operand.label in (*SCALAR_FORMATS, "fp8_rowwise"):
        return "fp8"
    return operand.label if operand.label in ("fp8_blockwise", "mxfp8", "mxfp4", "nvfp4") else None


def want(problem: Problem) -> Want | str:
    """What the problem asks of a kernel, or why there can be none."""
    a, b = problem.a, problem.b
    if problem.capability is None:
        return "kernels run on CUDA devices"
    arch = _ARCH_OF.get(problem.capability)
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
    # Only MXFP8 stores columnwise codes as the rowwise ones; elsewhere all layouts have K contiguous.
    layout = problem.layout if recipe == "mxfp8" else "TN"
    fast = problem.fast and recipe == "fp8" and arch == "sm_90a"
    elements = str(a.element), str(b.element)
    return Want(recipe, arch, *elements, OUTPUTS[problem.dtype], layout, block, fast)


def _operand_refusal(problem: Problem, recipe: str) -> str | None:
    """Why the stored operands are not what kernels of the recipe read."""
    a, b, sizes = problem.a, problem.b, problem.sizes
    if 0 in sizes:
        return "a product without elements needs no kernel"
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
    """Kernels that can compute the problem, the best first; or why there is none."""
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


# ------------------------------------------------------------------------------------------- buffers


def reading(operand: Operand, recipe: str) -> Reading:
    """How a kernel of the recipe reads an operand."""
    if recipe == "fp8":
        return _read_fp8(operand)
    data = operand.slot(f"{operand.side}_data")
    factors = operand.slot(f"{operand.side}_scale_inv")
    if data is None or factors is None:
        raise QTensorError(f"gemm[{operand.label}]: no {operand.side} buffers")
    slots = (data, factors)
    if recipe == "fp8_blockwise":
        return Reading(_item(data), slots, _item(factors))
    turned = operand.side == "_columnwise" and recipe in ("mxfp8", "mxfp4")
    codes = _turned(data) if turned and recipe == "mxfp4" else _item(data)
    tiles = _tiles(factors, turned, bool(operand.option("swizzled")))
    if recipe != "nvfp4":
        return Reading(codes, slots, tiles)
    amax = operand.slot(f"_amax{operand.side}")
    if amax is None:
        raise QTensorError(f"gemm[{operand.label}]: no amax of the {operand.side} data")
    return Reading(codes, (*slots, amax), tiles, _item(amax), bool(operand.option("row_scaled")))


def _read_fp8(operand: Operand) -> Reading:
    """Codes with the contraction last: either copy of them holds the same bytes."""
    scale = operand.slot("_scale_inv")
    straight = operand.slot("_data" if operand.contracted == -1 else "_transpose")
    other = operand.slot("_transpose" if operand.contracted == -1 else "_data")
    lines = operand.label == "fp8_rowwise"
    if scale is None:
        raise QTensorError(f"gemm[{operand.label}]: no _scale_inv")
    if straight is not None:
        return Reading(_item(straight), (straight, scale), None, _item(scale), lines)
    if other is None:
        raise QTensorError(f"gemm[{operand.label}]: no codes")
    turned = _last_first(other) if operand.contracted == -1 else _turned(other)
    return Reading(turned, (other, scale), None, _item(scale), lines)


@functools.cache
def _item(slot: int) -> Reader:
    return lambda buffers: buffers[slot]


@functools.cache
def _turned(slot: int) -> Reader:
    """The codes of a matrix transposed: bytes are moved, none is changed."""
    return lambda buffers: buffers[slot].t().contiguous()


@functools.cache
def _last_first(slot: int) -> Reader:
    """``_transpose`` (K, ...) as (..., K)."""
    return lambda buffers: buffers[slot].movedim(0, -1).contiguous()


@functools.cache
def _tiles(slot: int, turned: bool, swizzled: bool) -> Reader:
    """Block factors in tiles of 128x4; tiles of the transpose where blocks run along the rows."""
    if swizzled:
        return lambda buffers: buffers[slot]
    if turned:
        return lambda buffers: swizzle(buffers[slot].t())
    return lambda buffers: swizzle(buffers[slot])


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
        self.a, self.b = reading(problem.a, spec.recipe), reading(problem.b, spec.recipe)

    def __call__(
        self,
        out: Tensor,
        a: list[Tensor],
        b: list[Tensor],
        bias: Tensor | None,
        beta: float = 0.0,
    ) -> str | None:
        """Write ``out``; or say why these tensors cannot be taken, with nothing written."""
        if not (whole(self.problem.a, a, self.a.slots) and whole(self.problem.b, b, self.b.slots)):
            return "buffers must be those of whole tensors; these are of slices"
        tensors = self.tensors(out, a, b, bias)
        why = fault(tensors)
        if why is None:
            self.launcher(tensors, beta)
        return why

    def tensors(
        self, out: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None
    ) -> Tensors:
        """What the kernel reads and writes."""
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
    """Factor of the product that is no tensor: NVFP4 stores amaxes, and its decode factor is amax / (6 * e4m3_max)."""
    if problem.a.label != "nvfp4":
        return 1.0
    tops = [_FP4_MAX * operand.option("e4m3_max") for operand in (problem.a, problem.b)]
    return 1.0 / (tops[0] * tops[1])
