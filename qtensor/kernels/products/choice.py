"""Choose the backend of a product, by one table for CPUs and GPUs that ``explain`` shows.

The choice depends on formats, sizes, dtype and device alone. It is made once for each combination
and cached. Every backend that is skipped has a reason.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from qtensor.core.errors import QTensorError, UnsupportedError, check, fail
from qtensor.kernels.products.dequant import Dequant
from qtensor.kernels.products.dot_products import Amx, DotProducts
from qtensor.kernels.products.few_rows import FewRows
from qtensor.kernels.products.integer import IntegerProducts
from qtensor.kernels.products.problem import (
    GemmSide,
    OperandFacts,
    Problem,
    Product,
    facts_of,
    sides,
)
from qtensor.kernels.products.reference import Reference
from qtensor.kernels.products.scaled_mm import ScaledMM
from qtensor.kernels.products.tiles import Tiles

if TYPE_CHECKING:
    from qtensor.kernels.products.cutlass import Cutlass


class Runner(Protocol):
    """A backend that is ready to compute one problem."""

    @property
    def name(self) -> str:
        """Name of the backend."""

    @property
    def detail(self) -> str:
        """What ``explain`` says of it."""

    def __call__(
        self, out: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None
    ) -> str | None:
        """Write ``out`` from the buffers of both operands; or return why it wrote nothing."""


class _Maker(Protocol):
    """The class of a backend: it refuses a problem, or makes a runner for it."""

    def __call__(self, problem: Problem) -> Runner: ...

    def refusal(self, problem: Problem) -> str | None:
        """Return why the backend does not serve a problem, or None."""


@dataclass(frozen=True)
class Missing:
    """Kernels that a backend could use if they were built.

    Attributes:
        reason: why the backend cannot compute the problem now.
        arch: architecture to build for.
        recipe: family of kernels to build.
    """

    reason: str
    arch: str
    recipe: str


def _cutlass(problem: Problem) -> Runner | Missing | str:
    """Return the best CUTLASS kernel that is there, ready for the sizes."""
    if problem.capability is None:
        return "kernels run on CUDA devices"
    module = _cutlass_module()
    specs = module.kernels(problem)
    if isinstance(specs, str):
        return specs
    # Only a process with a GPU needs the cache of compiled libraries.
    from qtensor.cutlass_gemm.launch import Launcher  # noqa: PLC0415
    from qtensor.cutlass_gemm.library import first_loadable  # noqa: PLC0415

    loaded = first_loadable(specs)
    reason = loaded
    if not isinstance(loaded, str):
        kernel, spec = loaded
        device, alpha = torch.device(problem.device), module.alpha(problem)
        try:
            launcher = Launcher(kernel, problem.sizes, device, alpha, problem.processors)
            return module.Cutlass(problem, spec, launcher)
        except QTensorError as error:
            reason = str(error)
    arch, recipe = specs[0].arch, specs[0].recipe
    fix = f"qtensor kernels build --arch {arch} --recipe {recipe}"
    return Missing(f"{reason}; run: {fix}", arch, recipe)


@functools.cache
def _cutlass_module() -> ModuleType:
    """Return the CUTLASS backend, which a process without a GPU never imports."""
    from qtensor.cutlass_gemm import tuning  # noqa: PLC0415
    from qtensor.kernels.products import cutlass  # noqa: PLC0415

    tuning.LISTENERS.append(reset)
    return cutlass


def _unless_refused(backend: _Maker) -> Callable[[Problem], Runner | str]:
    def make(problem: Problem) -> Runner | str:
        reason = backend.refusal(problem)
        return backend(problem) if reason is None else reason

    return make


TABLE: dict[str, Callable[[Problem], Runner | Missing | str]] = {
    "cutlass": _cutlass,
    "scaled_mm": _unless_refused(ScaledMM),
    "dequant": _unless_refused(Dequant),
    "integer": _unless_refused(IntegerProducts),
    "amx": _unless_refused(Amx),
    "few_rows": _unless_refused(FewRows),
    "dot_products": _unless_refused(DotProducts),
    "tiles": _unless_refused(Tiles),
    "reference": _unless_refused(Reference),
}
"""Backend -> function that returns its runner for a problem, or the reason why it has none.

