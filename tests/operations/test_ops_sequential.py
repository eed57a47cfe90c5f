"""Sequences as containers: modules that are replaced, copies, sequences inside of sequences,
``torch.autocast``.
"""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import qtensor
from qtensor import ops, recipes


def rows(*shape):
    return torch.randn(*(shape or (4, 32)))


def replace_by_setattr(sequence, module):
    setattr(sequence, "1", module)


def replace_by_set_submodule(sequence, module):
    sequence.set_submodule("1", module)


def replace_by_index(sequence, module):
    sequence[1] = module


@pytest.mark.parametrize(
    "replace", [replace_by_setattr, replace_by_set_submodule, replace_by_index]
)
@pytest.mark.parametrize("new", [ops.ReLU, nn.ReLU])
def test_a_module_that_is_replaced_runs(replace, new):
    sequence, x = ops.Sequential(ops.Linear(32, 32), ops.SiLU()), rows()
    sequence(x)
    replace(sequence, new())
    assert torch.equal(sequence(x), sequence[:1](x).relu())


def test_deleted_by_name():
    sequence, x = ops.Sequential(ops.Linear(32, 32), ops.SiLU()), rows()
    expected = sequence[:1](x)
    delattr(sequence, "1")
    assert torch.equal(sequence(x), expected)


def test_channels_are_checked_after_the_whole_change():
    sequence = ops.Sequential(
        ops.MakeExtraOutput(channel="r"), ops.ReLU(), ops.AddExtraInput(channel="r"), ops.SiLU()
    )
    del sequence[0:3]
    assert [type(m) for m in sequence] == [ops.SiLU]


@pytest.mark.parametrize(
    "change",
    [
        lambda s, op: s.append(op),
        lambda s, op: s.insert(0, op),
        lambda s, op: s.__setitem__(0, op),
        lambda s, op: setattr(s, "0", op),
        lambda s, op: s.append(ops.AddExtraInput(channel="nobody")),
        lambda s, op: s.append(None),
        lambda s, op: s.insert(0, "SiLU"),
        lambda s, op: s.__setitem__(0, None),
    ],
)
def test_a_change_that_is_refused_leaves_the_sequence_as_it_was(change):
    used = ops.SiLU()
    other = ops.Sequential(used)
    sequence, x = ops.Sequential(ops.Linear(32, 32), ops.ReLU()), rows()
    expected, before = sequence(x), list(sequence)
    with pytest.raises(qtensor.QTensorError, match="operation"):
        change(sequence, used)
    assert list(sequence) == before
    assert torch.equal(sequence(x), expected)
    assert torch.equal(other(x), used(x))


def test_fuse_may_be_switched():
    sequence, x = ops.Sequential(ops.Linear(32, 32), ops.ReLU()), rows()
    expected = sequence(x)
    sequence.fuse = False
    assert {row.forward for row in sequence.explain(x).rows} == {"BasicLinear", "Bias", "ReLU"}
    assert torch.equal(sequence(x), expected)


def test_a_shallow_copy_shares_the_operations():
    sequence, x = ops.Sequential(ops.Linear(32, 32), ops.ReLU()), rows()
    twin = copy.copy(sequence)
    assert twin[0] is sequence[0]
    del twin[1]
    assert len(sequence) == 2
    assert torch.equal(twin(x).relu(), sequence(x))


def test_extra_tensors_of_sequences_inside():
    inner = ops.Sequential(ops.AddExtraInput(), ops.Linear(32, 32), ops.MakeExtraOutput())
    linear = inner[1]
    sequence = ops.Sequential(ops.ReLU(), inner, ops.AddExtraInput(), nn.SiLU())
    x, a, b = (rows().requires_grad_() for _ in range(3))
    out, extra = sequence(x, a, b)
    hidden = linear(x.relu() + a)
    assert torch.equal(extra, hidden)
    assert torch.equal(out, nn.functional.silu(hidden + b))
    grads = torch.autograd.grad(out.sum() + extra.sum(), (x, a, b))
    expected = torch.autograd.grad(nn.functional.silu(hidden + b).sum() + hidden.sum(), (x, a, b))
    for got, wanted in zip(grads, expected, strict=True):
        assert torch.equal(got, wanted)
    assert [row.name for row in sequence.explain(x, a, b).rows][1] == "Sequential"
    with pytest.raises(qtensor.QTensorError, match="2 extra inputs; got 3"):
        sequence(x, a, b, b)
    with pytest.raises(qtensor.QTensorError, match="2 extra inputs; got 3"):
        sequence.explain(x, a, b, b)
    with pytest.raises(qtensor.QTensorError, match="1 extra inputs; got 0"):
        sequence(x)


def test_explain_sees_what_torch_autocast_casts():
    sequence, x = ops.Sequential(ops.Linear(32, 32), ops.GELU()), rows().requires_grad_()
    in_float32 = sequence.explain(x).rows[-1].saved
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sequence.explain(x).rows[-1].saved == in_float32 // 2 > 0


def test_torch_autocast_leaves_indices_alone_and_casts_what_comes_between():
    sequence = ops.Sequential(
        nn.Embedding(10, 32),
        ops.Linear(32, 32),
        nn.LayerNorm(32),
        ops.Linear(32, 32),
        ops.AddExtraInput(),
    )
    extra = rows().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = sequence(torch.arange(4), extra)
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert extra.grad.dtype == torch.float32
    assert sequence[0].weight.grad is not None


