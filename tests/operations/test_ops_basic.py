"""Each basic operation: torch in high precision, the quantized oracle, and the arithmetic of its
own ops.
"""

from __future__ import annotations

import math

import pytest
import torch
from ops_cases import ACTIVATIONS, BASIC, GROUPS, ROWS, WIDTH, data, step
from torch import nn
from torch.nn import functional as F
from training import RECIPES, assert_same, region

import qtensor
from qtensor import QTensorError, ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def halves(f):
    def gated(x):
        a, b = x.chunk(2, -1)
        return f(a) * b

    return gated


def clamped(x):
    a, b = x.chunk(2, -1)
    a, b = a.clamp(max=7.0), b.clamp(-7.0, 7.0)
    return a * torch.sigmoid(1.702 * a) * (b + 1)


def quick(x):
    return x * torch.sigmoid(1.702 * x)


def squared(x):
    return F.relu(x) ** 2


TORCH = {
    "GELU": lambda x: F.gelu(x, approximate="tanh"),
    "QGELU": quick,
    "ReLU": F.relu,
    "SReLU": squared,
    "SiLU": F.silu,
    "GLU": halves(torch.sigmoid),
    "GEGLU": halves(lambda x: F.gelu(x, approximate="tanh")),
    "QGEGLU": halves(quick),
    "ReGLU": halves(F.relu),
    "SReGLU": halves(squared),
    "SwiGLU": halves(F.silu),
    "ClampedSwiGLU": clamped,
}


def close_to_torch(op, function, x, *extra, parameters=()):
    """Outputs and gradients near those of a function of the input, the extra inputs and the
    parameters in float64.
    """
    doubles = [t.detach().double().requires_grad_() for t in (x, *extra, *parameters)]
    expected = function(*doubles)
    weights = torch.linspace(-1, 1, expected.shape[-1], dtype=torch.float64)
    (expected * weights).sum().backward()
    ours = [t.detach().clone().requires_grad_() for t in (x, *extra)]
    y = op(*ours)
    (y.double() * weights).sum().backward()
    found = [y, *[t.grad for t in ours], *[p.grad for p in parameters]]
    for a, b in zip(found, [expected, *[t.grad for t in doubles]], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    x = data() * 3
    close_to_torch(ACTIVATIONS[name](), TORCH[name], x)


def test_norms():
    x = data()
    for op, function in (
        (ops.LayerNorm(WIDTH), lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b)),
        (ops.RMSNorm(WIDTH), lambda x, w: F.rms_norm(x, (WIDTH,), w, 1e-5)),
    ):
        with torch.no_grad():
            for p in op.parameters():
                p.add_(torch.linspace(-0.5, 0.5, WIDTH))
        close_to_torch(op, function, x, parameters=list(op.parameters()))


def test_l2_normalization():
    close_to_torch(ops.L2Normalization(), lambda x: F.normalize(x, dim=-1), data())
    # Below eps the factor is a constant.
    tiny = data() * 1e-6
    close_to_torch(ops.L2Normalization(eps=1.0), lambda x: x / 1.0, tiny)


def test_linear_and_bias():
    x, op = data(), ops.BasicLinear(WIDTH, 96)
    close_to_torch(op, lambda x, w: x @ w.T, x, parameters=[op.weight])
    bias = ops.Bias(WIDTH)
    close_to_torch(bias, lambda x, b: x + b, x, parameters=[bias.bias])
    both = ops.Linear(WIDTH, 96)
    close_to_torch(ops.Sequential(both), F.linear, x, parameters=[both.weight, both.bias])


def test_the_rest():
    x = data()
    other = torch.randn(ROWS, WIDTH)
    close_to_torch(ops.ConstantScale(-1.5), lambda x: x * -1.5, x)
    close_to_torch(ops.Identity(), lambda x: x * 1, x)
    close_to_torch(ops.Reshape(2, -1, 32), lambda x: x.reshape(2, -1, 32), x)
    close_to_torch(ops.Reshape((2, -1, 32)), lambda x: x.reshape(2, -1, 32), x)
    close_to_torch(ops.AddExtraInput(), torch.add, x, other)


def test_make_extra_output():
    x = data().requires_grad_()
    y, extra = ops.MakeExtraOutput()(x)
    assert torch.equal(y, x)
    assert torch.equal(extra, x)
    (2 * y.sum() + 3 * extra.sum()).backward()
    assert torch.equal(x.grad, torch.full_like(x, 5.0))


def test_grouped_linear_is_a_linear_layer_for_each_group():
    x, op = data(), ops.GroupedLinear(GROUPS, WIDTH, 96)
    sizes = [24, 0, 16]
    ours = step(op, op, x, None, [torch.tensor(sizes)])
    module = qtensor.GroupedLinear(GROUPS, WIDTH, 96)
    module.load_state_dict(op.state_dict())

    def call(x):
        return module(x, sizes)

    assert_same(ours, step(call, module, x, None))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout(p):
    op = ops.Dropout(p)
    x = torch.ones(200, 500, requires_grad=True)
    y = op(x)
    y.sum().backward()
    kept = y != 0
    # Five standard deviations of a binomial.
    assert abs(kept.float().mean().item() - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / y.numel())
    assert torch.equal(y, kept * (1 / (1 - p) if p < 1 else 0.0))
    assert torch.equal(x.grad, y)
    again = op(x)
    assert torch.equal(again, y) == (p in (0.0, 1.0))
    assert torch.equal(op.eval()(x), x)


