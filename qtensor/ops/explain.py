"""Explain how a sequence runs: fused operations, quantized tensors and saved bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from qtensor.autocasting import active_recipe
from qtensor.core.errors import fail
from qtensor.core.linear_plans import backward_plan, forward_plan
from qtensor.core.texts import aligned
from qtensor.ops.fuser import OperationFuser
from qtensor.ops.operation import BasicOperation, OperationContext
from qtensor.ops.sequence_plan import BackwardStep, ForwardStep, SequencePlan, WatchedStep

Contexts = Sequence[OperationContext]
Group = OperationFuser | nn.Module
ROWS = 1024
"""Rows of the example input that is used if the caller passes none."""


def _forward_quantizers(text: str) -> tuple[str, str]:
    plan = forward_plan(text)
    return plan.x_quantizer, plan.weight_quantizer


_QUANTIZERS: dict[str, Callable[[Sequence[Any]], tuple[str, ...]]] = {
    "quantize": lambda args: (args[1],),
    "grouped_quantize": lambda args: (args[1],),
    "linear_forward": lambda args: _forward_quantizers(args[3]),
    "linear_backward": lambda args: (backward_plan(args[3]).quantizer,),
    "norm_quantize": lambda args: (args[7],),
    "activation_quantize": lambda args: (args[2],),
}
"""Op -> canonical strings of the tensors that it quantizes, by its arguments."""
_IN_PASSING = ("norm_quantize", "activation_quantize")


@dataclass
class Row:
    """One basic operation, or one module that is not an operation.

    Attributes:
        name: name of the class.
        forward: class that runs its forward: its own, or a fused operation.
        backward: class that runs its backward; "" if it takes no part.
        quantized: formats that its forward step produces, each with the op that quantizes.
        grad_quantized: formats that its backward step produces.
        saved: bytes saved for backward, without parameters.
    """

    name: str
    forward: str = ""
    backward: str = ""
    quantized: list[str] = field(default_factory=list)
    grad_quantized: list[str] = field(default_factory=list)
    saved: int = 0


@dataclass
class SequenceExplanation:
    """The result of ``Sequential.explain``; its ``repr`` is a table.

    Attributes:
        recipe: the active recipe, or "high precision".
        inputs: shapes and dtypes of the inputs.
        rows: one row for each basic operation, in order.
        quantize_calls: number of quantizing ops in one forward and backward; each makes one
            operand.
        separate_quantize_calls: those that read a tensor which another op has written before.
    """

    recipe: str
    inputs: str
    rows: list[Row]
    quantize_calls: int
    separate_quantize_calls: int

    @property
    def saved(self) -> int:
        """Bytes saved for backward, without parameters."""
        return sum(row.saved for row in self.rows)

    def __repr__(self) -> str:
        head = ("", "operation", "forward", "quantizes", "backward", "quantizes", "saved")
        cells = [
            (
                str(i),
                row.name,
                row.forward,
                ", ".join(row.quantized),
                row.backward,
                ", ".join(row.grad_quantized),
                f"{row.saved:,}",
            )
            for i, row in enumerate(self.rows)
        ]
        fused = self.quantize_calls - self.separate_quantize_calls
        calls = (
            f"{self.quantize_calls} quantize calls, {fused} of them fused into another operation"
        )
        return "\n".join([
            f"Sequential under {self.recipe}, for {self.inputs}",
            *aligned([head, *cells]),
            f"{self.saved:,} bytes saved for backward; {calls}",
        ])


class _Log(TorchDispatchMode):
    """Records which quantizing ops run in which step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self.row: Row | None = None
        self.backward = False
        self.calls: list[str] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func._opname if func.namespace == "qtensor" else ""
        for canonical in _QUANTIZERS[name](args) if name in _QUANTIZERS else ():
            self.calls.append(name)
            if self.row is not None:
                format_ = canonical.partition("(")[0]
                into = self.row.grad_quantized if self.backward else self.row.quantized
                into.append(f"{format_} ({name})" if name in _IN_PASSING else format_)
        return func(*args, **(kwargs or {}))


class _ObservedFuser(OperationFuser):
    """Runs the operations of ``fuser``, and fills in their rows."""

    def __init__(self, fuser: OperationFuser, log: _Log, parameters: set[int]) -> None:
        super().__init__(fuser.ops, fuser.fusing)
        self.log, self.parameters = log, parameters
        self.rows = [Row(_name(op)) for op in self.ops]
        log.rows += self.rows

    def __call__(self, input: Tensor, *extra_inputs: Tensor) -> Any:
        out = super().__call__(input, *extra_inputs)
        self.log.row = None
        return out

    def make_plan(self, keys: Sequence[str], first: int) -> SequencePlan:
        plan = super().make_plan(keys, first)
        for steps, attribute in ((plan.forward, "forward"), (plan.backward, "backward")):
            for step in steps:
                for row in self.rows[step.first : step.last + 1]:
                    setattr(row, attribute, type(step.op).__name__)
        return plan.watched(lambda step: _ObservedStep(step, self))


