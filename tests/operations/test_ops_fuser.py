"""The fuser: plans, partial backward, extra tensors and channels, saved tensors, and errors."""

from __future__ import annotations

import copy
import functools
import gc
import io
import weakref

import pytest
import torch
from ops_cases import FUSED, WIDTH, Case, data, handing_over, step  # noqa: F401 - a fixture
from torch import nn
from training import RECIPES, assert_same, region

import qtensor
from qtensor import QTensorError, ops, recipes

pytestmark = pytest.mark.usefixtures("handing_over")

MLP = FUSED["mlp"].case


def plans(sequence):
    (group,) = sequence.groups
    return len(group.plan_names)


# ---- plans
# ----------------------------------------------------------------------------------------------


def test_a_plan_for_each_recipe_option_and_mode():
    sequence, x = MLP.make(), data()
    recipe = recipes.MXFP8BlockScaling()
    counts = []

    def run(chosen, grad=True):
        with torch.set_grad_enabled(grad), region(chosen):
            sequence(x)
        counts.append(plans(sequence))

    run(None)
    run(None)
    run(recipe)
    run(recipes.MXFP8BlockScaling())
    recipe.scale_mode = "floor"
    run(recipe)
    run(recipe, grad=False)
    run(None)
    assert counts == [1, 1, 2, 2, 3, 4, 4]


def test_options_changed_within_a_recipe_take_effect():
    sequence, recipe = MLP.make(), recipes.MXFP8BlockScaling()
    before = step(sequence, sequence, data(), recipe)
    recipe.scale_mode = "floor"
    after = step(sequence, sequence, data(), recipe)
    assert not torch.equal(before[0], after[0])
    assert_same(after, step(MLP.make(), MLP.make(), data(), recipe)[:2] + after[2:])


