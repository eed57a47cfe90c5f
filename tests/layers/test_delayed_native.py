"""The state of delayed scaling by native code: the numbers of torch's."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch

import qtensor
from qtensor.kernels.cpu import native
from qtensor.library import native_ops
from qtensor.library.define import FILLS

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
    """What an op returns and leaves behind, in C++ and by torch's ops."""
    results = []
    for in_cpp in (native_ops.library() is not None, False):
        with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
            if in_cpp:
                patch.setitem(FILLS, name, refuse)
            else:
                stack.enter_context(native_ops.left_to_python())
            copies = [t.clone() for t in tensors]
            found = call(*copies)
            results.append([*(found or ()), *copies])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def refuse(*args):
    raise AssertionError("the Python kernel")


def test_a_step_is_counted_without_python(monkeypatch):
    step, counter = torch.zeros(1, dtype=torch.int64), torch.tensor([7])
    ops.advance_step_(step)
    if native_ops.library() is None:
        pytest.skip(reason="no compiler, or a torch without its headers")
    with monkeypatch.context() as patch:
        patch.setitem(FILLS, "advance_step_", refuse)
        ops.advance_step_(step, True)
        assert int(step) == 2
        ops.advance_step_(step, False, counter)
        assert (int(step), int(counter)) == (8, 8)
        with pytest.raises(AssertionError, match="the Python kernel"):
            ops.advance_step_(torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "gradients"), [(1, 1), (2, 1), (5, 2), (8, 1)])
def test_begin(monkeypatch, algorithm, length, gradients):
    generator = torch.Generator().manual_seed(length)
    largest = [value for value in LARGEST for _ in range(gradients)]
    for i in range(60):
        rest = (i % 7 != 0, length, algorithm, (0, 3, 140)[i % 3], largest)
        call = functools.partial(begin, torch.tensor([i % 4]), rest)
        both(monkeypatch, "delayed_begin_", call, given(8, gradients, generator))


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
            both(monkeypatch, "record_amax_", functools.partial(record, found, first), [history])
        call = functools.partial(record_gradient, [history[3, :2].clone()], steps)
        both(monkeypatch, "record_gradient_amax_", call, [cell, cell_step])


def state_of(**changes):
    """The arguments of `delayed_begin_` for three tensors, with changes."""
    arguments = {
        "scale": torch.ones(3),
        "history": torch.ones(4, 3),
        "steps": torch.tensor([0, 0]),
        "cell": torch.ones(1),
        "cell_step": torch.tensor([1]),
        "step": torch.tensor([1]),
        "advance": True,
        "length": 4,
        "algorithm": "max",
        "margin": 0,
        "largest": LARGEST,
    }
    return list((arguments | changes).values())


EMPTY = torch.zeros(0, dtype=torch.int64)
BEGIN = {
    "scale too short": ({"scale": torch.ones(2)}, "scale must be a vector of 3 elements"),
    "scale not a vector": ({"scale": torch.ones(3, 1)}, "scale must be a vector"),
    "scale dtype": ({"scale": torch.ones(3).double()}, "scale must be torch.float32"),
    "history not a matrix": ({"history": torch.ones(12)}, "history must be a matrix"),
    "history too short": ({"history": torch.ones(2, 3)}, "length must be from 1 to the 2 rows"),
    "history without rows": ({"history": torch.ones(0, 3)}, "length must be from 1 to the 0 rows"),
    "history dtype": ({"history": torch.ones(4, 3).half()}, "history must be torch.float32"),
    "steps too short": ({"steps": torch.tensor([0])}, "steps must be a vector of 2 elements"),
    "steps dtype": ({"steps": torch.tensor([0.0, 0.0])}, "steps must be torch.int64"),
    "cell too wide": ({"cell": torch.full((1 << 20,), 7.0)}, "cell must be a vector of at most 3"),
    "cell dtype": ({"cell": torch.ones(1).int()}, "cell must be torch.float32"),
    "cell_step empty": ({"cell_step": EMPTY}, "cell_step must be a vector of 1 elements"),
    "step empty": ({"step": EMPTY}, "step must be a vector of 1 elements"),
    "step dtype": ({"step": torch.tensor([1.0])}, "step must be torch.int64"),
    "steps of two dims": ({"steps": torch.tensor([[0, 0]])}, "steps must be a vector of 2"),
    "step of two dims": ({"step": torch.tensor([[1]])}, "step must be a vector of 1 elements"),
    "length zero": ({"length": 0}, "length must be from 1 to the 4 rows"),
    "length negative": ({"length": -1}, "length must be from 1 to the 4 rows"),
    "algorithm": ({"algorithm": "mean"}, "algorithm must be one of max, most_recent"),
    "margin": ({"margin": 1 << 20}, "margin must be from -1000 to 1000"),
    "largest too short": ({"largest": [448.0]}, "largest must have 3 finite float32 numbers"),
    "largest not finite": (
        {"largest": [448.0, float("nan"), 448.0]},
        "largest must have 3 finite float32",
    ),
    "largest too large": ({"largest": [1e300, 1.0, 1.0]}, "largest must have 3 finite float32"),
}


