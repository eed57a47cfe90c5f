"""Ops on the state of delayed scaling, which belongs to the caller and consists of tensors.

A state has n columns, one for each quantized tensor: first the tensors of the forward pass, then
the gradients. Each pass writes its own tensors, so that the graph of one pass never writes a tensor
that the other pass saved:

- forward: `scale` (n,) float32, `history` (rows, n) float32, and `steps` (2,) int64 on the CPU: the
  current step of the state, and the step of the last gradient maximum that went into the history;
- backward: `cell` (g,) float32, the maxima of the gradients since then, and `cell_step` (1,) int64
  on the CPU.

The counters are on the CPU, so that a step never waits for a GPU. Every op checks the sizes and
dtypes of the state.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qtensor.core.devices import check_not_captured
from qtensor.core.errors import check
from qtensor.library.define import (
    Written,
    WrittenOptional,
    empty,
    leaf_op,
    no_outputs,
)
from qtensor.library.recomputation import in_backward, recall_or_keep
from qtensor.reference.float8 import delayed_scales, roll_history

ALGORITHMS = ("max", "most_recent")
"""How a scale comes from a column of the history."""

_LARGEST = torch.finfo(torch.float32).max
_FIX = "Pass the state that the module made"


def _check_tensors(op: str, dtype: torch.dtype, **tensors: tuple[Tensor, int | None]) -> None:
    """Raise unless each tensor has `dtype` and is a vector of so many elements (None: any tensor).

    Counters (int64) must be on the CPU too.
    """
    counters = dtype is torch.int64
    for name, (t, count) in tensors.items():
        good = t.dtype is dtype and (t.is_cpu or not counters)
        rule = f"{name} must be {dtype}{' on the CPU' * counters}"
        check(good, op, rule, f"{t.dtype} on {t.device}", _FIX)
        good = count is None or t.shape == (count,)
        check(good, op, f"{name} must be a vector of {count} elements", tuple(t.shape), _FIX)


def _check_history(op: str, history: Tensor, length: int) -> None:
    """Raise unless the history is a matrix (length or more, n)."""
    rule = "history must be a matrix (rows, columns)"
    check(history.dim() == 2, op, rule, f"shape {tuple(history.shape)}", _FIX)
    rows = history.shape[0]
    rule = f"the length must be from 1 to the {rows} rows of the history"
    check(0 < length <= rows, op, rule, length, "Choose a shorter history or a larger state")


def _check_state(
    op: str, history: Tensor, steps: Tensor, cell: Tensor, cell_step: Tensor, length: int
) -> None:
    """Raise unless the tensors have the dtypes and sizes that this module's docstring names."""
    _check_tensors(op, torch.float32, history=(history, None), cell=(cell, None))
    _check_history(op, history, length)
    _check_tensors(op, torch.int64, steps=(steps, 2), cell_step=(cell_step, 1))
    columns = history.shape[1]
    rule = f"cell must be a vector of at most {columns} elements, the columns of the history"
    good = cell.dim() == 1 and cell.numel() <= columns and cell.device == history.device
    check(good, op, rule, f"shape {tuple(cell.shape)} on {cell.device}", _FIX)


def _check_not_captured(op: str, state: Tensor) -> None:
    """Raise if a CUDA graph is captured: its replays would not move the counters on the CPU."""
    rule = "delayed scaling counts its steps on the CPU, which a CUDA graph does not repeat"
    check_not_captured(state.device, op, rule, "Capture a recipe with current scaling")


def _merged(history: Tensor, steps: Tensor, cell: Tensor, cell_step: Tensor, length: int) -> Tensor:
    """Return the rows in use (length, n), with the maxima of the gradients in row 0."""
    _check_state("merged_history", history, steps, cell, cell_step, length)
    _check_not_captured("merged_history", history)
    rows = history[:length].clone()
    if int(cell_step) > int(steps[1]):
        gradients = rows[0, rows.shape[1] - cell.numel() :]
        torch.maximum(gradients, cell, out=gradients)
    return rows


class _MergedHistoryArgs(NamedTuple):
    history: Tensor
    steps: Tensor
    cell: Tensor
    cell_step: Tensor
    length: int


