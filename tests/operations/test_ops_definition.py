"""Classes of operations: two forms of a forward, and what is refused when a class is defined."""

from __future__ import annotations

import pytest
import torch

from qtensor import QTensorError, ops
from qtensor.ops import BasicOperation, FusedOperation

BASES = {"op_": BasicOperation, "fuser_": FusedOperation}


def function(*args, **kwargs):
    """Stands for a method."""


def define(base, *names, parent=None):
    return type("Mine", (parent or base,), dict.fromkeys(names, function))


@pytest.mark.parametrize("prefix", BASES)
@pytest.mark.parametrize("half", ["forward_compute", "forward_save_ctx"])
def test_both_forms(prefix, half):
    names = f"{prefix}forward", f"{prefix}{half}"
    with pytest.raises(TypeError, match=f"Mine defines both {names[0]} and {names[1]}"):
        define(BASES[prefix], *names)


@pytest.mark.parametrize("prefix", BASES)
@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("forward_compute", "forward_save_ctx"),
        ("forward_save_ctx", "forward_compute"),
    ],
)
def test_half_of_a_pair(prefix, given, missing):
    with pytest.raises(TypeError, match=f"Mine defines {prefix}{given} but not {prefix}{missing}"):
        define(BASES[prefix], f"{prefix}{given}")


@pytest.mark.parametrize("prefix", BASES)
def test_half_of_a_pair_under_a_single_parent(prefix):
    parent = define(BASES[prefix], f"{prefix}forward")
    with pytest.raises(TypeError, match="but not"):
        define(None, f"{prefix}forward_compute", parent=parent)


@pytest.mark.parametrize("prefix", BASES)
def test_one_half_may_be_replaced_under_a_split_parent(prefix):
    pair = f"{prefix}forward_compute", f"{prefix}forward_save_ctx"
    parent = define(BASES[prefix], *pair)
    child = define(None, pair[0], parent=parent)
    assert getattr(child, f"{prefix}is_split") is True


@pytest.mark.parametrize("prefix", BASES)
def test_the_form_follows_the_last_class_that_says_so(prefix):
    pair = f"{prefix}forward_compute", f"{prefix}forward_save_ctx"
    split = define(BASES[prefix], *pair)
    single = define(None, f"{prefix}forward", parent=split)
    again = define(None, *pair, parent=single)
    plain = define(None, parent=single)
    forms = [getattr(c, f"{prefix}is_split") for c in (split, single, plain, again)]
    assert forms == [True, False, False, True]


def test_the_single_form_under_a_split_parent_is_what_runs():
    class Doubled(ops.ConstantScale):
        def op_forward(self, ctx, input, *, next_op_input_request=None):
            ctx.factor = 2.0
            return input * 2.0

        def op_backward(self, ctx, grad_output):
            return grad_output * ctx.factor, ()

    x = torch.ones(2, 3, requires_grad=True)
    y = ops.Sequential(Doubled(5.0))(x)
    y.sum().backward()
    assert torch.equal(y, torch.full((2, 3), 2.0))
    assert torch.equal(x.grad, torch.full((2, 3), 2.0))


@pytest.mark.parametrize("missing", ["forward", "backward"])
def test_an_operation_that_lacks_a_function(missing):
    def compute(self, input, **kwargs):
        return input * 2, None

    pair = {"op_forward_compute": compute, "op_forward_save_ctx": function}
    Half = type("Half", (BasicOperation,), pair if missing == "backward" else {})
    x = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(
        QTensorError, match=r"Half \(operation 0\): a basic operation must define op_"
    ):
        ops.Sequential(Half())(x).sum().backward()


def test_save_ctx_sees_inputs_arguments_and_what_compute_returned():
    seen = []

    class Probe(BasicOperation):
        def forward_kwargs(self, like, input_requires_grad):
            return {"number": 7}

        def op_forward_compute(self, input, *, number, next_op_input_request=None):
            return input + number, "returned"

        def op_forward_save_ctx(self, *args, **kwargs):
            seen.append((args[1:], kwargs))

        def op_backward(self, ctx, grad_output):
            return grad_output, ()

    x = torch.ones(2, 3, requires_grad=True)
    ops.Sequential(Probe())(x)
    ((args, kwargs),) = seen
    assert [*map(type, args)] == [torch.Tensor, str]
    assert kwargs == {"number": 7}
    with torch.no_grad():
        ops.Sequential(Probe())(x)
    assert len(seen) == 1
