"""Weights stored quantized, quantized outputs and inputs, state dicts, meta construction, and bad
input.
"""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from training import RECIPES, WIDTH, assert_same, build, compiled, region, step

import qtensor
from qtensor import QTensorError, recipes

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

STORED = {
    "current": qtensor.Float8Tensor,
    "delayed": qtensor.Float8Tensor,
    "blockwise": qtensor.Float8BlockwiseTensor,
    "mxfp8": qtensor.MXFP8Tensor,
    "nvfp4": qtensor.NVFP4Tensor,
}
stored = pytest.mark.parametrize("recipe", STORED)


@stored
def test_a_quantized_weight_computes_as_the_plain_one(recipe):
    """The stored bytes are those that the plain weight is quantized to (delayed: by its own
    maximum).
    """
    chosen = RECIPES[recipe]()
    plain = build("linear")
    module = build("linear", quantized_params=True, recipe=chosen)
    assert isinstance(module.weight, STORED[recipe])
    assert isinstance(module.weight, nn.Parameter)
    x = torch.randn(40, WIDTH)
    call, counter = compiled(module)
    for number in range(3):
        ours = step(module, module, x, chosen, seed=number)
        if recipe != "delayed":
            assert_same(ours, step(plain, plain, x, chosen, seed=number))
            assert_same(step(call, module, x, chosen, seed=number), ours)
    assert counter.frame_count == (recipe != "delayed")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with region(chosen):
        module(x).sum().backward()
    before = module.weight.dequantize()
    optimizer.step()
    assert isinstance(module.weight, STORED[recipe])
    assert not torch.equal(module.weight.dequantize(), before)


def test_the_initial_values_are_kept_on_request():
    torch.manual_seed(0)
    plain = qtensor.Linear(WIDTH, 96)
    torch.manual_seed(0)
    module = qtensor.Linear(
        WIDTH,
        96,
        quantized_params=True,
        preserve_high_precision_init_val=True,
        recipe=RECIPES["mxfp8"](),
    )
    assert torch.equal(module.get_high_precision_init_val(), plain.weight)
    module.clear_high_precision_init_val()
    assert module.get_high_precision_init_val() is None
    assert plain.get_high_precision_init_val() is None


@stored
def test_without_a_recipe_a_quantized_weight_is_read_by_its_values(recipe):
    chosen = RECIPES[recipe]()
    with region(chosen):
        module = build("linear", quantized_params=True)
    assert isinstance(module.weight, STORED[recipe])
    x = torch.randn(40, WIDTH, requires_grad=True)
    y = module(x)
    expected = torch.nn.functional.linear(x, module.weight.dequantize(), module.bias)
    assert (y - expected).abs().max() < 1e-5
    y.sum().backward()
    assert module.weight.grad.shape == (96, WIDTH)
    assert type(module.weight.grad) is torch.Tensor


@pytest.mark.parametrize("other", [name for name in STORED if name != "mxfp8"])
def test_the_wrong_recipe_for_a_quantized_weight(other):
    module = qtensor.Linear(
        WIDTH, 96, quantized_params=True, recipe=RECIPES["mxfp8"](), name="decoder.fc1"
    )
    with (
        region(RECIPES[other]()),
        pytest.raises(
            QTensorError,
            match=r"linear\[decoder.fc1\] weight: .* reads weights as .*stored as mxfp8",
        ),
    ):
        module(torch.randn(4, WIDTH))


def test_quantized_params_need_a_recipe():
    with pytest.raises(QTensorError, match="quantized_params needs a recipe"):
        qtensor.Linear(WIDTH, 96, quantized_params=True)


@stored
def test_state_dicts_go_both_ways(recipe):
    module = build("linear", quantized_params=True, recipe=RECIPES[recipe]())
    plain = nn.Linear(WIDTH, 96)
    # The weight was quantized with factors of delayed scaling, which a plain layer does not have.
    more = plain.load_state_dict(module.state_dict(), strict=recipe != "delayed").unexpected_keys
    assert all(key.startswith("_delayed_scaling.weight.") for key in more)
    assert bool(more) == (recipe == "delayed")
    assert torch.equal(plain.weight, module.weight.dequantize())
    twin = build("linear", seed=3, quantized_params=True, recipe=RECIPES[recipe]())
    twin.load_state_dict(plain.state_dict())
    assert isinstance(twin.weight, STORED[recipe])
    x = torch.randn(8, WIDTH)
    if recipe != "nvfp4":  # whose values are not those of a second quantization
        assert torch.equal(twin.weight.dequantize(), module.weight.dequantize())
    data = io.BytesIO()
    torch.save(module.state_dict(), data)
    data.seek(0)
    loaded = torch.load(data, weights_only=True)
    assigned = qtensor.Linear(WIDTH, 96, recipe=RECIPES[recipe]())
    assigned.load_state_dict(loaded, assign=True)
    assert torch.equal(assigned(x), module(x))


def test_a_plain_linear_loads_and_is_loaded():
    module, plain = qtensor.Linear(WIDTH, 96), nn.Linear(WIDTH, 96)
    assert set(module.state_dict()) == set(plain.state_dict())
    module.load_state_dict(plain.state_dict())
    x = torch.randn(8, WIDTH)
    assert (module(x) - plain(x)).abs().max() < 1e-5
    plain.load_state_dict(qtensor.Linear(WIDTH, 96).state_dict())


@pytest.mark.parametrize("module", ["linear", "layernorm_linear", "swiglu_mlp"])
@pytest.mark.parametrize("quantized", [False, True])
def test_meta_then_reset_parameters(module, quantized):
    options = {"quantized_params": True, "recipe": RECIPES["mxfp8"]()} if quantized else {}
    made = build(module, device="meta", **options)
    assert all(p.is_meta for p in made.parameters())
    made.to_empty(device="cpu")
    torch.manual_seed(0)
    made.reset_parameters()
    expected = build(module, **options)
    x = torch.randn(8, WIDTH)
    assert torch.equal(made(x), expected(x))


