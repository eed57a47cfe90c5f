"""``convert_`` of ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer``: torch's results,
torch's names, torch's arguments.
"""

from __future__ import annotations

import copy

import pytest
import torch
from attention_module_cases import sqnr
from convert_models import names
from formats import assert_same_bytes
from torch import nn

import qtensor
from qtensor import recipes
from qtensor.modules.torch_attention import TorchMultiheadAttention

E, HEADS, B, L, S = 64, 4, 3, 24, 40
FLOAT32 = 90.0
"""Decibels: other orders of the sums of float32."""


class Holder(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(E, HEADS, **options)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, *args, **kwargs):
        return self.attention(*args, **kwargs)


def pair(recipe=None, **options):
    """torch's module and the converted one, with equal parameters."""
    plain = Holder(**options)
    converted = copy.deepcopy(plain)
    report = qtensor.convert_(converted, recipe)
    assert names(report.swapped) == ["attention"]
    assert type(converted.attention) is TorchMultiheadAttention
    return plain, converted


def run(model, inputs, **options):
    """Output, probabilities and gradients."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    given = [inputs[0]] * 3 if len(inputs) == 1 else [*inputs, inputs[-1]][:3]
    y, weights = model(*given, **options)
    model.zero_grad()
    y.to(torch.promote_types(y.dtype, torch.float32)).square().sum().backward()
    gradients = [p.grad for _, p in sorted(model.named_parameters())]
    return [y.detach(), *([] if weights is None else [weights.detach()]), *gradients] + [
        t.grad for t in inputs
    ]


def causal(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).triu(1)


def padding(keys):
    return torch.arange(keys) >= torch.tensor([[keys], [keys - 3], [keys - 9]])


MASKS = {
    "none": lambda q, k: {},
    "causal": lambda q, k: {"attn_mask": causal(q, k), "is_causal": True},
    "padding": lambda q, k: {"key_padding_mask": padding(k)},
    "both": lambda q, k: {"attn_mask": causal(q, k), "key_padding_mask": padding(k)},
    "floats": lambda q, k: {
        "attn_mask": torch.linspace(-1, 1, B * HEADS * q * k).view(-1, q, k),
        "key_padding_mask": torch.zeros(B, k).masked_fill(padding(k), -torch.inf),
    },
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("need_weights", [False, True, "each"])
@pytest.mark.parametrize("sources", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_recipe_the_results_are_torchs(mask, batch_first, need_weights, sources, dtype):
    plain, converted = pair(batch_first=batch_first, bias=sources != 2, dtype=dtype)
    sizes = (L,) if sources == 1 else (L, S, S)[:sources]
    inputs = [torch.randn(B, n, E).to(dtype) for n in sizes]
    if not batch_first:
        inputs = [t.transpose(0, 1) for t in inputs]
    options = MASKS[mask](L, sizes[-1])
    if need_weights == "each":
        options["average_attn_weights"] = False
    options["need_weights"] = bool(need_weights)
    exact = copy.deepcopy(plain).double()
    want = run(exact, [t.double() for t in inputs], **floats(options, torch.float64))
    options = floats(options, dtype)
    got, own = (run(model, inputs, **options) for model in (converted, plain))
    assert len(got) == len(own)
    for a, b, c in zip(got, own, want, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        # As near to the exact result as torch's: another order of roundings, at most twice as far.
        assert sqnr(a, c) > min(sqnr(b, c) - 6, 110)


def floats(options, dtype):
    """Masks of floats in another dtype."""
    return {
        k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in options.items()
    }


def test_one_sequence_without_a_batch():
    plain, converted = pair()
    x = torch.randn(L, E)
    for a, b in zip(converted(x, x, x), plain(x, x, x), strict=True):
        assert a.shape == b.shape
        assert sqnr(a, b) > FLOAT32


@pytest.mark.parametrize(
    "recipe",
    [
        recipes.MXFP8BlockScaling(),
        recipes.DelayedScaling(),
        recipes.MXFP8BlockScaling(fp8_dpa=True),
        recipes.Float8CurrentScaling(fp8_dpa=True),
    ],
    ids=["mxfp8", "delayed", "mxfp8 attention", "current attention"],
)
@pytest.mark.parametrize("sources", [1, 2])
def test_projections_follow_the_recipe(recipe, sources):
    plain, converted = pair(recipe, batch_first=True)
    inputs = [torch.randn(B, 32 * n, E) for n in range(1, sources + 1)]
    got, want = (run(m, inputs, need_weights=False) for m in (converted, plain))
    assert all(12 < sqnr(a, b) < 40 for a, b in zip(got, want, strict=True))
    with qtensor.autocast(enabled=False):
        again = run(converted, inputs, need_weights=False)
    assert all(sqnr(a, b) > 90 for a, b in zip(again, want, strict=True))
    if recipe.fp8_dpa:
        with pytest.raises(qtensor.UnsupportedError, match="need_weights=False"):
            converted(*inputs[:1] * 3)


def test_parameters_names_and_the_way_back():
    plain, converted = pair(recipes.MXFP8BlockScaling(), dropout=0.25, batch_first=True)
    source = dict(plain.named_parameters())
    assert dict(converted.state_dict()).keys() == dict(plain.state_dict()).keys()
    for name, parameter in converted.named_parameters():
        assert_same_bytes(parameter.detach(), source[name].detach(), name)
    converted.load_state_dict(plain.state_dict())
    before = list(converted.parameters())
    qtensor.revert_(converted)
    assert type(converted.attention) is nn.MultiheadAttention
    assert [id(p) for p in converted.parameters()] == [id(p) for p in before]
    assert repr(converted) == repr(plain)
    x = torch.randn(B, L, E)
    converted.eval(), plain.eval()
    assert_same_bytes(converted(x, x, x)[0].detach(), plain(x, x, x)[0].detach(), "output")


def test_weights_stored_quantized():
    plain = Holder(batch_first=True)
    report = qtensor.convert_(plain, recipes.MXFP8BlockScaling(), quantized_params=True)
    assert "2 weights quantized" in report.swapped[0].note
    assert isinstance(plain.attention.in_proj_weight, qtensor.MXFP8Tensor)
    assert isinstance(plain.attention.out_proj.weight, qtensor.MXFP8Tensor)
    x = torch.randn(B, 32, E)
    y = plain(x, x, x, need_weights=False)[0]
    assert y.isfinite().all()
    parts = plain(x, x.clone(), x.clone(), need_weights=False)[0]
    assert sqnr(parts, y) > 100
    qtensor.revert_(plain)
    assert type(plain.attention.in_proj_weight) is nn.Parameter


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Holder(kdim=32, vdim=32), "kdim, vdim"),
        (lambda: Holder(add_bias_kv=True), "add_bias_kv and add_zero_attn"),
        (lambda: Holder(add_zero_attn=True), "add_bias_kv and add_zero_attn"),
    ],
)
def test_modules_that_are_left_alone(make, reason):
    report = qtensor.convert_(make(), recipes.MXFP8BlockScaling())
    assert not report.swapped
    assert reason in report.skipped[0].note


def test_mistakes():
    _, converted = pair()
    x = torch.randn(L, B, E)
    for call, message in (
        (lambda: converted(x[..., :8], x, x), "in_features, 64"),
        (lambda: converted(x, x, x, is_causal=True), "goes with attn_mask"),
        (lambda: converted(x, x, x, key_padding_mask=padding(L + 1)), "key_padding_mask must be"),
        (lambda: converted(x, x, x, attn_mask=causal(L, L + 1)), "attn_mask must be"),
        (lambda: converted(x, x, x, attn_mask=causal(L, L).long()), "bool .* or floating"),
    ):
        with pytest.raises(qtensor.QTensorError, match=message):
            call()
    with pytest.raises(qtensor.QTensorError, match="bare MultiheadAttention"):
        qtensor.convert_(nn.MultiheadAttention(E, HEADS), None)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_an_encoder(norm_first, training):
    layer = nn.TransformerEncoderLayer(
        E, HEADS, 96, batch_first=True, norm_first=norm_first, dropout=0.0
    )
    plain = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).train(training)
    converted = copy.deepcopy(plain)
    report = qtensor.convert_(converted, None)
    assert len(report.swapped) == 6
    assert not report.skipped
    x = torch.randn(B, L, E)
    with torch.set_grad_enabled(training):
        for mask in ({}, {"src_key_padding_mask": padding(L)}):
            real = ~padding(L) if mask else torch.ones(B, L, dtype=torch.bool)
            assert sqnr(converted(x, **mask)[real], plain(x, **mask)[real]) > 90
    recipe = recipes.MXFP8BlockScaling(fp8_dpa=True)
    with qtensor.autocast(recipe=recipe), torch.set_grad_enabled(training):
        assert 15 < sqnr(converted(x), plain(x)) < 40


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.nightly(reason="inductor compiles C++")),
    ],
)
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled(backend):
    recipe = recipes.MXFP8BlockScaling(fp8_dpa=True)
    layer = nn.TransformerEncoderLayer(E, HEADS, 96, batch_first=True, dropout=0.0)
    model = nn.Sequential(layer)
    qtensor.convert_(model, recipe)
    traced = torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True)
    x = torch.randn(B, L, E)
    assert sqnr(traced(x), model(x)) > (60 if backend == "inductor" else 300)