def test_dropout_saves_a_seed_and_no_mask():
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.nbytes) or t, lambda t: t
    ):
        ops.Dropout(0.5)(data().requires_grad_())
    assert sum(sizes) == 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_linear_equals_the_module(recipe, dtype):
    """Whose own tests hold it to the oracle of decoded operands, GEMM by GEMM."""
    chosen = RECIPES[recipe]()
    ours = ops.Sequential(ops.Linear(WIDTH, 96, dtype=dtype))
    module = qtensor.Linear(WIDTH, 96, dtype=dtype)
    module.load_state_dict({k.removeprefix("0."): v for k, v in ours.state_dict().items()})
    x = data(dtype=dtype)
    for seed in range(3):
        expected = step(module, module, x, chosen, seed=seed)
        assert_same(step(ours, ours, x, chosen, seed=seed), expected)


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4"])
def test_quantize(recipe):
    chosen = RECIPES[recipe]()
    x = data()
    with region(chosen):
        y = ops.Sequential(ops.Quantize())(x)
    assert isinstance(y, qtensor.QuantizedTensor)
    with region(chosen):
        assert torch.equal(ops.Sequential(ops.Quantize(forward=False))(x), x)
    x = x.requires_grad_()
    with region(chosen):
        ops.Sequential(ops.Quantize("mxfp8", forward=False, backward=True))(x).backward(x.detach())
    assert torch.equal(x.grad, qtensor.quantize(x.detach(), "mxfp8").dequantize())


def test_quantize_without_a_recipe_or_format_passes_the_input():
    x = data()
    assert torch.equal(ops.Quantize()(x), x)
    assert isinstance(ops.Quantize("nvfp4")(x), qtensor.NVFP4Tensor)


@pytest.mark.parametrize("name", [name for name in BASIC if name != "Reshape"])
@pytest.mark.parametrize("recipe", ["high_precision", "mxfp8"])
def test_more_dims_than_two(name, recipe):
    """(2, 20, K) is (40, K)."""
    sequence = BASIC[name].make()
    chosen, extra = RECIPES[recipe](), BASIC[name].extra(ROWS)
    flat = step(sequence, sequence, data(), chosen, extra)
    extra = [t.reshape(2, 20, WIDTH) if t.is_floating_point() else t for t in extra]
    deep = step(sequence, sequence, data().reshape(2, 20, WIDTH), chosen, extra)
    for a, b in zip(deep, flat, strict=True):
        assert torch.equal(a.reshape(b.shape), b)


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (lambda: ops.RMSNorm(0), "RMSNorm: normalized_shape must be the size of the last dim"),
        (
            lambda: ops.LayerNorm((4, 4)),
            "LayerNorm: normalized_shape must be the size of the last dim",
        ),
        (lambda: ops.Dropout(1.5), "Dropout: p must be between 0 and 1; got 1.5"),
        (lambda: ops.ConstantScale("2"), "ConstantScale: scale must be a number"),
        (lambda: ops.Reshape(-1, -1), "Reshape: a shape consists of sizes"),
        (lambda: ops.Quantize(8), "Quantize: format must be a format id"),
        (lambda: ops.Quantize("fp9"), "fp9"),
        (lambda: ops.AddExtraInput(channel=3), "AddExtraInput: a channel must be a name"),
        (lambda: ops.ExtraInput(channel=None), "ExtraInput: channel must be the name"),
        (lambda: ops.AllReduce("world"), "AllReduce: it needs a process group"),
        (lambda: ops.BasicLinear(0, 4), "in_features must be a positive integer"),
        (lambda: ops.ClampedSwiGLU(limit=-1.0), "clamped_swiglu"),
        (lambda: ops.ClampedSwiGLU(alpha="2"), "ClampedSwiGLU: alpha, limit and offset must be"),
        (
            lambda: ops.Linear(4, 4, return_bias=True),
            "BasicLinear: an operation returns one tensor",
        ),
        (
            lambda: ops.GroupedLinear(2, 4, 4, return_bias=True),
            "GroupedLinear: an operation returns",
        ),
        (lambda: ops.Bias(-1), "Bias: size must be a positive integer; got -1"),
        (lambda: ops.Bias("4"), "Bias: size must be a positive integer; got '4'"),
        (lambda: ops.RMSNorm("4"), "RMSNorm: normalized_shape must be the size.* got '4'"),
        (lambda: ops.LayerNorm(None), "LayerNorm: normalized_shape must be the size.* got None"),
        (lambda: ops.Reshape(None), "Reshape: a shape consists of sizes"),
        (
            lambda: ops.register_forward_fusion(ops.Bias, print),
            "a pattern must be a list of classes",
        ),
    ],
)
def test_bad_arguments(op, message):
    with pytest.raises(QTensorError, match=message):
        op()


def test_state_dicts_of_torch_linear():
    ours, theirs = ops.Linear(WIDTH, 96), nn.Linear(WIDTH, 96)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)
    other = nn.Linear(WIDTH, 96)
    other.load_state_dict(ours.state_dict())
    assert torch.equal(other.bias, theirs.bias)
    nested = ops.Sequential(ops.RMSNorm(WIDTH), ops.Linear(WIDTH, 96))
    assert [*nested.state_dict()] == ["0.weight", "1.weight", "1.bias"]
    twin = ops.Sequential(ops.RMSNorm(WIDTH), ops.Linear(WIDTH, 96))
    twin.load_state_dict(nested.state_dict())
    assert torch.equal(twin[1].bias, nested[1].bias)


def test_meta_and_reset_parameters():
    sequence = ops.Sequential(
        ops.RMSNorm(WIDTH, device="meta"), ops.Linear(WIDTH, 32, device="meta")
    )
    assert all(p.is_meta for p in sequence.parameters())
    sequence.to_empty(device="cpu")
    for op in sequence:
        op.reset_parameters()
    assert sequence(data()).isfinite().all()
