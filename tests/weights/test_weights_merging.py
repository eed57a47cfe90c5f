"""``merge_lora_`` with plain factors: the bytes of each method, the report, and errors."""

import copy

import numpy as np
import pytest
import torch
from oracle.elements import ELEMENTS
from rounding_cases import (
    FORMATS,
    OPTIONS,
    Block,
    assert_same_bytes,
    make_inputs,
    named_buffers,
)
from torch import nn

import qtensor
from qtensor.weights.merged_rounding import rounded_sum
from qtensor.weights.rounding import grid_of

every_format = pytest.mark.parametrize("fmt", [*FORMATS, *OPTIONS])
METHODS = ("nearest", "stochastic", "gptq")


def quantized(fmt, **options):
    torch.manual_seed(0)
    model = Block()
    qtensor.quantize_(model, fmt, **options)
    return model


def factors(rows, columns, rank=4, size=0.03, seed=3):
    draw = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, columns, generator=draw)
    return a, size * torch.randn(rows, rank, generator=draw)


def pairs(size=0.03):
    return {"q": factors(48, 72, size=size), "out": factors(40, 48, size=size)}


def merge(model, method="nearest", adapters=None, **options):
    if method == "gptq":
        options.setdefault("calibration", make_inputs())
    options.setdefault("warn_below", 0)
    return qtensor.merge_lora_(model, adapters or pairs(), method=method, **options)


# ---- bytes


@every_format
def test_nearest_quantizes_the_sum(fmt):
    model, plain = quantized(fmt), Block()
    own = {name: model.get_submodule(name).weight for name in ("q", "k", "out")}
    wanted = {}
    for name, (a, b) in pairs().items():
        wanted[name] = own[name]._quantizer(own[name].dequantize() + b @ a)
    unchanged = own["k"].clone()
    report = merge(model)
    assert [layer.name for layer in report.layers] == ["q", "out"]
    for name, weight in wanted.items():
        assert model.get_submodule(name).weight is own[name]
        assert_same_bytes(own[name], weight)
    assert_same_bytes(own["k"], unchanged)
    assert {n for n, _ in model.named_parameters()} == {n for n, _ in plain.named_parameters()}


@every_format
@pytest.mark.parametrize("scales", ["nearest", "mse"])
def test_factors_are_taken_from_a_weight(fmt, scales):
    """A grid that takes the factors of a weight rebuilds its values and its factors."""
    weight = quantized(fmt, rounding=qtensor.Rounding(scales=scales)).q.weight
    grid = grid_of(weight._quantizer, weight.dequantize())
    stored = grid.take(named_buffers(weight))
    assert tuple(stored.shape) == grid.factor_counts()
    spread = stored.repeat_interleave(grid.block[0], 0).repeat_interleave(grid.block[1], 1)
    codes, values = grid.round(grid.matrix, spread[:48, :72], grid.wide)
    assert torch.equal(values, weight.dequantize())
    rebuilt = named_buffers(grid.tensor(codes, stored))
    for name, buffer in named_buffers(weight).items():
        if buffer.dtype == torch.float32:
            # Encode scales are reciprocals of what is stored; the amax is stored itself.
            torch.testing.assert_close(rebuilt[name], buffer, rtol=2**-22, atol=0)
        elif "scale" in name:
            assert torch.equal(rebuilt[name], buffer), name


@every_format
def test_stochastic_draws_one_of_two_neighbors_with_the_mean_of_the_sum(fmt):
    weight = quantized(fmt).q.weight
    a, b = factors(48, 72)
    target = weight.dequantize() + b @ a
    generator = torch.Generator().manual_seed(5)
    count, total = 64, torch.zeros(48, 72, dtype=torch.float64)
    lows, highs = torch.full((48, 72), np.inf), torch.full((48, 72), -np.inf)
    for _ in range(count):
        drawn = rounded_sum(weight, target, "stochastic", [None], generator).dequantize()
        total += drawn.double()
        lows, highs = torch.minimum(lows, drawn), torch.maximum(highs, drawn)
    step = highs - lows
    # A draw is off by less than a step and its deviation at most half of one: six deviations of
    # the mean of 64 draws are 3/8 of a step. A value that was drawn once alone lies on the grid,
    # or is so near to it that 64 draws gave the same, with an error below a quarter of a step.
    element = ELEMENTS[weight._quantizer.element.name]
    largest_step = float(np.diff(np.unique(element.values[np.isfinite(element.values)])).max())
    assert largest_step > 0
    error = (total / count - target).abs()
    varied = step > 0
    assert varied.float().mean() > 0.5
    assert (error[varied] <= 0.375 * step[varied] + 1e-6).all()
    inside = varied & (target >= lows - 1e-6) & (target <= highs + 1e-6)
    assert (inside == varied).all()