def test_meta_inputs():
    sequence = ops.Sequential(
        ops.RMSNorm(32, device="meta"), ops.Linear(32, 64, device="meta"), ops.SwiGLU()
    )
    with qtensor.autocast(recipe=recipes.MXFP8BlockScaling()):
        assert sequence(torch.empty(64, 32, device="meta")).shape == (64, 32)


@pytest.mark.parametrize("given", ["x", None, [1.0]])
def test_an_input_that_is_no_tensor(given):
    kind = re.escape(type(given).__name__)
    with pytest.raises(
        qtensor.QTensorError, match=f"Sequential: the input must be a tensor; got {kind}"
    ):
        ops.Sequential(ops.ReLU())(given)


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_alone(bias):
    layer, x = ops.Linear(32, 32, bias=bias), rows().requires_grad_()
    out = layer(x)
    assert torch.equal(out, nn.functional.linear(x, layer.weight, layer.bias))
    (out + nn.Sequential(layer, ops.ReLU())(x)).sum().backward()
    assert x.grad is not None


def test_backward_dw_of_a_linear_layer():
    layer, twin = (ops.Linear(32, 32, delay_wgrad_compute=late) for late in (True, False))
    twin.load_state_dict(layer.state_dict())
    x = rows()
    for module in (layer, twin):
        ops.Sequential(module, ops.ReLU())(x).sum().backward()
    assert layer.weight.grad is None
    layer.backward_dw()
    assert torch.equal(layer.weight.grad, twin.weight.grad)


def test_pickles_of_operations_that_ran_alone():
    # Another operation's plan lies under the same number in another process.
    for op in (ops.Linear(32, 32), ops.ReLU()):
        op(rows())
        twin = pickle.loads(pickle.dumps(op))
        assert "_own_fuser" not in twin.__dict__
        x = rows()
        assert torch.equal(twin(x), op(x))
        assert torch.equal(copy.deepcopy(op)(x), op(x))


class Cast(ops.BasicOperation):
    def op_forward_compute(self, input, *, next_op_input_request=None):
        return ops.produce(input.bfloat16(), next_op_input_request), None

    def op_forward_save_ctx(self, ctx, input, returned):
        ctx.dtype = input.dtype

    def op_backward(self, ctx, grad_output):
        return grad_output.to(ctx.dtype), []


class Embedding(ops.BasicOperation):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 32))

    def op_forward_compute(self, input, *, next_op_input_request=None):
        return ops.produce(self.weight[input], next_op_input_request), None

    def op_forward_save_ctx(self, ctx, input, returned):
        ctx.save_for_backward(input)

    def op_backward(self, ctx, grad_output):
        (indices,) = ctx.saved_tensors
        return None, [torch.zeros_like(self.weight).index_add_(0, indices, grad_output)]


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("recipe", [None, recipes.MXFP8BlockScaling()])
@pytest.mark.parametrize("hand_over_from", [0, 2**16])
def test_an_operation_that_changes_the_dtype(monkeypatch, fuse, recipe, hand_over_from):
    monkeypatch.setattr("qtensor.ops.fuser.HAND_OVER_FROM", hand_over_from)
    layers = ops.Linear(32, 64), ops.SwiGLU(), ops.Linear(32, 32)
    splits = torch.tensor([3, 1])
    sequence = ops.Sequential(Cast(), *layers, ops.GroupedLinear(2, 32, 32), fuse=fuse)
    behind = sequence[1:]
    x = rows()
    with qtensor.autocast(enabled=recipe is not None, recipe=recipe):
        out, expected = sequence(x, splits), behind(x.bfloat16(), splits)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)


@pytest.mark.parametrize("recipe", [None, recipes.MXFP8BlockScaling()])
def test_an_operation_that_takes_indices(recipe):
    sequence = ops.Sequential(Embedding(), ops.Linear(32, 32), ops.ReLU())
    indices = torch.tensor([1, 3, 3, 9])
    with qtensor.autocast(enabled=recipe is not None, recipe=recipe):
        out, expected = sequence(indices), sequence[1:](sequence[0].weight[indices])
        grads = [
            torch.autograd.grad(y.square().sum(), list(sequence.parameters()))
            for y in (out, expected)
        ]
    assert torch.equal(out, expected)
    for got, wanted in zip(*grads, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    "build",
    [
        lambda: ops.Linear(32, 32),
        pytest.param(ops.ReLU, marks=pytest.mark.nightly(reason="Linear and RMSNorm are alone")),
        lambda: ops.RMSNorm(32),
    ],
)
def test_operations_alone_compile(build):
    op, x = build(), rows()
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    with qtensor.autocast(recipe=recipes.MXFP8BlockScaling()):
        assert torch.equal(compiled(x), op(x))
        twin = copy.deepcopy(op)
        assert torch.equal(torch.compile(twin, fullgraph=True, backend="aot_eager")(x), op(x))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "build",
    [lambda: ops.Sequential(ops.Linear(32, 32), ops.GELU()), lambda: qtensor.Linear(32, 32)],
)
def test_torch_autocast_rounds_the_input_and_not_the_weight(build, compiled):
    module, x = build(), rows(64, 32).bfloat16()
    run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = run(x)
            grads = torch.autograd.grad(out.float().square().sum(), list(module.parameters()))
        results.append((out, *grads))
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)
