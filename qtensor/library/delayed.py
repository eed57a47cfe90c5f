"""Ops on the state of delayed scaling, which is the caller's, as tensors.

A state has n columns, one a tensor that is quantized: those of the forward pass first, then the gradients. It is written by
both passes, each to tensors of its own, so that a graph of one never writes what the other saved:

- forward: ``scale`` (n,) float32, ``history`` (rows, n) float32, ``steps`` (2,) int64 on the CPU: the step that the state
  stands at, and the step of the last gradient maximum that went into the history;
- backward: ``cell`` (g,) float32, the maxima of the gradients since then, and ``cell_step`` (1,) int64 on the CPU.

The bookkeeping is on the CPU, so that a GPU is never waited for.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.kernels.cpu import state
from qtensor.library.define import below_autograd, leaf_op, no_outputs
from qtensor.reference.float8 import delayed_scale, roll_history


def _merged(history: Tensor, steps: Tensor, cell: Tensor, cell_step: Tensor, length: int) -> Tensor:
    """The rows in use, with the maxima of the gradients in row 0."""
    rows = history[:length].clone()
    if int(cell_step) > int(steps[1]):
        gradients = rows[0, rows.shape[1] - cell.numel() :]
        torch.maximum(gradients, cell, out=gradients)
    return rows


class MergedHistoryArgs(NamedTuple):
    """Arguments of the op ``merged_history``."""

    history: Tensor
    steps: Tensor
    cell: Tensor
    cell_step: Tensor
    length: int


def _merged_alloc(args: MergedHistoryArgs) -> Tensor:
    return torch.empty(
        args.length, args.history.shape[1], dtype=torch.float32, device=args.history.device
    )


def _merged_fill(out: Tensor, args: MergedHistoryArgs) -> None:
    out.copy_(_merged(*args))


MERGED_HISTORY = leaf_op(
    "merged_history(Tensor history, Tensor steps, Tensor cell, Tensor cell_step, int length) -> Tensor",
    MergedHistoryArgs,
    _merged_alloc,
    _merged_fill,
)
"""The history (length, n) that the next factors come from, for algorithms that are the caller's."""


class DelayedBeginArgs(NamedTuple):
    """Arguments of the op ``delayed_begin_``."""

    scale: Tensor
    history: Tensor
    steps: Tensor
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


def _begin_alloc(args: DelayedBeginArgs) -> tuple[Tensor, Tensor]:
    return torch.empty_like(args.scale), torch.empty_like(args.steps)


def _begin_fill(outputs: tuple[Tensor, Tensor], args: DelayedBeginArgs) -> None:
    rows, new_scale = args.rows, args.new_scale
    if rows is None and new_scale is None:
        tensors = (args.scale, args.history, args.steps, args.cell, args.cell_step, args.step)
        if state.begin_(
            outputs, tensors, args.advance, (args.length, args.algorithm, args.margin), args.largest
        ):
            return
    with below_autograd():
        now = int(args.step)
        if args.advance and now != int(args.steps[0]):
            if rows is None:
                rows = _merged(args.history, args.steps, args.cell, args.cell_step, args.length)
            if new_scale is None:
                new_scale = _new_scale(rows, args.scale, args.algorithm, args.margin, args.largest)
            # Through .data: the version of what a graph saved must not move.
            args.scale.data.copy_(new_scale)
            args.history.data[: args.length].copy_(roll_history(rows))
            args.steps.data[1] = max(int(args.cell_step), int(args.steps[1]))
            args.steps.data[0] = now
        outputs[0].copy_(args.scale)
        outputs[1].copy_(args.steps)


def _new_scale(
    rows: Tensor, scale: Tensor, algorithm: str, margin: int, largest: list[float]
) -> Tensor:
    amax = rows.amax(0) if algorithm == "max" else rows[0]
    columns = [
        delayed_scale(amax[i : i + 1], scale[i : i + 1], margin, value)
        for i, value in enumerate(largest)
    ]
    return torch.cat(columns)


DELAYED_BEGIN = leaf_op(
    "delayed_begin_(Tensor(a!) scale, Tensor(b!) history, Tensor(c!) steps, Tensor cell, Tensor cell_step, Tensor step, "
    "bool advance, int length, str algorithm, int margin, float[] largest, Tensor? rows=None, Tensor? new_scale=None) -> (Tensor scales, Tensor ticket)",
    DelayedBeginArgs,
    _begin_alloc,
    _begin_fill,
)
"""At the first call of a step (``step``, int64 (1,) on the CPU; only with ``advance``) roll the history and renew the factors. Returns the factors
to use, (n,), and a ticket (2,) for ``record_gradient_amax_``: tensors of this call, which no later one writes. ``rows``
replaces the merged history, ``new_scale`` (n,) what the algorithm would compute."""


class RecordAmaxArgs(NamedTuple):
    """Arguments of the op ``record_amax_``."""

    history: Tensor
    amax: list[Tensor]
    first: int


def _record_fill(_: None, args: RecordAmaxArgs) -> None:
    if state.record_(args.history, args.amax, args.first):
        return
    with below_autograd():
        found = torch.cat(args.amax)
        row = args.history.data[0, args.first : args.first + found.numel()]
        torch.maximum(row, found, out=row)


RECORD_AMAX = leaf_op(
    "record_amax_(Tensor(a!) history, Tensor[] amax, int first) -> ()",
    RecordAmaxArgs,
    no_outputs,
    _record_fill,
)
"""``history[0, first:] = max(history[0, first:], amax)``; each amax (1,), or those of several tensors side by side."""


class RecordGradientAmaxArgs(NamedTuple):
    """Arguments of the op ``record_gradient_amax_``."""

    cell: Tensor
    cell_step: Tensor
    amax: list[Tensor]
    ticket: Tensor


def _record_gradient_fill(_: None, args: RecordGradientAmaxArgs) -> None:
    if state.record_gradient_(args.cell, args.cell_step, args.amax, args.ticket):
        return
    with below_autograd():
        step, consumed = int(args.ticket[0]), int(args.ticket[1])
        found = torch.cat(args.amax)
        if int(args.cell_step) > consumed:
            found = torch.maximum(args.cell, found)
        args.cell.data.copy_(found)
        args.cell_step.data.fill_(max(step, int(args.cell_step)))


RECORD_GRADIENT_AMAX = leaf_op(
    "record_gradient_amax_(Tensor(a!) cell, Tensor(b!) cell_step, Tensor[] amax, Tensor ticket) -> ()",
    RecordGradientAmaxArgs,
    no_outputs,
    _record_gradient_fill,
)
"""Keep the maxima of gradients, (1,) or several side by side, for the next step; those that the history has are overwritten."""


_STEP_LOCK = threading.Lock()


class AdvanceStepArgs(NamedTuple):
    """Arguments of the op ``advance_step_``."""

    step: Tensor
    forward_only: bool = False
    counter: Tensor | None = None


def _advance_fill(_: None, args: AdvanceStepArgs) -> None:
    if args.forward_only and torch._C._current_graph_task_id() != -1:
        return
    if args.counter is None:
        args.step.data.add_(1)
        return
    with _STEP_LOCK:
        args.counter.data.add_(1)
        args.step.data.copy_(args.counter)


ADVANCE_STEP = leaf_op(
    "advance_step_(Tensor(a!) step, bool forward_only=False, Tensor(b!)? counter=None) -> ()",
    AdvanceStepArgs,
    no_outputs,
    _advance_fill,
)
"""Begin a new step: add 1 to ``step``, or to ``counter``, which threads share, and copy it to ``step``.

With ``forward_only``, do nothing where checkpointing calls a layer again during a backward pass.
"""
