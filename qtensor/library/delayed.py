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

import torch
from torch import Tensor

from qtensor.kernels.cpu import state
from qtensor.library.define import below_autograd, leaf_op
from qtensor.reference.float8 import delayed_scale, roll_history


def _merged(history: Tensor, steps: Tensor, cell: Tensor, cell_step: Tensor, length: int) -> Tensor:
    """The rows in use, with the maxima of the gradients in row 0."""
    rows = history[:length].clone()
    if int(cell_step) > int(steps[1]):
        gradients = rows[0, rows.shape[1] - cell.numel() :]
        torch.maximum(gradients, cell, out=gradients)
    return rows


def _merged_alloc(
    history: Tensor, steps: Tensor, cell: Tensor, cell_step: Tensor, length: int
) -> Tensor:
    return torch.empty(length, history.shape[1], dtype=torch.float32, device=history.device)


MERGED_HISTORY = leaf_op(
    "merged_history(Tensor history, Tensor steps, Tensor cell, Tensor cell_step, int length) -> Tensor",
    _merged_alloc,
    lambda out, *args: out.copy_(_merged(*args)),
)
"""The history (length, n) that the next factors come from, for algorithms that are the caller's."""


def _begin_alloc(
    scale: Tensor, history: Tensor, steps: Tensor, *args: object
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(scale), torch.empty_like(steps)


def _begin_fill(
    outputs: tuple[Tensor, Tensor],
    scale: Tensor,
    history: Tensor,
    steps: Tensor,
    cell: Tensor,
    cell_step: Tensor,
    step: Tensor,
    advance: bool,
    length: int,
    algorithm: str,
    margin: int,
    largest: list[float],
    rows: Tensor | None = None,
    new_scale: Tensor | None = None,
) -> None:
    if rows is None and new_scale is None:
        tensors = (scale, history, steps, cell, cell_step, step)
        if state.begin_(outputs, tensors, advance, (length, algorithm, margin), largest):
            return
    with below_autograd():
        now = int(step)
        if advance and now != int(steps[0]):
            if rows is None:
                rows = _merged(history, steps, cell, cell_step, length)
            if new_scale is None:
                new_scale = _new_scale(rows, scale, algorithm, margin, largest)
            # Through .data: the version of what a graph saved must not move.
            scale.data.copy_(new_scale)
            history.data[:length].copy_(roll_history(rows))
            steps.data[1] = max(int(cell_step), int(steps[1]))
            steps.data[0] = now
        outputs[0].copy_(scale)
        outputs[1].copy_(steps)


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
    _begin_alloc,
    _begin_fill,
)
"""At the first call of a step (``step``, int64 (1,) on the CPU; only with ``advance``) roll the history and renew the factors. Returns the factors
to use, (n,), and a ticket (2,) for ``record_gradient_amax_``: tensors of this call, which no later one writes. ``rows``
replaces the merged history, ``new_scale`` (n,) what the algorithm would compute."""


def _record_fill(_: None, history: Tensor, amax: list[Tensor], first: int) -> None:
    if state.record_(history, amax, first):
        return
    with below_autograd():
        found = torch.cat(amax)
        row = history.data[0, first : first + found.numel()]
        torch.maximum(row, found, out=row)


RECORD_AMAX = leaf_op(
    "record_amax_(Tensor(a!) history, Tensor[] amax, int first) -> ()",
    lambda *args, **kwargs: None,
    _record_fill,
)
"""``history[0, first:] = max(history[0, first:], amax)``; each amax (1,), or those of several tensors side by side."""


def _record_gradient_fill(
    _: None, cell: Tensor, cell_step: Tensor, amax: list[Tensor], ticket: Tensor
) -> None:
    if state.record_gradient_(cell, cell_step, amax, ticket):
        return
    with below_autograd():
        step, consumed = int(ticket[0]), int(ticket[1])
        found = torch.cat(amax)
        if int(cell_step) > consumed:
            found = torch.maximum(cell, found)
        cell.data.copy_(found)
        cell_step.data.fill_(max(step, int(cell_step)))


RECORD_GRADIENT_AMAX = leaf_op(
    "record_gradient_amax_(Tensor(a!) cell, Tensor(b!) cell_step, Tensor[] amax, Tensor ticket) -> ()",
    lambda *args, **kwargs: None,
    _record_gradient_fill,
)
"""Keep the maxima of gradients, (1,) or several side by side, for the next step; those that the history has are overwritten."""


_STEP_LOCK = threading.Lock()


def _advance_fill(
    _: None, step: Tensor, forward_only: bool = False, counter: Tensor | None = None
) -> None:
    if forward_only and torch._C._current_graph_task_id() != -1:
        return
    if counter is None:
        step.data.add_(1)
        return
    with _STEP_LOCK:
        counter.data.add_(1)
        step.data.copy_(counter)


ADVANCE_STEP = leaf_op(
    "advance_step_(Tensor(a!) step, bool forward_only=False, Tensor(b!)? counter=None) -> ()",
    lambda *args, **kwargs: None,
    _advance_fill,
)
"""Begin a new step: add 1 to ``step``, or to ``counter``, which threads share, and copy it to ``step``.

With ``forward_only``, do nothing where checkpointing calls a layer again during a backward pass.
"""