def is_refused(op, arguments, told):
    """The op raises our error, and every tensor is as it was."""
    tensors = [t for a in arguments for t in (a if isinstance(a, list) else [a])]
    tensors = [t for t in tensors if isinstance(t, torch.Tensor) and not t.is_meta]
    before = [t.clone() for t in tensors]
    with pytest.raises(qtensor.QTensorError, match=told):
        op(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize(("change", "told"), BEGIN.values(), ids=BEGIN)
def test_begin_checks_the_state(change, told):
    is_refused(ops.delayed_begin_, state_of(**change), told)


MERGED = {name: case for name, case in BEGIN.items() if name.split()[0] in ("history", "steps")}


@pytest.mark.parametrize(("change", "told"), MERGED.values(), ids=MERGED)
def test_merged_history_checks_the_state(change, told):
    _, history, steps, cell, cell_step, _, _, length, *_ = state_of(**change)
    is_refused(ops.merged_history, [history, steps, cell, cell_step, length], told)


RECORD = {
    "in front of the row": (torch.ones(4, 3), [torch.ones(1)], -3, "must fit .* first=-3"),
    "far in front": (torch.ones(4, 3), [torch.ones(1)], -(1 << 28), "must fit into the 3 columns"),
    "behind the row": (torch.ones(4, 3), [torch.ones(2)], 2, "the 2 maxima must fit"),
    "no maxima": (torch.ones(4, 3), [], 4, "the 0 maxima must fit"),
    "no rows": (torch.zeros(0, 3), [torch.ones(1)], 0, "from 1 to the 0 rows"),
    "a vector": (torch.zeros(3), [torch.ones(1)], 0, "history must be a matrix"),
    "history dtype": (
        torch.zeros(4, 3).half(),
        [torch.ones(1)],
        0,
        "history must be torch.float32",
    ),
    "amax dtype": (torch.zeros(4, 3), [torch.ones(1).double()], 0, "each amax must be a float32"),
    "amax of two dims": (torch.ones(4, 3), [torch.ones(1, 1)], 0, "each amax must be a float32"),
    "amax of two dims in columns": (
        torch.ones(4, 3).t(),
        [torch.ones(1, 1)],
        0,
        "each amax must be a float32",
    ),
}


@pytest.mark.parametrize(("history", "amax", "first", "told"), RECORD.values(), ids=RECORD)
def test_record_checks_the_history(history, amax, first, told):
    is_refused(ops.record_amax_, [history, amax, first], told)


def test_record_of_a_part_of_a_tensor_stays_inside():
    history = torch.zeros(4, 8)
    is_refused(ops.record_amax_, [history[1:], [torch.ones(1)], -3], "must fit")
    assert history.sum() == 0


TICKET = torch.tensor([1, 0])
RECORD_GRADIENT = {
    "ticket empty": (
        torch.ones(1),
        TICKET[:1],
        [torch.ones(1)],
        EMPTY,
        "ticket must be a vector of 2",
    ),
    "step empty": (
        torch.ones(1),
        EMPTY,
        [torch.ones(1)],
        TICKET,
        "cell_step must be a vector of 1",
    ),
    "cell too short": (
        torch.ones(1),
        TICKET[:1],
        [torch.ones(2)],
        TICKET,
        "cell must be a vector of 2",
    ),
    "cell too long": (
        torch.ones(3),
        TICKET[:1],
        [torch.ones(2)],
        TICKET,
        "cell must be a vector of 2",
    ),
    "no maxima": (torch.ones(1), TICKET[:1], [], TICKET, "cell must be a vector of 0"),
    "amax of two dims": (
        torch.ones(1),
        TICKET[:1],
        [torch.ones(1, 1)],
        TICKET,
        "each amax must be a float32",
    ),
    "cell of two dims": (
        torch.ones(1, 1),
        TICKET[:1],
        [torch.ones(1)],
        TICKET,
        "cell must be a vector of 1",
    ),
    "ticket of two dims": (
        torch.ones(1),
        TICKET[:1],
        [torch.ones(1)],
        TICKET[None],
        "ticket must be a vector of 2",
    ),
    "cell dtype": (
        torch.ones(1).int(),
        TICKET[:1],
        [torch.ones(1)],
        TICKET,
        "must be torch.float32",
    ),
    "ticket dtype": (
        torch.ones(1),
        TICKET[:1],
        [torch.ones(1)],
        torch.ones(2),
        "must be torch.int64",
    ),
}


@pytest.mark.parametrize(
    ("cell", "cell_step", "amax", "ticket", "told"), RECORD_GRADIENT.values(), ids=RECORD_GRADIENT
)
def test_record_gradient_checks_sizes(cell, cell_step, amax, ticket, told):
    is_refused(ops.record_gradient_amax_, [cell, cell_step, amax, ticket], told)


@pytest.mark.parametrize("name", ["step", "counter"])
def test_advance_checks_its_counters(name):
    arguments = {"step": torch.tensor([1]), "forward_only": False, "counter": torch.tensor([1])}
    arguments[name] = torch.tensor([[1]])
    is_refused(ops.advance_step_, list(arguments.values()), f"{name} must be a vector of 1")