def test_stochastic_can_be_repeated():
    drawn = []
    for seed in (1, 1, 2):
        model = quantized("nvfp4")
        merge(model, "stochastic", generator=torch.Generator().manual_seed(seed))
        drawn.append(model.q.weight)
    assert_same_bytes(drawn[0], drawn[1])
    assert not torch.equal(drawn[0].dequantize(), drawn[2].dequantize())


@every_format
def test_gptq_changes_outputs_as_wanted(fmt):
    """The change of outputs for unseen inputs is nearer to the wanted one than with nearest."""
    errors, (a, b) = {}, factors(48, 72)
    x = torch.cat(make_inputs(seed=2)).flatten(0, 1)
    for method in METHODS:
        model = quantized(fmt)
        before = model.q.weight.dequantize()
        report = merge(model, method)
        difference = model.q.weight.dequantize() - before - b @ a
        errors[method] = float((x @ difference.t()).square().sum())
        assert report.method == method
    assert errors["gptq"] < 0.7 * errors["nearest"]
    assert errors["gptq"] < errors["stochastic"]


@every_format
def test_gptq_leaves_a_weight_without_a_change_as_it_is(fmt):
    model = quantized(fmt, rounding="mse")
    before = {name: model.get_submodule(name).weight.dequantize() for name in ("q", "out")}
    none = {name: (a, torch.zeros_like(b)) for name, (a, b) in pairs().items()}
    report = merge(model, "gptq", none)
    for name, values in before.items():
        # The factors of FP8 pass through two reciprocals.
        torch.testing.assert_close(
            model.get_submodule(name).weight.dequantize(), values, rtol=2**-22, atol=0
        )
    assert [layer.change for layer in report.layers] == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.nightly(reason="1024x1024; a quarter of it in test_the_share_that_survives")
@pytest.mark.parametrize(("change", "least"), [(0.03, 0.6), (0.1, 0.88)])
def test_the_share_that_survives_in_a_large_layer(change, least):
    assert survived(1024, change, "gptq") > least


@pytest.mark.parametrize(("change", "least"), [(0.03, 0.6), (0.1, 0.85)])
def test_the_share_that_survives(change, least):
    """Rounding to nearest loses most of a small change of an NVFP4 weight; GPTQ does not."""
    assert survived(256, change, "gptq") > least
    assert survived(256, change, "nearest") < (0.3 if change < 0.1 else 0.76)


def survived(size, change, method):
    """Cosine of the outputs' change for unseen inputs whose covariance has eigenvalues 1 / i."""
    torch.manual_seed(0)
    base = qtensor.quantize(torch.randn(size, size), "nvfp4")
    a, b = torch.randn(16, size), torch.randn(size, 16)
    scaling = change * float(base.dequantize().norm() / (b @ a).norm())
    directions, _ = torch.linalg.qr(torch.randn(size, size))
    spread = torch.arange(1, size + 1).float().rsqrt()
    seen, unseen = (torch.randn(4 * size, size) * spread @ directions.t() for _ in range(2))
    model = nn.Sequential(nn.Linear(size, size, bias=False))
    model[0].weight = nn.Parameter(base.clone(), requires_grad=False)
    adapters = {"0": (a, b, scaling)}
    calibration = list(seen.split(256))
    report = qtensor.merge_lora_(
        model, adapters, method=method, calibration=calibration, warn_below=0
    )
    assert report.layers[0].change == pytest.approx(change, rel=1e-3)
    real = unseen @ (model[0].weight.dequantize() - base.dequantize()).t()
    wanted = unseen @ (scaling * b @ a).t()
    return float((real * wanted).sum() / (real.norm() * wanted.norm()))


# ---- the report