def _merged_alloc(args: _MergedHistoryArgs) -> Tensor:
    _check_history("merged_history", args.history, args.length)
    return empty(args.history, (args.length, args.history.shape[1]), torch.float32)


def _merged_fill(out: Tensor, args: _MergedHistoryArgs) -> None:
    out.copy_(_merged(*args))


MERGED_HISTORY = leaf_op(
    "merged_history", _MergedHistoryArgs, "Tensor", _merged_alloc, _merged_fill
)
"""Return the history (length, n) that the next scales come from, for algorithms of the caller."""


class _DelayedBeginArgs(NamedTuple):
    scale: Written
    history: Written
    steps: Written
    cell: Tensor
    cell_step: Tensor
    step: Tensor
    advance: bool
    length: int
    algorithm: str
    margin: int
    largest: list[float]
    rows: Tensor | None = None
    new_scale: Tensor | None = None
    report: Tensor | None = None
    kept: bool = False


def _begin_alloc(args: _DelayedBeginArgs) -> tuple[Tensor, Tensor]:
    return torch.empty_like(args.scale), torch.empty_like(args.steps)


def _begin_fill(outputs: tuple[Tensor, Tensor], args: _DelayedBeginArgs) -> None:
    """Begin a step if there is a new one, and write its scales and its ticket."""
    if args.report is not None:
        _check_tensors("delayed_begin_", torch.int64, report=(args.report, 2))
        new = args._replace(report=None, kept=False)
        recall_or_keep(args.report.tolist()[0], *outputs, lambda: DELAYED_BEGIN(*new))
        return
    advance = args.advance and not in_backward()
    before = args.steps.clone()
    _check_begin(args)
    _begin_by_torch(outputs, args, advance)
    if not (torch.equal(before, args.steps) or args.scale.is_inference()):
        # A compiled region that a checkpoint computes again has saved the scales, not the factors
        # of its call. torch must refuse to compute it with later ones.
        torch.autograd.graph.increment_version(args.scale)


def _begin_by_torch(outputs: tuple[Tensor, Tensor], args: _DelayedBeginArgs, advance: bool) -> None:
    rows, new_scale, now = args.rows, args.new_scale, int(args.step)
    if advance and now != int(args.steps[0]):
        _check_not_captured("delayed_begin_", args.history)
        if rows is None:
            rows = _merged(args.history, args.steps, args.cell, args.cell_step, args.length)
        if new_scale is None:
            amax = rows.amax(0) if args.algorithm == "max" else rows[0]
            new_scale = delayed_scales(amax, args.scale, args.margin, args.largest)
        # Through .data: the version of a tensor that a graph saved must not change.
        args.scale.data.copy_(new_scale)
        args.history.data[: args.length].copy_(roll_history(rows))
        args.steps.data[1] = max(int(args.cell_step), int(args.steps[1]))
        args.steps.data[0] = now
    outputs[0].copy_(args.scale)
    outputs[1].copy_(args.steps)


def _check_begin(args: _DelayedBeginArgs) -> None:
    """Raise unless the state and the options have the sizes and values that the op needs."""
    op = "delayed_begin_"
    scale, history, rows, new_scale = args.scale, args.history, args.rows, args.new_scale
    _check_state(op, history, args.steps, args.cell, args.cell_step, args.length)
    columns = history.shape[1]
    _check_tensors(op, torch.float32, scale=(scale, columns))
    _check_tensors(op, torch.int64, step=(args.step, 1))
    good = scale.dim() == 1 and scale.device == history.device
    rule = "scale must be a vector on the device of the history"
    check(good, op, rule, f"shape {tuple(scale.shape)} on {scale.device}", _FIX)
    largest = args.largest
    rule = f"largest must have {columns} finite float32 numbers, one for each column"
    good = len(largest) == columns and all(abs(value) <= _LARGEST for value in largest)
    check(good, op, rule, largest, "Pass the largest code value of each tensor")
    rule = f"algorithm must be one of {', '.join(ALGORITHMS)}"
    known = args.algorithm in ALGORITHMS or new_scale is not None
    check(known, op, rule, repr(args.algorithm), "Choose one of them")
    rule = "margin must be from -1000 to 1000"
    check(abs(args.margin) <= 1000, op, rule, args.margin, "Choose another margin")
    if rows is not None:
        good = rows.shape == (args.length, columns)
        check(good, op, f"rows must be ({args.length}, {columns})", tuple(rows.shape), _FIX)
    if new_scale is not None:
        good = new_scale.shape == (columns,)
        check(good, op, f"new_scale must be ({columns},)", tuple(new_scale.shape), _FIX)