The preferred backend comes first. The reference serves every problem.
"""

BACKENDS = tuple(TABLE)
"""Names of the backends, by preference."""


@dataclass(frozen=True)
class GemmChoice:
    """The backends that can compute a problem.

    Attributes:
        runners: the backends that can, the preferred first. One of them is the reference.
        refusals: (backend, reason) of each backend that cannot.
        missing: the kernels that are not built, to warn about them; or None.
    """

    runners: tuple[Runner, ...]
    refusals: tuple[tuple[str, str], ...]
    missing: Missing | None = None

    @property
    def chosen(self) -> str:
        """Name of the backend."""
        return str(self.runners[0].name)

    @property
    def kernel(self) -> str | None:
        """Name of the CUTLASS kernel, if it is one."""
        spec = getattr(self.runners[0], "spec", None)
        return None if spec is None else str(spec.name)


@functools.lru_cache(maxsize=4096)
def choose(problem: Problem) -> GemmChoice:
    """Return the choice for a problem.

    Loads kernels, and compiles them where ``QTENSOR_JIT=1`` allows it.
    """
    runners: list[Runner] = []
    refusals: list[tuple[str, str]] = []
    missing = None
    for name, make in TABLE.items():
        made = _FAILED.get((problem, name)) or make(problem)
        if isinstance(made, Missing):
            missing, made = made, made.reason
        if isinstance(made, str):
            refusals.append((name, made))
        else:
            runners.append(made)
    runners.sort(key=_place)
    return GemmChoice(tuple(runners), tuple(refusals), missing)


def _place(runner: Runner) -> tuple[int, bool]:
    """Return the place of a runner: that of the table, or behind the backend that it names."""
    after = runner.after if isinstance(runner, Amx) else None
    return BACKENDS.index(after or runner.name), after is not None


_MOST_CHOICES = 4096
_FAILED: dict[tuple[Problem, str], str] = {}
"""(problem, backend) -> what torch said when the backend tried to compute it on a GPU."""


def _keep_failure(problem: Problem, name: str, error: RuntimeError) -> str:
    """Refuse a problem from now on to a backend that failed, and return the reason.

    Raises:
        RuntimeError: ``error``, if another backend could not do better: the memory is too small, an
            earlier kernel has failed, no backend is left, or the product runs on a CPU, whose
            backends are our own.
    """
    ours = problem.capability is None or name == Reference.name
    if ours or isinstance(error, _NOT_OF_A_BACKEND):
        raise error
    reason = f"it failed: {str(error).splitlines()[0]}"
    if len(_FAILED) >= _MOST_CHOICES:
        _FAILED.clear()
    _FAILED[problem, name] = reason
    reset()
    # The text has no sizes, so that Python shows one warning for products of all sizes.
    pair = f"{problem.a.label} x {problem.b.label}"
    text = f"qtensor: {name} cannot compute {pair}; {reason}; another backend does (see explain)"
    warnings.warn(text, RuntimeWarning, stacklevel=2)
    return reason


_NOT_OF_A_BACKEND = (torch.OutOfMemoryError, torch.AcceleratorError, QTensorError)


def reset() -> None:
    """Forget choices: after kernels were built or removed, or others were measured to be faster."""
    choose.cache_clear()
    _CHOICES.clear()


# ---- running


class ProductCall(NamedTuple):
    """All that the choice for a product depends on; faster to make than a ``Problem``."""

    a: OperandFacts
    b: OperandFacts
    layout: str
    dtype: torch.dtype
    device: torch.device
    fast: bool
    bias: tuple[tuple[int, ...], torch.dtype] | None


_CHOICES: dict[ProductCall, GemmChoice] = {}


def multiply_(out: Tensor, product: Product) -> None:
    """Compute a product by the first backend that can.

    Args:
        out: contiguous, of the result's shape and dtype.
        product: the operands, checked.

    Raises:
        UnsupportedError: the backend that is asked for by name cannot compute it.
    """
    pair, layout, bias, backend, _ = product
    is_view_of_rows = layout == "NN" and pair.b.canonical and not pair.b.buffers[0].is_contiguous()
    if is_view_of_rows and _device(out.device)[1] is not None:
        # GPU kernels read views that t() made as what they view, in layout TN.
        pair = pair._replace(b=pair.b.transpose())
        product = product._replace(operands=pair, layout="TN")
    call = _call(out, product)
    choice = choice_of(call)
    if choice.missing is not None and backend == "auto":
        _warn(choice)
    refusals = []
    for runner in choice.runners:
        if backend in ("auto", runner.name):
            try:
                reason = runner(out, pair.a.buffers, pair.b.buffers, bias)
            except RuntimeError as error:
                reason = _keep_failure(_problem_of(call), runner.name, error)
            if reason is None:
                return
            refusals.append((runner.name, reason))
    _refuse(_problem_of(call), backend, (*refusals, *choice.refusals))


def accumulate_(out: Tensor, product: Product) -> bool:
    """Compute ``out += product`` in one kernel: weight gradients that are added to ``main_grad``.

    Args:
        out: float32, of the shape of the product.
        product: the operands, without a bias.

    Returns:
        False, with nothing written, where no CUTLASS kernel can: multiply, then add.
    """
    if out.dtype != torch.float32:
        return False
    runner, (a, b) = choice_of(_call(out, product)).runners[0], product.operands
    if runner.name != "cutlass":
        return False
    return cast("Cutlass", runner)(out, a.buffers, b.buffers, None, beta=1.0) is None


def overwrite_(out: Tensor, product: Product) -> bool:
    """Compute ``out = product`` without memory for the product: for float32 ``main_grad`` on GPUs.

    Args:
        out: of the shape of the product.
        product: the operands, without a bias.

    Returns:
        False, with nothing written, where ``out`` cannot hold the sums.
    """
    if out.is_cpu or out.dtype != torch.float32 or not out.is_contiguous():
        return False
    multiply_(out, product)
    return True


def _call(out: Tensor, product: Product) -> ProductCall:
    (a, b), layout, bias, _, fast = product
    added = None if bias is None else (tuple(bias.shape), bias.dtype)
    return ProductCall(facts_of(a), facts_of(b), layout, out.dtype, out.device, fast, added)


def choice_of(call: ProductCall) -> GemmChoice:
    """Return the choice for a call, from a cache if an equal call has been made."""
    known = _CHOICES.get(call)
    if known is not None:
        return known
    if len(_CHOICES) >= _MOST_CHOICES:
        _CHOICES.clear()
    return _CHOICES.setdefault(call, choose(_problem_of(call)))


def _warn(choice: GemmChoice) -> None:
    from qtensor.cutlass_gemm.library import warn_missing  # noqa: PLC0415 - see _cutlass

    if choice.missing is not None:
        warn_missing(choice.missing.arch, choice.missing.recipe, choice.chosen)


def _problem_of(call: ProductCall) -> Problem:
    a, b = sides(call.a, call.b, call.layout)
    return Problem(a, b, call.layout, call.dtype, call.bias, *_device(call.device), call.fast)


@functools.cache
def _device(device: torch.device) -> tuple[str, tuple[int, int] | None, int]:
    """Return the name, the compute capability and the number of multiprocessors of a device."""
    if device.type != "cuda":
        return str(device), None, 0
    # Load what autotune measured in other processes.
    from qtensor.cutlass_gemm.autotune import read  # noqa: PLC0415 - see _cutlass

    facts = torch.cuda.get_device_properties(device)
    read(facts.name)
    return str(device), (facts.major, facts.minor), facts.multi_processor_count


def check_backend(backend: object) -> None:
    """Refuse a backend that does not exist.

    Raises:
        QTensorError: the message lists those that do.
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


