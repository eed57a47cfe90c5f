"""How a sequence runs: which operations are fused, where tensors are quantized, and what backward keeps."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from qtensor.autocasting import active_recipe
from qtensor.errors import fail
from qtensor.ops.fuser import OperationFuser, Plan, _run
from qtensor.ops.fusions import Step
from qtensor.ops.operation import BasicOperation

ROWS = 1024
"""Of the input that is made up where none is given."""
_QUANTIZERS = {
    "quantize": (1,),
    "grouped_quantize": (1,),
    "linear_forward": (1, 4),
    "linear_backward": (1,),
    "norm_quantize": (7,),
    "activation_quantize": (2,),
}
"""Op -> places among its arguments of the texts of what it quantizes."""
_IN_PASSING = ("norm_quantize", "activation_quantize")


@dataclass
class Row:
    """One basic operation, or a module that runs by itself.

    Attributes:
        name: of the class.
        forward: what runs it forward: its own name, or that of the fused operation.
        backward: likewise; "" where it takes no part.
        quantized: formats that its forward step makes, each with the op that does.
        grad_quantized: likewise of its backward step.
        saved: bytes that backward keeps, parameters aside.
    """

    name: str
    forward: str = ""
    backward: str = ""
    quantized: list[str] = field(default_factory=list)
    grad_quantized: list[str] = field(default_factory=list)
    saved: int = 0


@dataclass
class SequenceExplanation:
    """What ``Sequential.explain`` found.

    Attributes:
        recipe: in force; "high precision" where there is none.
        inputs: what it was found for.
        rows: one for each basic operation, in order.
        quantize_calls: quantizing ops of one forward and backward; each makes one operand.
        separate_quantize_calls: those among them that read a tensor which another op has written for them.
    """

    recipe: str
    inputs: str
    rows: list[Row]
    quantize_calls: int
    separate_quantize_calls: int

    @property
    def saved(self) -> int:
        """Bytes that backward keeps, parameters aside."""
        return sum(row.saved for row in self.rows)

    def __str__(self) -> str:
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
        widths = [max(len(line[i]) for line in (head, *cells)) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
            for line in (head, *cells)
        ]
        calls = f"{self.quantize_calls} quantize calls, {self.quantize_calls - self.separate_quantize_calls} of them in the pass of another operation"
        return "\n".join([
            f"Sequential under {self.recipe}, for {self.inputs}",
            *lines,
            f"{self.saved:,} bytes saved for backward; {calls}",
        ])


class _Log(TorchDispatchMode):
    """Which quantizing ops run in which step."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__()
        self.rows = rows
        self.place: int | None = None
        self.backward = False
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname if func.namespace == "qtensor" else ""
        for place in _QUANTIZERS.get(name, ()):
            self.calls.append(name)
            if self.place is not None:
                row = self.rows[self.place]
                format_ = str(args[place]).partition("(")[0]
                into = row.grad_quantized if self.backward else row.quantized
                into.append(f"{format_} ({name})" if name in _IN_PASSING else format_)
        return func(*args, **(kwargs or {}))


class _Observed:
    """A step's operation that says when it runs, and what it saved."""

    def __init__(self, step: Step, log: _Log, offset: int, parameters: set[int]) -> None:
        self._step, self._log, self._offset = step, log, offset
        self._parameters = parameters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step.op, name)

    def _enter(self, backward: bool) -> None:
        self._log.place, self._log.backward = self._offset + self._step.first, backward

    def fuser_forward_compute(self, *args: Any, **kwargs: Any) -> Any:
        self._enter(False)
        return self._step.op.fuser_forward_compute(*args, **kwargs)

    def fuser_forward_save_ctx(self, ctxs: Any, *args: Any, **kwargs: Any) -> Any:
        self._step.op.fuser_forward_save_ctx(ctxs, *args, **kwargs)
        self._saved(ctxs)

    def fuser_forward(self, ctxs: Any, *args: Any, **kwargs: Any) -> Any:
        self._enter(False)
        result = self._step.op.fuser_forward(ctxs, *args, **kwargs)
        self._saved(ctxs)
        return result

    def fuser_backward(self, *args: Any, **kwargs: Any) -> Any:
        self._enter(True)
        return self._step.op.fuser_backward(*args, **kwargs)

    def _saved(self, ctxs: Any) -> None:
        for i, ctx in enumerate(ctxs):
            kept = [t for t in ctx.to_save if t is not None and id(t) not in self._parameters]
            row = self._log.rows[self._offset + self._step.first + i]
            row.saved = sum(t.nbytes for t in kept)


