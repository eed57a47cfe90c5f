"""Each GEMM of Linear against products of dequantized operands, written by hand for every
recipe.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from training import RECIPES, region

import qtensor
from qtensor import QTensorError, recipes
from qtensor.reference.activation import KINDS

M, K, N = 48, 64, 96

ROLES = {
    "current": ("fp8", "fp8", "fp8(dtype=e5m2)"),
    "delayed": ("fp8_delayed", "fp8_delayed", "fp8_delayed(dtype=e5m2)"),
    "blockwise": ("fp8_blockwise", "fp8_blockwise(block_scaling_dim=2)", "fp8_blockwise"),
    "mxfp8": ("mxfp8", "mxfp8", "mxfp8"),
    "nvfp4": (
        "nvfp4(with_rht=True)",
        "nvfp4(with_2d_quantization=True)",
        "nvfp4(stochastic_rounding=True,with_rht=True)",
    ),
    "custom": ("mxfp6", "mxfp4", None),
}
"""Recipe -> quantizers of input, weight and gradient."""


def values(text: str | None, t: Tensor, side: str, seed: Tensor | None) -> Tensor:
    """What a GEMM reads of an operand: quantized in one direction, and dequantized."""
    if text is None:
        return t
    both = qtensor.core.quantizer_registry.parse(text).with_usage(rowwise=True, columnwise=True)
    call = {"scale": torch.ones(1)} if both.needs_scale else {}
    if both.stochastic_rounding:
        call["generator"] = seed
    q = both.quantize(t, **call)
    q.update_usage(rowwise=side == "row", columnwise=side == "column")
    return q.dequantize(torch.float32)


def close(ours: Tensor, product: Tensor, a: Tensor, b: Tensor) -> None:
    """Within what the order of a float32 sum can change: n roundings of at most the sum of
    magnitudes.
    """
    count = a.shape[1]
    bound = (count + 4) * 2.0**-24 * (a.abs().double() @ b.abs().double())
    assert ((ours.double() - product.double()).abs() <= bound + 1e-30).all()


def operands(seed: int = 0) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(M, K, generator=g), torch.randn(N, K, generator=g)
    return x, w, torch.randn(N, generator=g), torch.randn(M, N, generator=g)


def linear(x: Tensor, w: Tensor, b: Tensor, **options: object) -> qtensor.Linear:
    module = qtensor.Linear(K, N, **options)
    with torch.no_grad():
        module.weight.copy_(w)
        module.bias.copy_(b)
    return module


@pytest.mark.parametrize("recipe", ROLES)
def test_three_gemms(recipe):
    x, w, b, dy = operands()
    module = linear(x, w, b)
    torch.manual_seed(5)
    seed = torch.empty(1, dtype=torch.int64).random_()
    torch.manual_seed(5)
    inp = x.clone().requires_grad_()
    with region(RECIPES[recipe]()):
        y = module(inp)
    y.backward(dy)

    of_x, of_w, of_dy = ROLES[recipe]
    x_row, w_row = values(of_x, x, "row", seed), values(of_w, w, "row", seed)
    exact = x_row.double() @ w_row.double().t() + b.double()
    bound = (K + 4) * 2.0**-24 * (x_row.abs().double() @ w_row.abs().double().t() + b.abs())
    assert ((y.double() - exact).abs() <= bound).all()

    dy_row, w_col = values(of_dy, dy, "row", seed), values(of_w, w, "column", seed)
    close(inp.grad, dy_row.double() @ w_col.double(), dy_row, w_col)
    dy_col, x_col = values(of_dy, dy, "column", seed), values(of_x, x, "column", seed)
    close(module.weight.grad, dy_col.double().t() @ x_col.double(), dy_col.t(), x_col)
    assert (
        module.bias.grad.double() - dy.double().sum(0)
    ).abs().max() <= M * 2.0**-24 * dy.abs().sum(0).max()


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4"])
def test_the_oracle_sees_another_operand(recipe):
    """The bound is tight enough to tell directions apart."""
    x, w, b, _ = operands()
    module = linear(x, w, b)
    with region(RECIPES[recipe]()):
        y = module(x)
    of_w = ROLES[recipe][1]
    wrong = x.double() @ values(of_w, w, "row", None).double().t() + b.double()
    bound = (K + 4) * 2.0**-24 * (x.abs().double() @ w.abs().double().t() + b.abs())
    assert ((y.double() - wrong).abs() > bound).float().mean() > 0.5


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise", "mxfp8", "nvfp4"])
def test_backward_override(recipe, override):
    x, w, b, dy = operands()
    module = linear(x, w, b)
    chosen = RECIPES[recipe]()
    chosen.backward_override = override
    inp = x.clone().requires_grad_()
    with region(chosen):
        y = module(inp)
    y.backward(dy)
    of_x, of_w, _ = ROLES[recipe]
    if override == "dequantized":
        x_read, w_read = values(of_x, x, "row", None), values(of_w, w, "row", None)
    else:
        x_read, w_read = x, w
    close(inp.grad, dy.double() @ w_read.double(), dy, w_read)
    close(module.weight.grad, dy.double().t() @ x_read.double(), dy.t(), x_read)


def test_backward_override_can_change_between_steps():
    x, w, b, dy = operands()
    module = linear(x, w, b)
    chosen = recipes.Float8CurrentScaling()
    found = {}
    for override in (None, "high_precision", None, "dequantized"):
        chosen.backward_override = override
        inp = x.clone().requires_grad_()
        with region(chosen):
            module(inp).backward(dy)
        if override in found:
            assert torch.equal(found[override], inp.grad)
        found[override] = inp.grad
    assert not torch.equal(found[None], found["high_precision"])
    assert not torch.equal(found["dequantized"], found["high_precision"])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_high_precision_is_torch(bias, dtype):
    module = qtensor.Linear(K, N, bias=bias, dtype=dtype)
    twin = torch.nn.Linear(K, N, bias=bias, dtype=dtype)
    twin.load_state_dict(module.state_dict())
    module.load_state_dict(twin.state_dict())
    results = []
    for m in (module, twin):
        inp = torch.linspace(-2, 2, 3 * 16 * K).reshape(3, 16, K).to(dtype).requires_grad_()
        y = m(inp)
        (y * torch.linspace(-1, 1, N).to(dtype)).sum().backward()
        results.append([y, inp.grad, *[p.grad for p in m.parameters()]])
    tolerance = 2.0**-20 if dtype is torch.float32 else 2.0**-7
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        scale = theirs.detach().abs().max().item()
        assert (ours - theirs).abs().max().item() <= tolerance * max(scale, 1)


def reference_mlp(module: qtensor.LayerNormMLP, x: Tensor) -> Tensor:
    """LayerNormMLP in torch.nn.functional."""
    if module.kind == "layernorm":
        h = F.layer_norm(
            x, x.shape[-1:], module.layer_norm_weight, module.layer_norm_bias, module.eps
        )
    else:
        h = F.rms_norm(x, x.shape[-1:], module.layer_norm_weight, module.eps)
    h = F.linear(h, module.fc1_weight, module.fc1_bias)
    plain = {
        "gelu": lambda t: F.gelu(t, approximate="tanh"),
        "qgelu": lambda t: t * torch.sigmoid(1.702 * t),
        "relu": F.relu,
        "silu": F.silu,
        "srelu": lambda t: F.relu(t).square(),
        "glu": torch.sigmoid,
    }
    gated = {
        "swiglu": "silu",
        "geglu": "gelu",
        "reglu": "relu",
        "qgeglu": "qgelu",
        "sreglu": "srelu",
    }
    kind = module.activation
    if kind == "clamped_swiglu":
        a, g = h.chunk(2, dim=-1)
        a, g = a.clamp(max=0.5), g.clamp(-0.5, 0.5)
        h = a * torch.sigmoid(1.25 * a) * (g + 1)
    elif kind in gated or kind == "glu":
        a, g = h.chunk(2, dim=-1)
        h = plain[gated.get(kind, kind)](a) * g
    else:
        h = plain[kind](h)
    return F.linear(h, module.fc2_weight, module.fc2_bias)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("activation", KINDS)
def test_layernorm_mlp_is_torch(activation, normalization):
    numbers = {"alpha": 1.25, "limit": 0.5} if activation == "clamped_swiglu" else None
    module = qtensor.LayerNormMLP(
        32, 48, activation=activation, activation_params=numbers, normalization=normalization
    )
    results = []
    for call in (module, lambda t: reference_mlp(module, t)):
        x = torch.randn(20, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = call(x)
        (y * torch.linspace(-1, 1, 32)).sum().backward()
        results.append([y, x.grad, *[p.grad.clone() for p in module.parameters()]])
        module.zero_grad()
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * max(1.0, theirs.abs().max().item())


def test_activation_params_that_do_not_fit():
    def build(activation, **numbers):
        qtensor.LayerNormMLP(32, 48, name="mlp", activation=activation, activation_params=numbers)

    with pytest.raises(
        QTensorError, match=r"LayerNormMLP\[mlp\]: activation_params are for clamped_swiglu"
    ):
        build("swiglu", limit=7.0)
    with pytest.raises(
        QTensorError, match=r"LayerNormMLP\[mlp\]: .* are alpha, limit and offset, numbers"
    ):
        build("clamped_swiglu", beta=7.0)
    with pytest.raises(
        QTensorError, match=r"LayerNormMLP\[mlp\]: .* are alpha, limit and offset, numbers"
    ):
        build("clamped_swiglu", limit="7")
    with pytest.raises(QTensorError, match="alpha and limit above 0"):
        build("clamped_swiglu", limit=-7.0)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_layernorm_linear_is_torch_and_returns_the_normed_input(zero_centered):
    module = qtensor.LayerNormLinear(
        32, 48, return_layernorm_output=True, zero_centered_gamma=zero_centered, return_bias=True
    )
    torch.nn.init.normal_(module.layer_norm_weight)
    x = torch.randn(4, 5, 32)
    y, bias, normed = module(x)
    gamma = module.layer_norm_weight + zero_centered
    expected = F.layer_norm(x, (32,), gamma, module.layer_norm_bias)
    assert bias is module.bias
    assert (normed - expected).abs().max() < 1e-5
    assert (y - F.linear(expected, module.weight)).abs().max() < 1e-5


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_tokens_and_one_token(recipe):
    module = qtensor.Linear(K, N)
    for shape in ((0, K), (1, K), (2, 0, K), (K,)):
        x = torch.randn(shape).requires_grad_()
        with region(RECIPES[recipe]()):
            y = module(x)
        y.sum().backward()
        assert y.shape == (*shape[:-1], N)
        assert x.grad.shape == shape
        assert module.weight.grad.shape == (N, K)
        assert math.prod(shape) or not module.weight.grad.any()
        module.zero_grad()


def test_torch_autocast_sets_the_dtype_of_the_output():
    module = qtensor.Linear(K, N)
    x = torch.randn(8, K, requires_grad=True)
    for recipe in RECIPES.values():
        with torch.autocast("cpu", torch.bfloat16), region(recipe()):
            y = module(x)
        assert y.dtype == torch.bfloat16
        y.sum().backward()
        assert module.weight.grad.dtype == torch.float32
        assert x.grad.dtype == torch.float32
