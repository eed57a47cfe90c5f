"""The table of fusions: each fires exactly on its pattern and gives the bytes of the operations by
themselves.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from ops_cases import BASIC, FUSED, ROWS, WIDTH, assert_same_steps, data, handing_over, step  # noqa: F401 - a fixture
from training import RECIPES, assert_same, every_recipe, region

import qtensor
from qtensor import QTensorError, ops
from qtensor.ops.fusions import FUSIONS

pytestmark = pytest.mark.usefixtures("handing_over")


def fused_steps(steps):
    return {type(s.op).__name__: (s.first, s.last) for s in steps if s.first != s.last}


def plan(sequence, x, extra):
    (group,) = sequence.groups
    return group.plan(x, extra)[0]


@pytest.mark.parametrize("name", FUSED)
def test_it_fires_on_its_pattern(name):
    fused = FUSED[name]
    x, extra = data().requires_grad_(), fused.case.extra(ROWS)
    found = plan(fused.case.make(), x, extra)
    assert fused_steps(found.forward) == fused.forward
    assert fused_steps(found.backward) == fused.backward
    alone = plan(fused.case.make(fuse=False), x, extra)
    assert not fused_steps(alone.forward)
    assert not fused_steps(alone.backward)


def test_every_fusion_of_the_table_has_a_case():
    builders = {entry.builder.__name__ for entry in FUSIONS}
    assert builders == {n for f in FUSED.values() for n in (*f.forward, *f.backward)}


@pytest.mark.parametrize(
    "build",
    [
        lambda: [ops.BasicLinear(WIDTH, WIDTH), ops.GELU()],
        lambda: [ops.Bias(WIDTH), ops.BasicLinear(WIDTH, WIDTH)],
        lambda: [ops.BasicLinear(WIDTH, WIDTH), ops.Identity(), ops.Bias(WIDTH)],
        lambda: [ops.RMSNorm(WIDTH), ops.MakeExtraOutput()],
        lambda: [ops.BasicLinear(WIDTH, WIDTH), ops.ConstantScale(2.0)],
        lambda: [ops.MakeExtraOutput(), ops.SiLU()],
    ],
)
def test_it_does_not_fire_beside_its_pattern(build):
    found = plan(ops.Sequential(*build()), data().requires_grad_(), [])
    assert not fused_steps(found.forward)
    assert not fused_steps(found.backward)


def test_a_subclass_is_left_alone():
    class Mine(ops.Bias):
        pass

    found = plan(ops.Sequential(ops.BasicLinear(WIDTH, 32), Mine(32)), data().requires_grad_(), [])
    assert not fused_steps(found.forward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUSED)
@every_recipe
def test_the_bytes_of_the_operations_by_themselves(name, recipe, dtype):
    case = FUSED[name].case
    fused, alone = case.make().to(dtype), case.make(fuse=False).to(dtype)
    for seed in range(2):
        x = data(dtype=dtype, seed=seed)
        assert_same_steps(alone, fused, x, RECIPES[recipe](), case.extra(ROWS), seed=seed)


@pytest.mark.parametrize("name", BASIC)
@every_recipe
def test_handing_over_changes_no_byte(name, recipe):
    case = BASIC[name]
    assert_same_steps(
        case.make(fuse=False), case.make(), data(), RECIPES[recipe](), case.extra(ROWS)
    )


def test_inference():
    for fused in FUSED.values():
        case = fused.case
        together, alone = case.make(), case.make(fuse=False)
        with torch.no_grad(), region(RECIPES["mxfp8"]()):
            extra = case.extra(ROWS)
            a, b = together(data(), *extra), alone(data(), *extra)
        for p, q in zip(
            torch.utils._pytree.tree_leaves(a), torch.utils._pytree.tree_leaves(b), strict=True
        ):
            assert torch.equal(p, q)
            assert p.grad_fn is None


# ---- fusions of users
# -----------------------------------------------------------------------------------


class Negate(ops.BasicOperation):
    def op_forward_compute(self, input, *, next_op_input_request=None):
        return -input, None

    def op_forward_save_ctx(self, ctx, input, returned):
        pass

    def op_backward(self, ctx, grad_output):
        return -grad_output, ()


class NegateTwice(ops.FusedOperation):
    """Forward and backward."""

    calls: ClassVar[list[str]] = []

    def __init__(self, basic_ops, recipe=None):
        super().__init__(basic_ops)

    def fuser_forward_compute(
        self, input, *, basic_op_extra_inputs, basic_op_kwargs, next_op_input_request=None
    ):
        self.calls.append("forward")
        return input.clone(), [(), ()], None

    def fuser_forward_save_ctx(self, basic_op_ctxs, input, returned, **kwargs):
        pass

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        self.calls.append("backward")
        return grad_output, [(), ()], [(), ()]


class OneWay(ops.FusedOperation):
    def __init__(self, basic_ops, recipe=None):
        super().__init__(basic_ops)


class ForwardTwice(OneWay):
    fuser_forward_compute = NegateTwice.fuser_forward_compute
    fuser_forward_save_ctx = NegateTwice.fuser_forward_save_ctx
    calls = NegateTwice.calls


class BackwardTwice(OneWay):
    fuser_backward = NegateTwice.fuser_backward
    calls = NegateTwice.calls


@pytest.mark.parametrize(
    ("register", "builder", "expected"),
    [
        (ops.register_forward_fusion, ForwardTwice, ["forward"]),
        (ops.register_backward_fusion, BackwardTwice, ["backward"]),
        (ops.register_forward_backward_fusion, NegateTwice, ["forward", "backward"]),
    ],
)
def test_fusions_of_users(register, builder, expected):
    NegateTwice.calls.clear()
    sequence = ops.Sequential(Negate(), Negate(), Negate())
    before = step(sequence, sequence, data(), None)
    assert not NegateTwice.calls
    register([Negate, Negate], builder)
    try:
        # The sequence has a plan, and it is created again.
        assert_same(step(sequence, sequence, data(), None), before)
        assert NegateTwice.calls == expected
    finally:
        ops.unregister_fusion(builder)
    NegateTwice.calls.clear()
    step(sequence, sequence, data(), None)
    assert not NegateTwice.calls


def test_a_builder_sees_the_recipe_and_may_decline():
    seen = []

    def builder(basic_ops, recipe):
        seen.append((len(basic_ops), None if recipe is None else type(recipe).__name__))

    ops.register_forward_fusion([ops.BasicLinear], builder)
    try:
        sequence = ops.Sequential(ops.BasicLinear(WIDTH, 32))
        sequence(data())
        with region(RECIPES["mxfp8"]()):
            sequence(data())
    finally:
        ops.unregister_fusion(builder)
    assert seen == [(1, None), (1, "MXFP8BlockScaling")]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            lambda basic_ops: 3,
            r"fusion at Negate \(operation 0\): a builder must return a FusedOperation or None",
        ),
        (lambda basic_ops: NegateTwice(basic_ops[:1]), "must replace exactly the operations"),
        (
            lambda basic_ops: NegateTwice([Negate(), Negate()]),
            "must replace exactly the operations",
        ),
        (
            lambda basic_ops: BackwardTwice(basic_ops),
            "a forward fusion needs an operation with a fused forward",
        ),
    ],
)
def test_results_of_builders_that_cannot_be_used(result, message):
    def builder(basic_ops, recipe):
        return result(basic_ops)

    ops.register_forward_fusion([Negate, Negate], builder)
    try:
        with pytest.raises(QTensorError, match=message):
            ops.Sequential(Negate(), Negate())(data())
    finally:
        ops.unregister_fusion(builder)


@pytest.mark.parametrize(
    ("pattern", "builder", "message"),
    [
        ([], NegateTwice, "a pattern must not be empty"),
        ([torch.nn.Linear], NegateTwice, "a pattern must consist of classes of basic operations"),
        ([Negate()], NegateTwice, "a pattern must consist of classes of basic operations"),
        ([Negate], 3, "the builder must be callable"),
    ],
)
def test_patterns_that_are_refused(pattern, builder, message):
    before = list(FUSIONS)
    with pytest.raises(QTensorError, match=message):
        ops.register_forward_fusion(pattern, builder)
    assert before == FUSIONS


def test_a_users_fusion_is_not_handed_quantized_tensors_it_does_not_ask_for():
    kinds = []

    class Watching(OneWay):
        def fuser_forward_compute(self, input, *, basic_op_kwargs, **kwargs):
            kinds.append(type(input))
            linear = self.basic_ops[0]
            out, returned = linear.op_forward_compute(input, **basic_op_kwargs[0])
            return out, [()], returned

        def fuser_forward_save_ctx(
            self, basic_op_ctxs, input, returned, *, basic_op_kwargs, **kwargs
        ):
            self.basic_ops[0].op_forward_save_ctx(
                basic_op_ctxs[0], input, returned, **basic_op_kwargs[0]
            )

    build = lambda: ops.Sequential(ops.RMSNorm(WIDTH), ops.BasicLinear(WIDTH, 32))  # noqa: E731
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    watched = build()
    ops.register_forward_fusion([ops.BasicLinear], Watching)
    try:
        ours = step(watched, watched, data(), qtensor.recipes.MXFP8BlockScaling())
    finally:
        ops.unregister_fusion(Watching)
    assert_same(ours, step(plain, plain, data(), qtensor.recipes.MXFP8BlockScaling()))
    assert kinds == [torch.Tensor]