@pytest.mark.parametrize("method", METHODS)
def test_the_report_tells_what_is_left(method):
    model, inputs = quantized("nvfp4"), make_inputs()
    before = model.q.weight.dequantize().double()
    a, b = factors(48, 72)
    report = merge(model, method, {"q": (2 * a, b, 0.5)}, calibration=inputs)
    (layer,) = report.layers
    real, wanted = model.q.weight.dequantize().double() - before, (b @ a).double()
    assert layer.format == "nvfp4"
    assert layer.change == pytest.approx(float(wanted.norm() / before.norm()), rel=1e-5)
    assert layer.kept == pytest.approx(float((real * wanted).sum() / wanted.square().sum()), 1e-5)
    cosine = (real * wanted).sum() / (real.norm() * wanted.norm())
    assert layer.weight_cosine == pytest.approx(float(cosine), rel=1e-5)
    x = torch.cat(inputs).flatten(0, 1).double()
    outputs, goal = x @ real.t(), x @ wanted.t()
    cosine = (outputs * goal).sum() / (outputs.norm() * goal.norm())
    assert layer.output_cosine == pytest.approx(float(cosine), rel=1e-4)
    assert layer.survived == layer.output_cosine
    assert "cosine of outputs" in str(report)
    assert f"{layer.kept:.1%}" in str(report)


def test_the_warning_names_the_layers():
    small = pairs(size=1e-4)
    with pytest.warns(
        UserWarning, match=r"less than 50% of the change is left in 2 of 2.*q \(\d+%\)"
    ):
        qtensor.merge_lora_(quantized("nvfp4"), small)
    with pytest.warns(UserWarning, match=r"change of outputs \(cosine\).*merge_aware_"):
        qtensor.merge_lora_(
            quantized("nvfp4"), small, method="gptq", calibration=make_inputs(), warn_below=0.99
        )
    qtensor.merge_lora_(quantized("mxfp8"), pairs(size=0.1))  # warnings are errors
    report = qtensor.merge_lora_(quantized("nvfp4"), pairs(size=1e-5), warn_below=0)
    assert min(layer.survived for layer in report.layers) < 0, "0 never warns"


def test_noise_beside_the_change_is_a_loss():
    """The factors of MXFP4 round down: 4 - tiny decodes as 3. That noise hides a small change."""
    with pytest.warns(UserWarning, match="is left in 2 of 2"):
        report = qtensor.merge_lora_(quantized("mxfp4"), pairs(size=0.001))
    assert min(layer.weight_cosine for layer in report.layers) < 0.2


def test_plain_weights_take_the_change():
    model = Block()
    before = model.q.weight.detach().clone()
    a, b = factors(48, 72)
    report = qtensor.merge_lora_(model, {"q": (a, b)})
    assert torch.equal(model.q.weight, before + b @ a)
    assert report.layers[0].format == "plain"
    assert report.layers[0].kept == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS)
def test_other_dtypes(dtype, method):
    model = nn.Sequential(nn.Linear(64, 48, dtype=dtype))
    qtensor.quantize_(model, "nvfp4")
    adapter = {"0": tuple(each.to(dtype) for each in factors(48, 64, size=0.1))}
    inputs = [torch.randn(99, 64, dtype=dtype)]
    merge(model, method, adapter, calibration=inputs)
    assert model[0].weight.dtype == dtype
    assert model(inputs[0]).dtype == dtype


def test_later_layers_see_merged_ones_and_an_interrupted_run_goes_on():
    whole, parts = quantized("nvfp4"), quantized("nvfp4")
    merge(whole, "gptq")

    def stop(done, total, name):
        assert (done, total, name) == (1, 2, "q")
        raise KeyboardInterrupt

    before = parts.out.weight.clone()
    with pytest.raises(KeyboardInterrupt):
        merge(parts, "gptq", progress=stop)
    assert_same_bytes(parts.q.weight, whole.q.weight)
    assert_same_bytes(parts.out.weight, before)
    merge(parts, "gptq", {"out": pairs()["out"]})
    assert_same_bytes(parts.out.weight, whole.out.weight)
    assert not any(m._forward_pre_hooks for m in parts.modules())
    assert parts.training


# ---- errors


def wrong_rank():
    a, b = factors(48, 72)
    return {"q": (a, b[:, :2])}


