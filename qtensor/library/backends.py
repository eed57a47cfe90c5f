"""Who computes a product on a GPU: CUTLASS kernels, torch._scaled_mm, dequantize and multiply, or the reference.

The choice depends on formats, sizes, dtype and device alone, is made once for each of them and kept. Every backend that is
passed over has a reason, which ``explain`` shows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtensor.cutlass_gemm import tuning
from qtensor.cutlass_gemm.launch import Launcher
from qtensor.errors import QTensorError, UnsupportedError, check, fail
from qtensor.layout import Shape
from qtensor.library import gemm_cutlass
from qtensor.library.codec import parse
from qtensor.library.dequantize import turned
from qtensor.library.gemm_torch import Dequant, ScaledMM
from qtensor.library.problem import Operand, Problem, operands

BACKENDS = ("cutlass", "scaled_mm", "dequant", "reference")
"""By preference."""

Runner = Any
"""(out, a, b, bias) -> None, or the reason why nothing was written."""


@dataclass(frozen=True)
class Plan:
    """What computes a problem.

    Attributes:
        runners: those that can, the preferred first. The reference, which always can, is not among them.
        refusals: (backend, reason) of each that cannot.
        missing: of kernels that are not built: what to warn about, or None.
    """

    runners: tuple[Runner, ...]
    refusals: tuple[tuple[str, str], ...]
    missing: tuple[str, str] | None = None

    @property
    def chosen(self) -> str:
        """Name of the backend."""
        return self.runners[0].name if self.runners else "reference"

    @property
    def kernel(self) -> str | None:
        """Name of the CUTLASS kernel, if it is one."""
        spec = getattr(self.runners[0], "spec", None) if self.runners else None
        return None if spec is None else spec.name


@functools.lru_cache(maxsize=4096)
def plan(problem: Problem) -> Plan:
    """The plan for a problem; loads kernels, and compiles them where ``QTENSOR_JIT=1`` allows it."""
    runners: list[Runner] = []
    refusals: list[tuple[str, str]] = []
    missing = None
    specs = gemm_cutlass.kernels(problem)
    if isinstance(specs, str):
        refusals.append(("cutlass", specs))
    else:
        found = _loaded(problem, specs)
        if isinstance(found, str):
            arch, recipe = specs[0].arch, specs[0].recipe
            fix = f"qtensor kernels build --arch {arch} --recipe {recipe}"
            refusals.append(("cutlass", f"{found}; run: {fix}"))
            missing = arch, recipe
        else:
            runners.append(found)
    why = ScaledMM.refusal(problem)
    if why is None:
        runners.append(ScaledMM(problem))
    else:
        refusals.append(("scaled_mm", why))
    dtype = Dequant.choose(problem)
    if isinstance(dtype, str):
        refusals.append(("dequant", dtype))
    else:
        runners.append(Dequant(problem, dtype))
    return Plan(tuple(runners), tuple(refusals), missing)


def _loaded(problem: Problem, specs: Sequence[Any]) -> gemm_cutlass.Cutlass | str:
    """The best kernel that is there, ready for the sizes."""
    # Only those who have a GPU need the cache of compiled libraries.
    from qtensor.cutlass_gemm.library import first_loadable  # noqa: PLC0415

    found = first_loadable(specs)
    if isinstance(found, str):
        return found
    kernel, spec = found
    device = torch.device(problem.device)
    try:
        alpha = gemm_cutlass.alpha(problem)
        launcher = Launcher(kernel, problem.sizes, device, alpha, problem.processors)
    except QTensorError as error:
        return str(error)
    return gemm_cutlass.Cutlass(problem, spec, launcher)


def reset() -> None:
    """Forget choices: after kernels were built or removed, or others were measured to be faster."""
    plan.cache_clear()
    _PLANS.clear()


tuning.LISTENERS.append(reset)


# ------------------------------------------------------------------------------------------- running

_PLANS: dict[Any, Plan] = {}
_MOST_PLANS = 4096
"""Calls to their plans, without building a ``Problem`` for each."""


def multiply_(
    out: Tensor,
    a: list[Tensor],
    a_quantizer: str,
    a_shape: Shape,
    b: list[Tensor],
    b_quantizer: str,
    b_shape: Shape,
    layout: str,
    bias: Tensor | None,
    backend: str = "auto",
    fast: bool = False,
) -> bool:
    """Compute a product on a GPU.

    Args:
        out: contiguous, of the result's shape and dtype.
        a: buffers of the left operand in slot order, or one plain tensor.
        a_quantizer: its canonical string, or "".
        a_shape: its logical shape.
        b: as ``a``.
        b_quantizer: as ``a_quantizer``.
        b_shape: as ``a_shape``.
        layout: TN, NN or NT.
        bias: broadcastable to the result, or None.
        backend: one of ``BACKENDS``, or "auto".
        fast: sums may stay in narrow accumulators (sm_90a FP8).

    Returns:
        False, with nothing written, where the reference has to.

    Raises:
        UnsupportedError: the backend that is asked for by name cannot compute it.
    """
    if backend == "reference":
        return False
    if layout == "NN" and b_quantizer and not b[0].is_contiguous():
        # A weight behind t(): views of rows, which are a right operand in layout TN.
        twin, b = turned(parse(b_quantizer), b)
        b_quantizer, b_shape, layout = twin.canonical, b_shape[::-1], "TN"
    key = (
        *(a_quantizer, tuple(a_shape), a[0].dtype, b_quantizer, tuple(b_shape), b[0].dtype),
        *(layout, out.dtype, out.device, fast),
        None if bias is None else (tuple(bias.shape), bias.dtype),
    )
    found = _PLANS.get(key)
    if found is None:
        found = _remember(key)
    if found.missing is not None and backend == "auto":
        _warn(found)
    refusals = []
    for runner in found.runners:
        if backend in ("auto", runner.name):
            why = runner(out, a, b, bias)
            if why is None:
                return True
            refusals.append((runner.name, why))
    if backend != "auto":
        _refuse(_problem_of(key), backend, (*refusals, *found.refusals))
    return False


def accumulate_(
    out: Tensor,
    a: list[Tensor],
    a_quantizer: str,
    a_shape: Shape,
    b: list[Tensor],
    b_quantizer: str,
    b_shape: Shape,
    layout: str,
) -> bool:
    """``out += product`` in one kernel: for weight gradients that are added to a float32 ``main_grad``.

    Arguments as for ``multiply_``; ``out`` is float32.

    Returns:
        False, with nothing written, where no CUTLASS kernel can: multiply, then add.
    """
    if out.is_cpu or out.dtype != torch.float32:
        return False
    key = (
        *(a_quantizer, tuple(a_shape), a[0].dtype, b_quantizer, tuple(b_shape), b[0].dtype),
        *(layout, out.dtype, out.device, False, None),
    )
    found = _PLANS.get(key) or _remember(key)
    runner = found.runners[0] if found.runners else None
    return isinstance(runner, gemm_cutlass.Cutlass) and runner(out, a, b, None, 1.0) is None


def _remember(key: Any) -> Plan:
    """The plan of a call seen for the first time."""
    if len(_PLANS) >= _MOST_PLANS:
        _PLANS.clear()
    return _PLANS.setdefault(key, plan(_problem_of(key)))


def _warn(found: Plan) -> None:
    from qtensor.cutlass_gemm.library import warn_missing  # noqa: PLC0415 - see _loaded

    if found.missing is not None:
        warn_missing(*found.missing, found.chosen)


def _problem_of(key: Any) -> Problem:
    a_quantizer, a_shape, a_dtype, b_quantizer, b_shape, b_dtype, *rest = key
    layout, dtype, device, fast, bias = rest
    a, b = operands((a_quantizer, a_shape, a_dtype), (b_quantizer, b_shape, b_dtype), layout)
    return Problem(a, b, layout, dtype, bias, *_device(device), fast)


@functools.cache
def _device(device: torch.device) -> tuple[str, tuple[int, int] | None, int]:
    """Name, compute capability and multiprocessors of a device."""
    if device.type != "cuda":
        return str(device), None, 0
    # What autotune found in other processes.
    from qtensor.cutlass_gemm.autotune import read  # noqa: PLC0415 - see _loaded

    facts = torch.cuda.get_device_properties(device)
    read(facts.name)
    return str(device), (facts.major, facts.minor), facts.multi_processor_count


def check_backend(backend: object) -> None:
    """Refuse a backend that there is not.

    Raises:
        QTensorError: the message lists those that there are.
    """
    rule = f"backend must be auto or one of {', '.join(BACKENDS)}"
    known = backend in ("auto", *BACKENDS)
    check(known, "gemm", rule, repr(backend), "Choose one of them")


def _refuse(problem: Problem, backend: str, refusals: Sequence[tuple[str, str]]) -> None:
    reason = next((why for name, why in refusals if name == backend), "no reason")
    rule = f"the backend {backend} must be able to compute the product"
    fix = "Use backend='auto', or see qtensor.explain(a, b)"
    op = f"gemm[{problem.a.label}, {problem.b.label}]"
    fail(op, rule, f"{problem.text()}: {reason}", fix, UnsupportedError)


# ------------------------------------------------------------------------------------------- explaining


@dataclass(frozen=True)
class Explanation:
    """Who computes a product, and why nobody faster does.

    Attributes:
        problem: the product in words.
        backend: one of ``BACKENDS``.
        kernel: name of the CUTLASS kernel, or None.
        reasons: (backend, what is said of it) for each, by preference.
    """

    problem: str
    backend: str
    kernel: str | None
    reasons: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"gemm {self.problem}: {self.backend}"]
        lines += [f"  {name:10} {reason}" for name, reason in self.reasons]
        return "\n".join(lines)


def explain(problem: Problem) -> Explanation:
    """The explanation of a plan."""
    text = problem.text()
    if problem.capability is None:
        why = "kernels run on CUDA devices"
        here = "chosen: operands are decoded by the CPU kernels and multiplied in float32"
        reasons = tuple((name, why) for name in BACKENDS[:-1])
        return Explanation(text, "reference", None, (*reasons, ("reference", here)))
    found = plan(problem)
    said = dict(found.refusals) | {r.name: f"possible{_detail(r)}" for r in found.runners}
    said["reference"] = "possible"
    said[found.chosen] = said[found.chosen].replace("possible", "chosen", 1)
    reasons = tuple((name, said[name]) for name in BACKENDS)
    return Explanation(text, found.chosen, found.kernel, reasons)


def _detail(runner: Runner) -> str:
    if isinstance(runner, gemm_cutlass.Cutlass):
        return f": {runner.spec.name}"
    return f" in {runner.dtype}" if isinstance(runner, Dequant) else ""


def problem_for(
    a: Operand, b: Operand, layout: str, dtype: torch.dtype, bias: Tensor | None, place: Any
) -> Problem:
    """A problem on a device, or on an architecture ("sm_90a") as if one were here."""
    known = None if bias is None else (tuple(bias.shape), bias.dtype)
    if isinstance(place, torch.device):
        return Problem(a, b, layout, dtype, known, *_device(place))
    arch = tuning.select(str(place))[0]
    facts = "cuda:0", arch.capability, tuning.MULTIPROCESSORS[arch.arch]
    return Problem(a, b, layout, dtype, known, *facts)
