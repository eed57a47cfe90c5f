"""Calls of the ops on the state of delayed scaling, for opcheck."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from formats import FormatCase
from torch import Tensor

Sample = tuple[tuple[Any, ...], dict[str, Any]]


def delayed_state() -> tuple[Tensor, ...]:
    """Return scale, history, steps, cell and cell_step of three tensors; the history holds
    maxima."""
    steps, cell_step = torch.tensor([3, 2]), torch.tensor([3])
    return torch.rand(3) + 1, torch.rand(8, 3), steps, torch.rand(1), cell_step


def merged_history(case: FormatCase) -> Iterator[Sample]:
    _, history, *rest = delayed_state()
    yield (history, *rest, 4), {}


def delayed_begin_(case: FormatCase) -> Iterator[Sample]:
    largest = [448.0, 448.0, 57344.0]
    for step, advance in ((4, True), (3, True), (4, False)):
        call = (torch.tensor([step]), advance, 4, "max", 0, largest)
        yield (*delayed_state(), *call), {}
    yield (*delayed_state(), *call), {"report": torch.tensor([-1, 0]), "kept": True}
    yield (*delayed_state(), *call), {"rows": torch.rand(4, 3), "new_scale": torch.rand(3)}


def delayed_read(case: FormatCase) -> Iterator[Sample]:
    scale, _, steps, *_ = delayed_state()
    yield (scale, steps, torch.tensor([-1, 0])), {}


def record_amax_(case: FormatCase) -> Iterator[Sample]:
    yield (torch.rand(8, 3), [torch.rand(1), torch.rand(1)], 0), {}
    yield (torch.rand(8, 3), [torch.rand(1)], 1), {}


def record_gradient_amax_(case: FormatCase) -> Iterator[Sample]:
    for step, consumed in ((3, 2), (4, 3)):
        ticket = torch.tensor([step, consumed])
        yield (torch.rand(1), torch.tensor([3]), [torch.rand(1)], ticket), {}


def send_gradient_amax_(case: FormatCase) -> Iterator[Sample]:
    yield (torch.tensor([-1, 0]), [torch.rand(1)], torch.tensor([3, 2])), {}


def advance_step_(case: FormatCase) -> Iterator[Sample]:
    yield (torch.zeros(1, dtype=torch.int64),), {}
    yield (torch.zeros(1, dtype=torch.int64), False, torch.tensor([7])), {}