ERRORS = {
    "method": ({"method": "best"}, "method is one of nearest, stochastic, gptq; got 'best'"),
    "inputs": ({"method": "gptq", "calibration": None}, "needs calibration"),
    "generator": ({"generator": torch.Generator()}, 'generator is for method="stochastic"'),
    "name": ({"adapters": {"v": factors(48, 72)}}, "name of a linear layer; got 'v'. Choose.*q, k"),
    "shape": ({"adapters": {"q": factors(40, 48)}}, r"shape of its weight, \(48, 72\).*\(40, 48\)"),
    "pair": ({"adapters": {"q": torch.ones(4, 4)}}, r"\(A, B\) or \(A, B, scaling\)"),
    "rank": ({"adapters": {"q": wrong_rank()["q"]}}, r"A \(r, K\) and B \(N, r\).*B \(48, 2\)"),
    "swapped": ({"adapters": {"q": factors(48, 72)[::-1]}}, "Pass A first"),
    "scaling": ({"adapters": {"q": (*factors(48, 72), "2")}}, "scaling of an adapter is a number"),
    "complex": ({"adapters": {"q": (factors(48, 72)[0], 1j * torch.ones(48, 4))}}, "floating numb"),
    "flag": ({"warn_below": True}, "warn_below is a number from 0 on; got True"),
    "limit": ({"warn_below": "half"}, "warn_below is a number from 0 on; got 'half'"),
    "dict": ({"adapters": [factors(48, 72)]}, "a dict from names"),
    "nan": ({"adapters": {"q": (torch.full((4, 72), torch.nan), torch.ones(48, 4))}}, "NaN or inf"),
    "meta": ({"adapters": {"q": [t.to("meta") for t in factors(48, 72)]}}, "hold data; got a tens"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_change_nothing(case):
    options, rule = ERRORS[case]
    model = quantized("nvfp4")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(qtensor.QTensorError, match=f"merge_lora_: .*{rule}"):
        qtensor.merge_lora_(model, **{"adapters": pairs(), **options})
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_model_without_adapters():
    with pytest.raises(qtensor.QTensorError, match=r"needs an active adapter.*got none"):
        qtensor.merge_lora_(quantized("nvfp4"))


class Foreign(torch.Tensor):
    """A weight of another library, or a part of one."""


def test_a_tied_weight_is_refused():
    """The change reached the embedding too."""
    model = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 32, bias=False))
    model[1].weight = model[0].weight
    before = model[0].weight.detach().clone()
    adapter = {"1": (torch.ones(2, 64), torch.ones(32, 2))}
    with pytest.raises(qtensor.QTensorError, match=r"weight of 1 is tied: 0\.weight, 1\.weight"):
        qtensor.merge_lora_(model, adapter)
    assert torch.equal(model[0].weight, before)


def test_a_weight_of_another_class():
    model = nn.Sequential(nn.Linear(64, 64))
    model[0].weight = nn.Parameter(torch.ones(64, 64).as_subclass(Foreign))
    with pytest.raises(qtensor.QTensorError, match=r"quantized or plain, and whole; got a Foreign"):
        merge(model, "nearest", {"0": factors(64, 64)})


def test_a_weight_that_rounds_to_nearest_alone():
    model = nn.Sequential(nn.Linear(64, 64))
    qtensor.quantize_(model, qtensor.quantizer("nvfp4", columnwise=True))
    with pytest.raises(qtensor.QTensorError, match="merge_lora_: columnwise data must follow"):
        merge(model, "stochastic", {"0": factors(64, 64)})
    merge(model, "nearest", {"0": factors(64, 64)})


# ---- q += change


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8"])
def test_a_statement_warns_of_a_lost_change(fmt):
    q = qtensor.quantize(torch.randn(64, 64), fmt)
    small = 1e-4 * torch.randn(64, 64)
    with pytest.warns(UserWarning, match=rf"\+= \[{fmt}\]: rounding leaves \d+% .*merge_lora_"):
        q += small
    with pytest.warns(UserWarning, match=rf"-= \[{fmt}\]: rounding leaves \d+%"):
        q -= small
    # Warnings are errors in these tests: none for a large change, a method, or a scalar.
    q += torch.randn(64, 64)
    q.add_(small)
    q += 1e-4


def test_a_compiled_statement_says_nothing():
    def add(q, change):
        q += change
        return q

    q = qtensor.quantize(torch.randn(64, 64), "nvfp4")
    small = 1e-4 * torch.randn(64, 64)
    wanted = q.clone().add_(small)
    done = torch.compile(add, fullgraph=True, backend="aot_eager")(q, small)
    assert torch.equal(done.dequantize(), wanted.dequantize())