# ---- quantized outputs and inputs ----------------------------------------------------------------

COMPILES = pytest.mark.nightly(reason="compiles for a second; other recipes do")


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.nightly(reason="aot_eager has the same ops")),
    ],
)
@pytest.mark.parametrize(
    "recipe",
    [
        "delayed",
        "mxfp8",
        *(pytest.param(name, marks=COMPILES) for name in ("current", "blockwise")),
    ],
)
def test_a_quantized_output_has_a_gradient(recipe, backend):
    chosen = RECIPES[recipe]()
    results = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        first, second = qtensor.Linear(WIDTH, 96), qtensor.Linear(96, 32)
        call = (lambda f: compiled(f, backend)[0]) if compile_it else (lambda f: f)
        chain = call(lambda t, a=first, b=second: b(a(t, quantized_output=True)))
        x = torch.linspace(-2, 2, 32 * WIDTH).reshape(32, WIDTH).requires_grad_()
        with region(chosen):
            y = chain(x)
            mid = call(lambda t, a=first: a(t, quantized_output=True))(x)
        assert isinstance(mid, STORED[recipe])
        assert mid.requires_grad
        y.sum().backward()
        grads = [x.grad, *[p.grad for m in (first, second) for p in m.parameters()]]
        results.append([y.detach(), mid.dequantize().detach(), *grads])
    eager, traced = results
    assert all(bool(grad.abs().sum() > 0) for grad in eager[2:])
    assert_same(traced, eager)


def test_a_quantized_output_by_name_and_without_a_recipe():
    module = build("linear")
    x = torch.randn(32, WIDTH)
    y = module(x, quantized_output="nvfp4")
    assert isinstance(y, qtensor.NVFP4Tensor)
    assert torch.equal(y.dequantize(), qtensor.quantize(module(x), "nvfp4").dequantize())
    y = module(x, quantized_output=qtensor.quantizer("mxfp4"))
    assert isinstance(y, qtensor.MXFP4Tensor)
    with pytest.raises(QTensorError, match="linear output: a quantized output needs a recipe"):
        module(x, quantized_output=True)
    with pytest.raises(QTensorError, match="no delayed-scaling state"):
        module(x, quantized_output="fp8_delayed")


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "blockwise"])
def test_an_input_that_is_quantized_already_is_read_as_it_is(recipe):
    chosen, module = RECIPES[recipe](), build("linear")
    x = torch.randn(32, WIDTH)
    quantizer = recipes.role_quantizers(chosen.key, "linear", "")["input"]
    with torch.no_grad(), region(chosen):
        assert torch.equal(module(quantizer(x)), module(x))
    q = quantizer.with_usage(rowwise=True, columnwise=True)(x).requires_grad_()
    with region(chosen):
        y = module(q)
    y.sum().backward()
    expected = step(module, module, x, chosen)
    assert torch.equal(y, expected[0])
    assert type(q.grad) is torch.Tensor


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: qtensor.Linear(0, 4), "in_features must be a positive integer; got 0"),
        (lambda: qtensor.Linear(4, 2.5), "out_features must be a positive integer; got 2.5"),
        (lambda: qtensor.Linear(4, 4, parallel_mode="both"), "'column' or 'row'; got 'both'"),
        (lambda: qtensor.Linear(4, 4, parallel_mode="row"), "needs the process group"),
        (lambda: qtensor.Linear(4, 4, sequence_parallel=True), "needs parallel_mode"),
        (
            lambda: qtensor.LayerNormLinear(4, 4, normalization="Batch"),
            "LayerNorm, RMSNorm; got 'Batch'",
        ),
        (lambda: qtensor.LayerNormLinear(4, 4, eps=-1), "eps must be a number >= 0"),
        (lambda: qtensor.LayerNormMLP(4, 4, activation="tanh"), "activation must be one of gelu"),
    ],
)
def test_construction(make, message):
    with pytest.raises(QTensorError, match=message):
        make()


def test_inputs_that_do_not_fit_name_the_layer_and_the_role():
    module = qtensor.Linear(WIDTH, 96, name="decoder.fc1")
    with pytest.raises(
        QTensorError, match=r"Linear\[decoder.fc1\] input: its last dim must be in_features, 64"
    ):
        module(torch.randn(4, 32))
    with pytest.raises(QTensorError, match=r"Linear\[decoder.fc1\] input: it must be float32"):
        module(torch.ones(4, WIDTH, dtype=torch.int32))
    with pytest.raises(QTensorError, match="last dim must be in_features"):
        qtensor.LayerNormMLP(WIDTH, 96)(torch.randn(4, 32))


@pytest.mark.parametrize(
    ("recipe", "sizes", "role", "multiple"),
    [
        ("current", (24, 32), "input", 16),
        ("delayed", (32, 24), "input", 16),
        ("blockwise", (40, 32), "input", 16),
        ("mxfp8", (48, 32), "input", 32),
        ("nvfp4", (24, 32), "input", 16),
    ],
)
def test_unaligned_features(recipe, sizes, role, multiple):
    module = qtensor.Linear(*sizes, name="head")
    message = (
        rf"Linear\[head\] {role}\[.*\]: in_features and out_features must be multiples of "
        rf"{multiple}"
    )
    with region(RECIPES[recipe]()), pytest.raises(QTensorError, match=message):
        module(torch.randn(4, sizes[0]))
    module(torch.randn(4, sizes[0]))
