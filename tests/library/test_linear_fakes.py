"""Forward and backward on fake tensors have the layouts of real ones, slot for slot: one
implementation serves both.
"""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from training import RECIPES

from qtensor.functional.linear.args import DelayedCall, LinearBwdArgs, LinearFwdArgs
from qtensor.functional.linear.layer_plan import linear_plan
from qtensor.functional.linear.linear_function import (
    linear_backward,
    linear_forward_impl,
    linear_setup_ctx,
    restored,
)
from qtensor.functional.operands import draw_seeds


def layout(value):
    """Shape, dtype and strides of each tensor; other values as they are."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.stride(), value.device
    if isinstance(value, (list, tuple)):
        return [layout(v) for v in value]
    return {k: layout(v) for k, v in value.items()} if isinstance(value, dict) else value


def run(shape, features, dtype, recipe, override, flags, saves_input):
    """What forward returns, what is saved, and the gradients."""
    dgrad, wgrad, bias = flags
    chosen = RECIPES[recipe]()
    key = ""
    if chosen is not None:
        chosen.backward_override = override
        key = chosen.key
    plan = linear_plan(key, "linear", "", dgrad, wgrad)
    inp = torch.randn(*shape, features[0], dtype=dtype)
    weight = torch.randn(features[1], features[0], dtype=dtype)
    args = LinearFwdArgs(inp, weight, torch.randn(features[1], dtype=dtype) if bias else None)
    args.inp_requires_grad, args.weight_requires_grad, args.bias_requires_grad = flags
    args.plan, args.dtype = plan, dtype
    args.cache_weight = True
    args.save_original_input = saves_input and recipe != "delayed"
    if any(plan.stochastic):
        args.seeds = draw_seeds(inp, torch.zeros(1, dtype=torch.int64), plan.stochastic)
    if any(plan.delayed):
        args.delayed = DelayedCall(
            torch.ones(3),
            torch.tensor([1, 0]),
            torch.zeros(1),
            torch.zeros(1, dtype=torch.int64),
        )
    result = linear_forward_impl(args)
    bwd = LinearBwdArgs()
    saved = linear_setup_ctx(bwd, args, result)
    grads = linear_backward(restored(bwd, saved, torch.ones_like(result.out)))
    return [*result, saved, grads]


def tensors(value):
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor)]


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    features=st.tuples(st.sampled_from([32, 64, 160]), st.sampled_from([32, 96, 128])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    recipe=st.sampled_from(list(RECIPES)),
    override=st.sampled_from([None, None, "high_precision", "dequantized"]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    saves_input=st.booleans(),
)
def test_fakes_have_the_layouts_of_real_tensors(
    shape, features, dtype, recipe, override, flags, saves_input
):
    arguments = (shape, features, dtype, recipe, override, flags, saves_input)
    real = run(*arguments)
    with FakeTensorMode():
        fake = run(*arguments)
    assert layout(real) == layout(fake)
    made = tensors(fake)
    assert made
    assert all(isinstance(t, FakeTensor) for t in made)
    assert not any(isinstance(t, FakeTensor) for t in tensors(real))


def test_arguments_are_never_written_to_and_refuse_a_typo():
    args = LinearFwdArgs(torch.randn(4, 32), torch.randn(32, 32))
    args.inp_requires_grad = args.weight_requires_grad = True
    args.plan = linear_plan(RECIPES["mxfp8"]().key, "linear", "", True, True)
    before = {name: getattr(args, name) for name in LinearFwdArgs.__slots__}
    result = linear_forward_impl(args)
    bwd = LinearBwdArgs()
    saved = linear_setup_ctx(bwd, args, result)
    assert all(getattr(args, name) is before[name] for name in LinearFwdArgs.__slots__)
    held = {name: getattr(bwd, name) for name in LinearBwdArgs.__slots__}
    linear_backward(restored(bwd, saved, torch.ones(4, 32)))
    assert all(getattr(bwd, name) is held[name] for name in LinearBwdArgs.__slots__)
    assert not any(isinstance(value, Tensor) for value in held.values())
    for value in (args, bwd):
        try:
            value.wait = None
        except AttributeError:
            continue
        raise AssertionError("a field that does not exist was set")


def test_tensors_that_are_inputs_are_named_and_not_returned():
    x, w = torch.randn(4, 32), torch.randn(32, 32)
    args = LinearFwdArgs(x, w)
    args.inp_requires_grad = args.weight_requires_grad = True
    result = linear_forward_impl(args)
    assert result.tensors_to_save == [None, None]
    assert result.saved.input == ("", (4, 32), 1, True)
    assert result.saved.weight == ("", (32, 32), 1, True)
    saved = linear_setup_ctx(LinearBwdArgs(), args, result)
    assert saved[0] is x
    assert saved[1] is w