def test_frozen_operations_at_the_start_take_no_part_in_backward():
    whole, part = FUSED["mlp_with_biases"].case.make(), FUSED["mlp_with_biases"].case.make()
    expected = step(whole, whole, data(), RECIPES["mxfp8"]())
    for op in part[:3]:
        op.requires_grad_(False)
    x, saved = data(), []
    with (
        region(RECIPES["mxfp8"]()),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        y = part(x)
    (y * torch.linspace(-1, 1, WIDTH)).sum().backward()
    assert x.grad is None
    # Norm, fc1 and its bias come first among the parameters.
    found = [p.grad for p in part.parameters() if p.grad is not None]
    assert_same([y.detach(), *found], [expected[0], *expected[-2:]])
    (group,) = part.groups
    plan, first = group.plan(x, [])
    assert first == 5
    assert {s.first for s in plan.backward} == {5, 6, 7}
    # The columnwise codes and factors of fc2's input, and nothing of dgrad.
    quantizer = qtensor.quantizer("mxfp8", rowwise=False, columnwise=True)
    assert sum(t.nbytes for t in saved) == sum(
        b.nbytes for b in quantizer(torch.ones(40, 96)).buffers()
    )


def test_no_gradient_at_all():
    sequence = MLP.make().requires_grad_(False)
    assert sequence(data()).grad_fn is None
    sequence = MLP.make()
    with torch.no_grad():
        assert sequence(data()).grad_fn is None


def test_retain_graph():
    sequence, x = MLP.make(), data().requires_grad_()
    with region(RECIPES["nvfp4"]()):
        y = sequence(x).sum()
    y.backward(retain_graph=True)
    first = [x.grad.clone(), *[p.grad.clone() for p in sequence.parameters()]]
    x.grad = None
    sequence.zero_grad()
    y.backward()
    assert_same([x.grad, *[p.grad for p in sequence.parameters()]], first)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_double_backward_is_refused():
    x = data().requires_grad_()
    (g,) = torch.autograd.grad(MLP.make()(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


def test_saved_tensors_are_freed_after_backward():
    kept = []
    sequence, x = MLP.make(), data().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(weakref.ref(t)) or t, lambda t: t
    ):
        y = sequence(x)
    y.sum().backward()
    gc.collect()
    # The input and the parameters live on, and views of them.
    own = {t.untyped_storage().data_ptr() for t in (x, *sequence.parameters())}
    alive = [t for ref in kept if (t := ref()) is not None]
    assert kept
    assert [t.shape for t in alive if t.untyped_storage().data_ptr() not in own] == []


def test_saved_bytes_are_those_that_explain_tells():
    for name in ("mxfp8", "nvfp4", "high_precision"):
        sequence, saved, x = MLP.make(), {}, data().requires_grad_()
        own = {p.data_ptr() for p in sequence.parameters()}
        with (
            region(RECIPES[name]()),
            torch.autograd.graph.saved_tensors_hooks(
                lambda t, saved=saved: saved.setdefault(t.data_ptr(), t), lambda t: t
            ),
        ):
            sequence(x)
        with region(RECIPES[name]()):
            told = sequence.explain(x)
        found = sum(t.nbytes for place, t in saved.items() if place not in own)
        assert told.saved == found


# ---- extra tensors and channels
# -------------------------------------------------------------------------


def test_fan_out_of_a_channel():
    sequence = ops.Sequential(
        ops.MakeExtraOutput(channel="a"),
        ops.ConstantScale(2.0),
        ops.MakeExtraOutput(channel="b"),
        ops.AddExtraInput(channel="a"),
        ops.AddExtraInput(channel="b"),
        ops.AddExtraInput(channel="a"),
    )
    x = data().requires_grad_()
    y = sequence(x)
    torch.testing.assert_close(y, 6 * x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 6.0))


def test_a_channel_that_nobody_reads_is_hidden():
    x = data().requires_grad_()
    y = ops.Sequential(ops.MakeExtraOutput(channel="unused"), ops.ConstantScale(2.0))(x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_extra_inputs_and_outputs_of_several_operations():
    sequence = ops.Sequential(
        ops.AddExtraInput(),
        ops.MakeExtraOutput(),
        nn.Identity(),
        ops.AddExtraInput(),
        ops.MakeExtraOutput(),
    )
    x, a, b = (data(seed=i).requires_grad_() for i in range(3))
    y, first, second = sequence(x, a, b)
    assert torch.equal(first, x + a)
    assert torch.equal(y, x + a + b)
    (y + 2 * first + 3 * second).sum().backward()
    assert [t.grad.unique().tolist() for t in (x, a, b)] == [[6.0], [6.0], [4.0]]


def test_an_extra_input_that_needs_no_gradient():
    x, a = data().requires_grad_(), data()
    ops.Sequential(ops.AddExtraInput())(x, a).sum().backward()
    assert a.grad is None
    other = data().requires_grad_()
    ops.Sequential(ops.ConstantScale(2.0), ops.AddExtraInput())(a, other).sum().backward()
    assert torch.equal(other.grad, torch.ones_like(other))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: [ops.GELU(), ops.AddExtraInput(channel="r")],
            r"AddExtraInput \(operation 1\): channel 'r' must be filled earlier",
        ),
        (
            lambda: [ops.AddExtraInput(channel="r"), ops.MakeExtraOutput(channel="r")],
            r"AddExtraInput \(operation 0\): channel 'r' must be filled earlier",
        ),
        (
            lambda: [ops.MakeExtraOutput(channel="r"), ops.MakeExtraOutput(channel="r")],
            r"MakeExtraOutput \(operation 1\): channel 'r' may be filled only once",
        ),
    ],
)
def test_channels_that_do_not_fit(build, message):
    with pytest.raises(QTensorError, match=message):
        ops.Sequential(*build())


# ---- bad input
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "inputs", "message"),
    [
        ([lambda: ops.RMSNorm(32)], 0, r"RMSNorm \(operation 0\) input: the last dim must be 32"),
        (
            [lambda: ops.GELU(), lambda: ops.Linear(32, 8)],
            0,
            r"BasicLinear \(operation 1\) input: its last dim must be in_features, 32",
        ),
        ([lambda: ops.GELU(), lambda: ops.Bias(8)], 0, r"bias_add: the bias must have the size"),
        (
            [lambda: ops.Reshape(7, -1)],
            0,
            r"Reshape \(operation 0\) input: the number of elements must fit \(7, -1\)",
        ),
        (
            [lambda: ops.AddExtraInput()],
            0,
            r"it takes 1 extra inputs, for AddExtraInput \(operation 0\)",
        ),
        ([lambda: ops.GELU()], 1, "it takes 0 extra inputs"),
        (
            [lambda: ops.Linear(64, 32), lambda: ops.AddExtraInput()],
            1,
            r"AddExtraInput \(operation 1\): the extra input must have the shape and dtype",
        ),
    ],
)
def test_inputs_that_do_not_fit(build, inputs, message):
    sequence = ops.Sequential(*[make() for make in build])
    with pytest.raises(QTensorError, match=message):
        sequence(data(), *[data() for _ in range(inputs)])