def _observed(plan: Plan, log: _Log, offset: int, parameters: set[int]) -> Plan:
    def watched(step: Any) -> _Observed:
        return _Observed(step, log, offset, parameters)

    result = copy.copy(plan)
    # By the functions that are watched, all of them.
    result.forward = tuple([
        s._replace(op=watched(s), form="single" if s.form == "single" else "split")
        for s in plan.forward
    ])
    result.backward = tuple([s._replace(op=watched(s), is_plain=False) for s in plan.backward])
    return result


def _faked(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy whose parameters and buffers have no data."""
    memo = {}
    for t in (*module.parameters(), *module.buffers()):
        fake: Any = mode.from_tensor(t.detach())
        if isinstance(t, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=t.requires_grad)
        memo[id(t)] = fake
    return copy.deepcopy(module, memo)


def _made_up(sequence: nn.Sequential) -> Tensor:
    """An input of a likely shape.

    Raises:
        QTensorError: the first operations do not say which.
    """
    for module in sequence:
        for op in getattr(module, "basic_ops", (module,)):
            size = getattr(op, "in_features", None)
            weight = getattr(op, "weight", None)
            if size is None and isinstance(weight, Tensor):
                size = weight.shape[-1]
            if size is not None:
                dtype = weight.dtype if weight is not None else torch.get_default_dtype()
                return torch.empty(ROWS, size, dtype=dtype, device=next(op.parameters()).device)
    rule = "the operations do not say which input they take"
    fail("Sequential.explain", rule, "no input", "Pass one, and the extra inputs")


def _row_backward(rows: list[Row], plan: Plan, offset: int) -> None:
    for steps, attribute in ((plan.forward, "forward"), (plan.backward, "backward")):
        for step in steps:
            for place in range(step.first, step.last + 1):
                setattr(rows[offset + place], attribute, type(step.op).__name__)


def explain(sequence: Any, *inputs: Tensor) -> SequenceExplanation:
    """How ``sequence`` would run now; nothing is computed and no state moves.

    Args:
        sequence: a ``Sequential``.
        *inputs: the input and the extra inputs; only shapes, dtypes and ``requires_grad`` count. Without any, an input of 1024
            rows that requires a gradient.

    Raises:
        QTensorError: as the call itself.
    """
    given = inputs or (_made_up(sequence).requires_grad_(),)
    rows: list[Row] = []
    log = _Log(rows)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad():
        fakes = [mode.from_tensor(t).detach().requires_grad_(t.requires_grad) for t in given]
        twin: Any = _faked(sequence, mode)
        parameters = {id(p) for p in twin.parameters()}
        with mode, log:
            outputs = _run_observed(twin, fakes, log, parameters)
            log.place = None
            found = [t for t in outputs if t.requires_grad]
            if found:
                torch.autograd.backward(found, [torch.ones_like(t) for t in found])
    key = active_recipe()
    shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in given)
    separate = sum(name not in _IN_PASSING for name in log.calls)
    recipe = key.partition("(")[0] or "high precision"
    return SequenceExplanation(recipe, shapes, rows, len(log.calls), separate)


def _run_observed(twin: Any, inputs: list[Tensor], log: _Log, parameters: set[int]) -> list[Tensor]:
    """Outputs of a forward whose steps are watched."""
    x, *extra = inputs
    extra_outputs: list[Tensor] = []
    for group in twin.groups:
        offset = len(log.rows)
        if not isinstance(group, OperationFuser):
            log.rows.append(Row(type(group).__name__, "itself", "itself"))
            count = getattr(group, "n_extra_inputs", None)
            if count is None:
                x = group(x)
                continue
            taken, extra = extra[:count], extra[count:]
            out = group(x, *taken)
            x, *more = out if isinstance(out, tuple) else (out,)
            extra_outputs += more
            continue
        log.rows += [Row(_name(op)) for op in group.ops]
        count = group.n_extra_inputs
        if len(extra) < count:
            group.refuse(len(extra))
        taken, extra = extra[:count], extra[count:]
        plan, first = group.plan(x, taken)
        _row_backward(log.rows, plan, offset)
        out = _run(group, _observed(plan, log, offset, parameters), first, x, taken)
        log.place = None
        if isinstance(out, tuple):
            x, *more = out
            extra_outputs += more
        else:
            x = out
    return [x, *extra_outputs]


def _name(op: BasicOperation) -> str:
    name = getattr(op, "name", "")
    return f"{type(op).__name__}[{name}]" if name else type(op).__name__
