"""The state of delayed scaling by native code: the numbers of torch's."""

from __future__ import annotations

import functools

import pytest
import torch

from qtensor.kernels.cpu import native, state
from qtensor.library import delayed

ops = torch.ops.qtensor
LARGEST = [448.0, 448.0, 57344.0]
SPECIAL = (0.0, 1e-45, 1e-38, 3e38, float("inf"), float("nan"), 1.0, 0.3)


@pytest.fixture(autouse=True)
def _native():
    if isinstance(native.library(), str):
        pytest.skip(reason="there is no compiler for the native kernels")


def given(rows, gradients, generator):
    """scale, history, steps, cell, cell_step of three tensors a group, with values of every
    kind.
    """
    n = 3 * gradients
    history = torch.rand(rows, n, generator=generator)
    special = torch.tensor(SPECIAL)
    cell = torch.rand(gradients, generator=generator)
    where = torch.randint(0, 4, (rows, n), generator=generator)
    chosen = special[torch.randint(0, len(SPECIAL), (rows, n), generator=generator)]
    history = torch.where(where == 0, chosen, history)
    if torch.rand((), generator=generator) < 0.3:
        cell[0] = special[int(torch.randint(0, len(SPECIAL), (), generator=generator))]
    steps = torch.randint(0, 4, (2,), generator=generator)
    cell_step = torch.randint(0, 4, (1,), generator=generator)
    return torch.rand(n, generator=generator) + 1, history, steps, cell, cell_step


def both(monkeypatch, name, call, tensors):
    """What an op returns and leaves behind, by native code and by torch's ops."""
    results = []
    for served in (True, False):
        with monkeypatch.context() as patch:
            if not served:
                patch.setattr(delayed.state, name, lambda *args: False)
            copies = [t.clone() for t in tensors]
            found = call(*copies)
            results.append([*(found or ()), *copies])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "gradients"), [(1, 1), (2, 1), (5, 2), (8, 1)])
def test_begin(monkeypatch, algorithm, length, gradients):
    generator = torch.Generator().manual_seed(length)
    largest = [value for value in LARGEST for _ in range(gradients)]
    for i in range(60):
        rest = (i % 7 != 0, length, algorithm, (0, 3, 140)[i % 3], largest)
        call = functools.partial(begin, torch.tensor([i % 4]), rest)
        both(monkeypatch, "begin_", call, given(8, gradients, generator))


def begin(step, rest, *tensors):
    return ops.delayed_begin_(*tensors, step, *rest)


def record(found, first, history):
    ops.record_amax_(history, found, first)


def record_gradient(found, ticket, cell, cell_step):
    ops.record_gradient_amax_(cell, cell_step, found, ticket)


def test_record(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    for _ in range(40):
        _, history, steps, cell, cell_step = given(4, 2, generator)
        found = [history[1, :1].clone(), history[2, 1:3].clone()]
        for first in (0, 1, 3):
            both(monkeypatch, "record_", functools.partial(record, found, first), [history])
        call = functools.partial(record_gradient, [history[3, :2].clone()], steps)
        both(monkeypatch, "record_gradient_", call, [cell, cell_step])


def test_what_native_code_leaves_to_torch():
    _, history, _, cell, cell_step = given(4, 1, torch.Generator())
    ticket = torch.tensor([1, 0])
    amax = [torch.rand(1)]
    assert not state.record_(history.t(), amax, 0)
    assert not state.record_(history.double(), amax, 0)
    assert not state.record_(history, amax * 4, 0), "more than there are columns"
    assert not state.record_gradient_(cell, cell_step.int(), amax, ticket)
    assert not state.record_gradient_(cell, cell_step, amax * 2, ticket)
    assert state.record_gradient_(cell, cell_step, amax, ticket)
    assert torch.equal(cell, amax[0]) or int(cell_step) > 1