def test_swiglu_of_an_odd_size():
    with pytest.raises(
        QTensorError, match=r"SwiGLU \(operation 0\) input: the last dim must be even"
    ):
        ops.Sequential(ops.SwiGLU())(torch.ones(2, 3))


def test_unaligned_features_name_the_operation():
    sequence = ops.Sequential(ops.GELU(), ops.BasicLinear(WIDTH, 40, name="up"))
    with (
        region(RECIPES["mxfp8"]()),
        pytest.raises(QTensorError, match=r"BasicLinear \(operation 1\)\[up\].*multiples of 32"),
    ):
        sequence(data())


def test_things_that_are_no_tensors():
    with pytest.raises(QTensorError, match="input and extra inputs must be tensors; got list"):
        ops.Sequential(ops.AddExtraInput())(data(), [1.0])


def test_a_backward_that_returns_too_few_gradients():
    class Forgetful(ops.Bias):
        def op_backward(self, ctx, grad_output):
            return grad_output, []

    y = ops.Sequential(Forgetful(WIDTH))(data().requires_grad_())
    with pytest.raises(QTensorError, match=r"Forgetful \(operation 0\): its backward must return"):
        y.sum().backward()


# ---- the sequence
# ---------------------------------------------------------------------------------------


def test_an_operation_in_two_sequences():
    op = ops.GELU()
    first = ops.Sequential(op)
    with pytest.raises(
        QTensorError, match=r"GELU \(operation 1\): an operation may belong to only one sequence"
    ):
        ops.Sequential(ops.ReLU(), op)
    with pytest.raises(QTensorError, match="an operation may belong to only one sequence"):
        ops.Sequential().append(op)
    assert first(torch.ones(1)).isfinite().all()
    # A sequence that is gone owns nothing, nor does one that has given the operation away.
    del first
    second = ops.Sequential(op)
    del second[0]
    ops.Sequential(op)


def test_an_operation_twice_in_a_sequence():
    op = ops.GELU()
    with pytest.raises(
        QTensorError, match=r"GELU \(operation 1\): an operation may occur only once in a sequence"
    ):
        ops.Sequential(op, op)


def test_what_is_no_module():
    with pytest.raises(QTensorError, match=r"Sequential \(operation 1\).*got function"):
        ops.Sequential(ops.GELU(), lambda x: x)


def test_plain_modules_in_between():
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(WIDTH, 96), nn.Tanh(), nn.LayerNorm(96), nn.Linear(96, WIDTH), nn.ReLU()
    )
    mixed = ops.Sequential(
        ops.Linear(WIDTH, 96), nn.Tanh(), ops.LayerNorm(96), ops.Linear(96, WIDTH), nn.ReLU()
    )
    mixed.load_state_dict(plain.state_dict())
    assert len(mixed.groups) == 4
    for a, b in zip(
        step(mixed, mixed, data(), None), step(plain, plain, data(), None), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_slices_share_the_operations():
    sequence = FUSED["mlp_with_biases"].case.make()
    inner = sequence[1:5]
    assert isinstance(inner, ops.Sequential)
    assert len(inner) == 4
    assert inner[0] is sequence[1]
    assert inner[0].label == "RMSNorm (operation 1)"
    x = data()
    torch.testing.assert_close(sequence(x), x + inner(x))
    assert torch.equal(sequence[1](x), sequence[1:2](x))


def test_structure_changes():
    x = data()
    sequence = ops.Sequential(ops.ConstantScale(2.0))
    results = [sequence(x)]
    sequence.append(ops.ConstantScale(3.0))
    results.append(sequence(x))
    sequence.insert(0, ops.ConstantScale(5.0))
    results.append(sequence(x))
    sequence[1] = ops.ConstantScale(1.0)
    results.append(sequence(x))
    del sequence[0]
    results.append(sequence(x))
    sequence.extend([ops.ConstantScale(7.0), nn.Identity()])
    results.append(sequence(x))
    popped = sequence.pop(0)
    results.append(sequence(x))
    assert [round((r / x).mean().item()) for r in results] == [2, 6, 30, 15, 3, 21, 21]
    assert popped.scale == 1.0


def test_copies_and_pickles():
    sequence, x = MLP.make(), data()
    with region(RECIPES["delayed"]()):
        expected = sequence(x)
        copied = copy.deepcopy(sequence)
        assert torch.equal(copied(x), sequence(x))
    assert copied[1] is not sequence[1]
    with torch.no_grad():
        copied[1].weight.add_(1.0)
    assert not torch.equal(copied(x), sequence(x))
    buffer = io.BytesIO()
    torch.save(sequence, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), sequence(x))
    assert expected.shape == x.shape