DELAYED_BEGIN = leaf_op(
    "delayed_begin_", _DelayedBeginArgs, "(Tensor scales, Tensor ticket)", _begin_alloc, _begin_fill
)
"""At the first call of a step, move the history up by one row and compute new scales.

`step` (1,) int64 on the CPU counts steps; nothing changes unless `advance` is true and `step`
differs from the step of the state. In a backward pass nothing changes either: checkpoints call
layers again there. Returns the scales to use, (n,), and a ticket (2,) for `record_gradient_amax_`:
new tensors, which no later call writes. `rows` replaces the merged history; `new_scale` (n,)
replaces the result of the algorithm. `report`, (2,) int64 on the CPU, begins with the key of the
layer: if a checkpoint computes a call of compiled code again, it gets the outputs of the first run.
`kept` says that the call runs without gradients, as the first run of some checkpoints does.
"""


class _DelayedReadArgs(NamedTuple):
    scale: Tensor
    steps: Tensor
    report: Tensor


def _read_alloc(args: _DelayedReadArgs) -> tuple[Tensor, Tensor]:
    return torch.empty_like(args.scale), torch.empty_like(args.steps)


def _read_fill(outputs: tuple[Tensor, Tensor], args: _DelayedReadArgs) -> None:
    _check_tensors("delayed_read", torch.float32, scale=(args.scale, None))
    _check_tensors("delayed_read", torch.int64, steps=(args.steps, 2), report=(args.report, 2))
    recall_or_keep(args.report.tolist()[0], *outputs, lambda: (args.scale, args.steps))


DELAYED_READ = leaf_op(
    "delayed_read", _DelayedReadArgs, "(Tensor scales, Tensor ticket)", _read_alloc, _read_fill
)
"""Return copies of the scales and of the steps, which is the ticket, for an evaluation.

A checkpoint that computes the call again gets those of its first run.
"""


class _RecordAmaxArgs(NamedTuple):
    history: Written
    amax: list[Tensor]
    first: int


def _record_fill(_: None, args: _RecordAmaxArgs) -> None:
    history, amax, first = args
    if in_backward():
        return
    op = "record_amax_"
    _check_tensors(op, torch.float32, history=(history, None))
    _check_history(op, history, 1)
    _check_maxima(op, amax, history.device)
    count, columns = sum(t.numel() for t in amax), history.shape[1]
    rule = f"the {count} maxima must fit into the {columns} columns of the history"
    fix = "Pass the index of the first tensor's column"
    check(0 <= first <= columns - count, op, rule, f"first={first}", fix)
    if not amax:
        return
    maxima = torch.cat(amax)
    row = history.data[0, first : first + count]
    torch.maximum(row, maxima, out=row)


def _check_maxima(op: str, amax: list[Tensor], device: torch.device) -> None:
    """Raise unless each of `amax` is a float32 vector on `device`."""
    for t in amax:
        good = t.dtype is torch.float32 and t.dim() == 1 and t.device == device
        rule = f"each amax must be a float32 vector on {device}"
        check(good, op, rule, f"{t.dtype} {tuple(t.shape)} on {t.device}", "Pass quantize's amax")


RECORD_AMAX = leaf_op("record_amax_", _RecordAmaxArgs, "()", no_outputs, _record_fill)
"""Write `history[0, first:] = max(history[0, first:], amax)`; history is (rows, n) float32.

Each amax is a float32 vector: (1,), or the maxima of several tensors side by side. A backward pass,
where checkpoints call layers again, writes nothing.
"""