# ---- explaining


@dataclass(frozen=True)
class Explanation:
    """Which backend computes a product, and why no faster one does. Its repr is the table.

    Attributes:
        problem: the product in words.
        backend: one of ``BACKENDS``.
        kernel: name of the CUTLASS kernel, or None.
        reasons: (backend, text) for each backend, by preference.
    """

    problem: str
    backend: str
    kernel: str | None
    reasons: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"gemm {self.problem}: {self.backend}"]
        lines += [f"  {name:12} {reason}" for name, reason in self.reasons]
        return "\n".join(lines)

    __repr__ = __str__

    def __contains__(self, text: str) -> bool:
        return text in str(self)


def explain(problem: Problem) -> Explanation:
    """Return the table of a problem: the chosen backend, and a reason for each other one."""
    choice = choose(problem)
    said = dict(choice.refusals) | {r.name: f"possible{r.detail}" for r in choice.runners}
    said[choice.chosen] = said[choice.chosen].replace("possible", "chosen", 1)
    reasons = tuple((name, said[name]) for name in BACKENDS)
    return Explanation(problem.text(), choice.chosen, choice.kernel, reasons)


def problem_for(
    operands: tuple[GemmSide, GemmSide],
    layout: str,
    dtype: torch.dtype,
    bias: Tensor | None,
    place: torch.device | str,
) -> Problem:
    """Return the problem on a device, or on an architecture such as "sm_90a"."""
    known = None if bias is None else (tuple(bias.shape), bias.dtype)
    if isinstance(place, torch.device):
        a, b = operands
        return Problem(a, b, layout, dtype, known, *_device(place))
    from qtensor.cutlass_gemm import tuning  # noqa: PLC0415 - see _cutlass

    spec = tuning.select(place)[0]
    facts = "cuda:0", spec.capabilities[0], tuning.MULTIPROCESSORS[spec.arch]
    a, b = operands
    return Problem(a, b, layout, dtype, known, *facts)