class _ObservedStep(WatchedStep):
    """Stands for a step's operation, and records when it runs and what it saves."""

    def __init__(self, step: ForwardStep | BackwardStep, fuser: _ObservedFuser) -> None:
        super().__init__(step.op)
        self._rows = fuser.rows[step.first : step.last + 1]
        self._log, self._parameters = fuser.log, fuser.parameters

    def _enter(self, backward: bool) -> None:
        self._log.row, self._log.backward = self._rows[0], backward

    def fuser_forward_compute(self, *args: Any, **kwargs: Any) -> Any:
        self._enter(False)
        return self.op.fuser_forward_compute(*args, **kwargs)

    def fuser_forward_save_ctx(self, ctxs: Contexts, *args: Any, **kwargs: Any) -> None:
        self.op.fuser_forward_save_ctx(ctxs, *args, **kwargs)
        self._saved(ctxs)

    def fuser_forward(self, ctxs: Contexts, *args: Any, **kwargs: Any) -> Any:
        self._enter(False)
        result = self.op.fuser_forward(ctxs, *args, **kwargs)
        self._saved(ctxs)
        return result

    def fuser_backward(self, *args: Any, **kwargs: Any) -> Any:
        self._enter(True)
        return self.op.fuser_backward(*args, **kwargs)

    def _saved(self, ctxs: Contexts) -> None:
        for row, ctx in zip(self._rows, ctxs, strict=True):
            saved = [t for t in ctx.to_save if t is not None and id(t) not in self._parameters]
            row.saved = sum(t.nbytes for t in saved)


def _observed(group: Group, log: _Log, parameters: set[int]) -> Group:
    """Return what runs in place of a group of the sequence: a fuser that fills in its rows."""
    if isinstance(group, OperationFuser):
        return _ObservedFuser(group, log, parameters)
    log.rows.append(Row(type(group).__name__, "itself", "itself"))
    return group


def _faked(module: nn.Sequential, mode: FakeTensorMode) -> nn.Sequential:
    """Return a copy whose parameters and buffers are fake tensors."""
    memo = {}
    for t in (*module.parameters(), *module.buffers()):
        fake: Tensor = mode.from_tensor(t.detach())
        if isinstance(t, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=t.requires_grad)
        memo[id(t)] = fake
    return copy.deepcopy(module, memo)


def _example_input(sequence: nn.Sequential) -> Tensor:
    """Return an input of a shape that the first operations take."""
    for module in sequence:
        for op in getattr(module, "basic_ops", (module,)):
            size = getattr(op, "in_features", None)
            weight = getattr(op, "weight", None)
            if size is None and isinstance(weight, Tensor):
                size = weight.shape[-1]
            if size is not None:
                dtype = weight.dtype if weight is not None else torch.get_default_dtype()
                return torch.empty(ROWS, size, dtype=dtype, device=next(op.parameters()).device)
    rule = "the input size must follow from the operations, or an input must be passed"
    fail("Sequential.explain", rule, "no input", "Pass the input and the extra inputs")


def explain(sequence: nn.Sequential, *inputs: Tensor) -> SequenceExplanation:
    """Return how ``sequence`` would run now, without computing anything or changing state.

    ``Sequential.explain`` describes the inputs.
    """
    used = inputs or (_example_input(sequence).requires_grad_(),)
    log = _Log()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad():
        fakes = [mode.from_tensor(t).detach().requires_grad_(t.requires_grad) for t in used]
        twin: Any = _faked(sequence, mode)
        parameters = {id(p) for p in twin.parameters()}
        twin.replace_groups(partial(_observed, log=log, parameters=parameters))
        with mode, log:
            outputs = twin(*fakes)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            differentiable = [t for t in outputs if t.requires_grad]
            if differentiable:
                torch.autograd.backward(
                    differentiable, [torch.ones_like(t) for t in differentiable]
                )
    key = active_recipe()
    shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in used)
    separate = sum(name not in _IN_PASSING for name in log.calls)
    recipe = key.partition("(")[0] or "high precision"
    return SequenceExplanation(recipe, shapes, log.rows, len(log.calls), separate)


def _name(op: BasicOperation) -> str:
    name = getattr(op, "name", "")
    return f"{type(op).__name__}[{name}]" if name else type(op).__name__