class _RecordGradientAmaxArgs(NamedTuple):
    cell: Written
    cell_step: Written
    amax: list[Tensor]
    ticket: Tensor


def _record_gradient_fill(_: None, args: _RecordGradientAmaxArgs) -> None:
    cell, cell_step, amax, ticket = args
    op = "record_gradient_amax_"
    _check_tensors(op, torch.float32, cell=(cell, sum([t.numel() for t in amax])))
    _check_tensors(op, torch.int64, cell_step=(cell_step, 1), ticket=(ticket, 2))
    _check_maxima(op, [cell, *amax], cell.device)
    _check_not_captured(op, cell)
    step, consumed = int(ticket[0]), int(ticket[1])
    maxima = torch.cat(amax) if amax else cell
    if int(cell_step) > consumed:
        maxima = torch.maximum(cell, maxima)
    cell.data.copy_(maxima)
    cell_step.data.fill_(max(step, int(cell_step)))


RECORD_GRADIENT_AMAX = leaf_op(
    "record_gradient_amax_", _RecordGradientAmaxArgs, "()", no_outputs, _record_gradient_fill
)
"""Store the maxima of gradients in `cell` (g,) for the next step.

Maxima that the history already has are overwritten. Each amax is a float32 vector, (1,) or several
side by side; `ticket` (2,) int64 comes from `delayed_begin_`.
"""


class GradientCell(Protocol):
    """Where a layer keeps the maxima of gradients: see ``record_gradient_amax_``."""

    cell: Tensor
    cell_step: Tensor


class LayerState(Protocol):
    """The state of a layer, as ops find it by the layer's key."""

    @property
    def delayed(self) -> GradientCell:
        """The state of delayed scaling."""


LAYERS: weakref.WeakValueDictionary[int, LayerState] = weakref.WeakValueDictionary()
"""The states of layers (``modules.state.LinearState``) by their keys."""


class _SendGradientAmaxArgs(NamedTuple):
    report: Tensor
    amax: list[Tensor]
    ticket: Tensor


def _send_fill(_: None, args: _SendGradientAmaxArgs) -> None:
    _check_tensors("send_gradient_amax_", torch.int64, report=(args.report, 2))
    layer = LAYERS.get(args.report.tolist()[0])
    if layer is not None:
        state = layer.delayed
        RECORD_GRADIENT_AMAX(state.cell, state.cell_step, args.amax, args.ticket)


SEND_GRADIENT_AMAX = leaf_op(
    "send_gradient_amax_", _SendGradientAmaxArgs, "()", no_outputs, _send_fill
)
"""Do ``record_gradient_amax_`` for the layer of key ``report[0]``, if it still exists.

`report` is int64 (2,) on the CPU. Compiled graphs use this op, which writes none of its arguments.
"""
torch.fx.has_side_effect(SEND_GRADIENT_AMAX)  # Compilers would drop it.


_STEP_LOCK = threading.Lock()
if hasattr(os, "register_at_fork"):
    # The child has none of the other threads; a lock that one of them held would stay locked.
    os.register_at_fork(
        before=_STEP_LOCK.acquire,
        after_in_parent=_STEP_LOCK.release,
        after_in_child=_STEP_LOCK.release,
    )


class _AdvanceStepArgs(NamedTuple):
    step: Written
    forward_only: bool = False
    counter: WrittenOptional = None


def _advance_fill(_: None, args: _AdvanceStepArgs) -> None:
    if args.forward_only and in_backward():
        return
    _check_tensors("advance_step_", torch.int64, step=(args.step, 1))
    if args.counter is None:
        args.step.data.add_(1)
        return
    _check_tensors("advance_step_", torch.int64, counter=(args.counter, 1))
    with _STEP_LOCK:
        args.counter.data.add_(1)
        args.step.data.copy_(args.counter)


ADVANCE_STEP = leaf_op("advance_step_", _AdvanceStepArgs, "()", no_outputs, _advance_fill)
"""Begin a new step: increment ``step`` or the shared ``counter``, and copy it to ``step``.

With ``forward_only``, do nothing where checkpointing calls a layer again during a backward pass.
"""