def test_state_dict_of_delayed_scaling():
    recipe = recipes.DelayedScaling(amax_history_len=4)
    first, second = MLP.make(), MLP.make(seed=5)
    for seed in range(3):
        step(first, first, data(seed=seed), recipe)
    state = first.state_dict()
    assert "2._delayed_scaling.weight.scale" in state
    second.load_state_dict(state)
    a, b = (step(s, s, data(seed=9), recipe) for s in (first, second))
    assert_same(a, b)


def test_named_modules_of_torch_autocast():
    sequence = MLP.make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sequence(data()).dtype == torch.bfloat16


def test_checkpointing():
    for name in ("delayed", "nvfp4"):
        plain, again = MLP.make(), MLP.make()
        recipe = RECIPES[name]()
        for seed in range(3):
            expected = step(plain, plain, data(seed=seed), recipe, seed=seed)
            call = functools.partial(qtensor.checkpoint, again)
            ours = step(call, again, data(seed=seed), recipe, seed=seed)
            assert_same(ours, expected)


def test_main_grad():
    plain = MLP.make()
    torch.manual_seed(0)
    fused = Case(
        lambda: [
            ops.MakeExtraOutput(channel="residual"),
            ops.RMSNorm(WIDTH),
            ops.Linear(WIDTH, 192, bias=False, fuse_wgrad_accumulation=True),
            ops.SwiGLU(),
            ops.Linear(96, WIDTH, bias=False, fuse_wgrad_accumulation=True),
            ops.AddExtraInput(channel="residual"),
        ]
    ).make()
    weights = [fused[2].weight, fused[4].weight]
    for w in weights:
        w.main_grad = torch.ones_like(w)
    expected = step(plain, plain, data(), RECIPES["mxfp8"]())
    step(fused, fused, data(), RECIPES["mxfp8"]())
    assert all(w.grad is None for w in weights)
    assert_same([w.main_grad - 1 for w in weights], [(g + 1) - 1 for g in expected[3:]])
    assert all(w.grad_added_to_main_grad for w in weights)


def test_explain(capsys):
    sequence = FUSED["mlp_with_biases"].case.make()
    sequence.append(nn.Identity())
    before = [p.clone() for p in sequence.parameters()]
    with region(RECIPES["mxfp8"]()):
        found = sequence.explain()
    assert not capsys.readouterr().out
    printed = repr(found)
    assert "Sequential under MXFP8BlockScaling, for (1024, 64) float32" in printed
    assert "ForwardLinearBiasActivation" in printed
    rows = {row.name: row for row in found.rows}
    assert rows["RMSNorm"].quantized == ["mxfp8 (norm_quantize)"]
    assert rows["RMSNorm"].backward == "BackwardAddNorm"
    assert rows["Identity"].forward == "itself"
    assert found.quantize_calls == 6
    assert found.separate_quantize_calls == 4
    assert_same([p.detach() for p in sequence.parameters()], before)
    assert not any(
        s.delayed.used for m in sequence.modules() for s in getattr(m, "_states", {}).values()
    )


def test_explain_needs_an_input_where_none_follows_from_the_operations():
    with pytest.raises(QTensorError, match="the input size must follow from the operations"):
        ops.Sequential(ops.GELU()).explain()
    assert ops.Sequential(ops.GELU()).explain(data()).rows[0].forward == "GELU"


class Told(ops.BasicOperation):
    """Keeps what its forward was told of gradients."""

    def op_forward(self, ctx, input, *, next_op_input_request=None):
        self.__dict__.setdefault("told", []).append(ctx.input_requires_grad)
        return input * 1.0

    def op_backward(self, ctx, grad_output):
        return grad_output, []


def test_a_single_form_is_told_whether_its_input_needs_a_gradient():
    alone, behind = Told(), Told()
    sequence = ops.Sequential(alone, ops.Bias(8), behind)
    x = torch.randn(2, 8)
    sequence(x)
    sequence(x.requires_grad_())
    with torch.no_grad():
        sequence(x)
    assert alone.told == [False, True, False]
    assert behind.told == [True, True, False]
