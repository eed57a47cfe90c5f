"""``qtensor.debug.record``: what is recorded, and that the model does not notice."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch_process
from debug_cases import WIDTH, block, inputs, plain_model, traces, train
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import RECIPES, assert_same, compiled

import qtensor
from qtensor import recipes
from qtensor.debug.log import ROLES
from qtensor.debug.op import SINKS

ROOT = Path(__file__).parents[2]
_WIDE = pytest.mark.nightly(reason="delayed scaling under aot_eager has state too")


def by_tensor(log, step=0):
    """(layer, role) -> record of a step."""
    return {(r.layer, r.role): r for r in log.records if r.step == step}


# ---- the model does not notice


@pytest.mark.parametrize("recipe", RECIPES)
def test_results_are_equal_and_nothing_stays(recipe):
    """A model that is recorded for two of four steps, and one that is not."""
    model, twin = block(RECIPES[recipe]()), block(RECIPES[recipe]())
    before = traces(model)
    want = [train(twin, twin, inputs()) for _ in range(4)]
    got = [train(model, model, inputs())]
    with qtensor.debug.record(model) as log:
        assert traces(model) != before
        got += [train(model, model, inputs()) for _ in range(2)]
    assert traces(model) == before
    assert not SINKS
    got.append(train(model, model, inputs()))
    for ours, theirs in zip(got, want, strict=True):
        assert_same(ours, theirs)
    labels = ("first", "plain", "mlp.fc1_weight", "mlp.fc2_weight")
    assert log.layers == labels
    assert [(r.step, r.calls) for r in log.records] == [(s, 1) for s in (0, 1) for _ in range(24)]
    assert set(by_tensor(log)) == {(layer, role) for layer in labels for role in ROLES}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        ("delayed", "aot_eager"),
        pytest.param("delayed", "inductor", marks=[_WIDE, pytest.mark.slow]),
        pytest.param("nvfp4", "aot_eager", marks=_WIDE),
        pytest.param("nvfp4", "inductor", marks=[_WIDE, pytest.mark.slow]),
    ],
)
def test_compiled_results_are_equal(recipe, backend):
    """One graph without recording, one more with it, and no graph break."""
    model, twin = block(RECIPES[recipe]()), block(RECIPES[recipe]())
    run_twin, _ = compiled(twin, backend)
    want = [train(run_twin, twin, inputs()) for _ in range(4)]
    torch._dynamo.reset()
    call, counter = compiled(model, backend)
    before = traces(model)
    got = [train(call, model, inputs())]
    assert counter.frame_count == 1
    with qtensor.debug.record(call) as log:
        got.append(train(call, model, inputs()))
    assert counter.frame_count == 2
    got.append(train(call, model, inputs()))
    with qtensor.debug.record(call) as second:
        got.append(train(call, model, inputs()))
    assert counter.frame_count == 2
    assert traces(model) == before
    for ours, theirs in zip(got, want, strict=True):
        assert_same(ours, theirs)
    eager = block(RECIPES[recipe]())
    train(eager, eager, inputs())
    with qtensor.debug.record(eager) as expected:
        train(eager, eager, inputs())
    # Inductor may round norms and activations in another way.
    if backend == "aot_eager":
        # By their text, where NaN equals NaN.
        texts = [{k: str(r) for k, r in by_tensor(each).items()} for each in (log, expected)]
        assert texts[0] == texts[1]
    assert set(by_tensor(log)) == set(by_tensor(second)) == set(by_tensor(expected))
    order = [(r.layer, r.role) for r in log.records if "weight" not in r.role]
    assert order == [(r.layer, r.role) for r in expected.records if "weight" not in r.role]


def test_hooks_are_removed_after_an_exception():
    model = block(recipes.MXFP8BlockScaling())
    before = traces(model)
    recording = qtensor.debug.record(model)

    def fails():
        with recording:
            train(model, model, inputs())
            raise RuntimeError("from the block")

    with pytest.raises(RuntimeError, match="from the block"):
        fails()
    assert traces(model) == before
    assert len(recording.log.records) == 24


def test_hooks_are_removed_if_a_recording_cannot_begin(monkeypatch):
    model = block()
    before = traces(model)
    with qtensor.debug.record(model):
        inside = traces(model)
        rule = "debug.record: a model has one recording at a time; got a Linear that is being"
        with pytest.raises(qtensor.QTensorError, match=rule):
            qtensor.debug.record(model).__enter__()
        assert traces(model) == inside
    assert traces(model) == before


def test_a_forward_of_the_instance_comes_back():
    """Some libraries replace ``forward`` of a module, for example to move its weights."""
    model = plain_model(2)
    plain = model[0].forward
    calls = []

    def own(x):
        calls.append(x.shape)
        return plain(x)

    model[0].forward = own
    with qtensor.debug.record(model) as log:
        model(inputs())
    assert model[0].forward is own
    assert calls == [(32, WIDTH)]
    assert ("0", "output") in by_tensor(log)


def test_nothing_is_imported_until_it_is_used():
    script = (
        "import sys, torch, qtensor; qtensor.Linear(32, 32)(torch.ones(2, 32)); "
        "assert not [m for m in sys.modules if m.startswith('qtensor.debug')]; "
        "assert callable(qtensor.debug.record)"
    )
    torch_process.run(script, folder=ROOT)


# ---- what is recorded


def expected_numbers(x, q):
    """The numbers of a record by their definitions, in float64."""
    x, decoded = x.double(), q.dequantize(torch.float64)
    error = (x - decoded).square().sum().item()
    return {
        "amax": x.abs().max().item(),
        "sqnr_db": 10 * math.log10(x.square().sum().item() / error),
        "flushed_to_zero": ((x != 0) & (decoded == 0)).double().mean().item(),
    }


def assert_numbers(record, expected):
    for name, value in expected.items():
        assert getattr(record, name) == pytest.approx(value, rel=1e-12), name


def test_the_numbers_of_a_qtensor_layer():
    """Input and weight as fprop reads them, and the gradient as dgrad reads it."""
    layer = qtensor.Linear(WIDTH, 96, recipe=recipes.MXFP8BlockScaling())
    x = inputs().requires_grad_()
    with qtensor.debug.record(layer) as log:
        out = layer(x)
        out.retain_grad()
        out.square().sum().backward()
    found = by_tensor(log)
    tensors = {"input": x, "weight": layer.weight, "grad_output": out.grad}
    for role, tensor in tensors.items():
        record = found["", role]
        assert record.quantizer == "mxfp8"
        assert record.shape == tuple(tensor.shape)
        tensor = tensor.detach()
        assert_numbers(record, expected_numbers(tensor, qtensor.quantize(tensor, "mxfp8")))
    others = {"output": out, "grad_input": x.grad, "grad_weight": layer.weight.grad}
    for role, tensor in others.items():
        record = found["", role]
        assert (record.quantizer, record.note) == ("", "")
        assert record.amax == tensor.abs().max().item()
        assert math.isnan(record.sqnr_db)


def test_the_gradients_of_a_quantized_tensor_between_layers():
    """It is the output of one layer and the input of the next; both record its gradient."""
    recipe = recipes.MXFP8BlockScaling()
    model = nn.ModuleList(qtensor.Linear(WIDTH, WIDTH, recipe=recipe) for _ in range(2))
    with qtensor.debug.record(model, count="manual") as log:
        hidden = model[0](inputs().requires_grad_(), quantized_output=True)
        model[1](hidden).square().sum().backward()
    found = by_tensor(log)
    assert set(found) == {(layer, role) for layer in "01" for role in ROLES}
    assert found["0", "grad_output"].amax == found["1", "grad_input"].amax > 0
    assert found["0", "grad_output"].quantizer == "mxfp8"


def test_delayed_scaling_uses_the_factors_of_the_call():
    """The first step has the factor 1; the second comes from the maxima of the first."""
    layer = qtensor.Linear(WIDTH, 96, recipe=recipes.DelayedScaling())
    with qtensor.debug.record(layer) as log:
        train(layer, layer, inputs())
        train(layer, layer, 2 * inputs(seed=5))
    scales = [by_tensor(log, step)["", "input"].scale_min for step in (0, 1)]
    assert scales[0] == 1.0
    factor = torch.tensor(448.0) / inputs().abs().max()
    assert scales[1] == pytest.approx(1 / factor.item(), rel=1e-6)
    assert by_tensor(log, 1)["", "input"].saturated > 0


def test_counts_of_columns_and_blocks():
    x = inputs()
    x[:, 3] = 0
    x[:, 32:] = 0
    x[:, 5] = 1000
    with qtensor.debug.record(model := plain_model(1), format="mxfp8") as log:
        model(x)
    record = by_tensor(log)["0", "input"]
    assert (record.columns, record.dead_columns, record.outlier_channels) == (64, 33, 1)
    assert record.zero_blocks == 0.5
    assert by_tensor(log)["0", "output"].quantizer == ""


def test_quantized_weights_in_a_plain_layer():
    model, plain = plain_model(2), plain_model(2)
    for layer in model:
        layer.weight = nn.Parameter(qtensor.quantize(layer.weight.detach(), "nvfp4"))
    with qtensor.debug.record(model, reference=plain) as log:
        model(inputs())
    weight = plain[1].weight.detach()
    record = by_tensor(log)["1", "weight"]
    assert record.quantizer == "nvfp4"
    assert_numbers(record, expected_numbers(weight, qtensor.quantize(weight, "nvfp4")))
    with qtensor.debug.record(model) as log:
        model(inputs())
    record = by_tensor(log)["1", "weight"]
    assert math.isnan(record.sqnr_db)
    assert record.scale_max > 0
    assert record.amax == model[1].weight.dequantize().abs().max().item()


def test_what_a_format_would_do():
    """A format for all operands, and one for each role."""
    model = plain_model(2)
    with qtensor.debug.record(model, format="nvfp4") as log:
        train(model, model, inputs())
    found = by_tensor(log)
    quantized = {key for key, record in found.items() if record.quantizer == "nvfp4"}
    assert quantized == {(n, r) for n in "01" for r in ("input", "weight", "grad_output")}
    weight = model[0].weight.detach()
    expected = expected_numbers(weight, qtensor.quantize(weight, "nvfp4"))
    assert_numbers(found["0", "weight"], expected)
    chosen = {"weight": qtensor.quantizer("mxfp6"), "output": "fp8", "input": None}
    with qtensor.debug.record(model, format=chosen) as log:
        model(inputs())
    texts = {role: r.quantizer for (name, role), r in by_tensor(log).items() if name == "0"}
    assert texts == {"input": "", "weight": "mxfp6", "output": "fp8"}


def test_stochastic_rounding_draws_nothing():
    model = plain_model(1)
    torch.manual_seed(4)
    want = torch.randn(3)
    torch.manual_seed(4)
    fmt = qtensor.quantizer("nvfp4", stochastic_rounding=True)
    with qtensor.debug.record(model, format=fmt) as log:
        model(inputs())
    assert torch.equal(torch.randn(3), want)
    assert by_tensor(log)["0", "input"].quantizer == fmt.canonical


def test_a_format_that_refuses_a_tensor_says_why():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).double()
    with qtensor.debug.record(model, format="mxfp8") as log:
        model(inputs().double())
    record = by_tensor(log)["0", "input"]
    assert record.quantizer == ""
    assert "float32, bfloat16 or float16; got torch.float64" in record.note
    assert record.amax == inputs().abs().max().item()
    assert record.note in str(log)


def test_an_input_by_keyword():
    model = plain_model(1)
    with qtensor.debug.record(model[0]) as log:
        out = model[0](input=inputs())
    assert torch.equal(out, model[0](inputs()))
    assert by_tensor(log)["", "input"].shape == (32, WIDTH)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_conv1d_of_transformers(compiler):
    """Its weight (K, N) is recorded as that of the linear layer with the same product."""
    conv1d = pytest.importorskip("transformers.pytorch_utils", reason="needs the extra").Conv1D
    layer, twin = conv1d(96, WIDTH), nn.Linear(WIDTH, 96)
    with torch.no_grad():
        twin.weight.copy_(layer.weight.t())
        twin.bias.copy_(layer.bias)
    formats = dict.fromkeys(("input", "weight", "grad_output", "grad_weight"), "nvfp4")
    logs = []
    for module in (layer, twin):
        call = module if compiler is None else torch.compile(module, backend=compiler)
        with qtensor.debug.record(call, format=formats) as log:
            train(call, module, inputs())
        logs.append(by_tensor(log))
    assert list(logs[0]) == list(logs[1])
    assert logs[0]["", "weight"] == logs[1]["", "weight"]
    assert logs[0]["", "weight"].shape == (96, WIDTH)
    for role in ("grad_weight", "output"):
        expected = pytest.approx(logs[1]["", role].amax, rel=1e-5)
        assert (logs[0]["", role].amax, logs[0]["", role].shape) == (
            expected,
            logs[1]["", role].shape,
        )


def test_a_quantized_weight_of_conv1d():
    """It is stored as (K, N), the transpose of quantized values (N, K)."""
    conv1d = pytest.importorskip("transformers.pytorch_utils", reason="needs the extra").Conv1D
    layer = conv1d(96, WIDTH)
    values = layer.weight.detach().t().contiguous()
    stored = qtensor.quantize(values, "nvfp4")
    layer.weight = nn.Parameter(stored.t(), requires_grad=False)
    with qtensor.debug.record(layer, reference={"weight": values.t()}) as log:
        layer(inputs())
    record = by_tensor(log)["", "weight"]
    assert (record.quantizer, record.shape) == ("nvfp4", (96, WIDTH))
    assert_numbers(record, expected_numbers(values, stored))


# ---- NaN hunting


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_the_first_nan_is_found(where, compiler):
    """A NaN enters at layer 1 in step 2."""
    model, poison = plain_model(3), torch.zeros(1)
    call = model if compiler is None else torch.compile(model, backend=compiler, fullgraph=True)
    with qtensor.debug.record(call) as log:
        for step in range(4):
            poison = float("nan") if step == 2 else 0.0
            with torch.no_grad():
                if where == "forward":
                    model[1].bias[3] += poison
            out = call(inputs(seed=step))
            if where == "backward":
                out = out + (out * 0).sum() + 0 * (model[1].weight * poison).sum()
            out.sum().backward()
            model.zero_grad()
    first = log.first_not_finite
    role = {"forward": "output", "backward": "grad_weight"}[where]
    assert (first.step, first.layer, first.role) == (2, "1", role)
    assert f"first not finite: 1 {role} in step 2" in str(log)


def test_the_first_infinity_of_a_gradient():
    model = plain_model(3)
    with qtensor.debug.record(model) as log:
        hidden = model[1](model[0](inputs()))
        hidden.register_hook(lambda grad: grad * math.inf)
        model[2](hidden).sum().backward()
    first = log.first_not_finite
    assert (first.layer, first.role, first.inf > 0) == ("1", "grad_output", True)


# ---- steps and samples


def test_recompute_is_not_counted_twice():
    for reentrant in (False, True):
        model = plain_model(2)
        with qtensor.debug.record(model, count="manual") as log:
            x = inputs().requires_grad_()
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        assert {(r.layer, r.role, r.calls) for r in log.records} == {
            (layer, role, 1) for layer in "01" for role in ROLES
        }
        with qtensor.debug.record(model) as log:
            for _ in range(2):
                x = inputs().requires_grad_()
                checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        assert {(r.step, r.calls) for r in log.records} == {(0, 1), (1, 1)}


@pytest.mark.usefixtures("fresh_dynamo")
def test_recompute_of_compiled_code_is_not_counted_twice():
    model = plain_model(2)

    def run(x):
        return checkpoint(model, x, use_reentrant=False)

    call, counter = compiled(run)
    call(inputs().requires_grad_()).sum().backward()
    with qtensor.debug.record(model) as log:
        for _ in range(2):
            call(inputs().requires_grad_()).sum().backward()
    assert counter.frame_count == 2
    assert [(r.step, r.calls) for r in log.records] == [(s, 1) for s in (0, 1) for _ in range(12)]


def test_a_recording_that_ends_before_backward():
    """The checkpoint computes the layers again, without recording."""
    model = plain_model(2)
    with qtensor.debug.record(model) as log:
        out = checkpoint(model, inputs().requires_grad_(), use_reentrant=False)
    out.sum().backward()
    assert {r.role for r in log.records} == {"input", "weight", "output"}


def test_manual_steps_take_several_calls():
    model = plain_model(1)
    with qtensor.debug.record(model, count="manual") as log:
        for seed in (1, 2):
            for microbatch in range(3):
                model(seed * inputs(seed=microbatch))
            log.step()
    calls = {(r.step, r.role): r.calls for r in log.records}
    assert calls == {(s, r): 1 if r == "weight" else 3 for s in (0, 1) for r in ROLES[:3]}
    biggest = max(inputs(seed=i).abs().max().item() for i in range(3))
    assert by_tensor(log)["0", "input"].amax == biggest


def test_every_third_step_of_some_layers():
    model = plain_model(4)
    with qtensor.debug.record(model, ["1", "[3]"], roles=["input"], every=3) as log:
        for _ in range(7):
            train(model, model, inputs())
    found = [(r.step, r.layer, r.role) for r in log.records]
    assert found == [(step, layer, "input") for step in (0, 3, 6) for layer in "13"]


class _Wrapper(nn.Module):
    """Adds a part to the names of modules, as FSDP does."""

    def __init__(self, module):
        super().__init__()
        self._fsdp_wrapped_module = module

    def forward(self, *args, **kwargs):
        return self._fsdp_wrapped_module(*args, **kwargs)


def test_names_without_those_of_wrappers():
    model = plain_model(2)
    model[1] = _Wrapper(model[1])
    with qtensor.debug.record(_Wrapper(model), "1") as log:
        model(inputs())
    assert log.layers == ("1",)
    assert ("1", "weight") in by_tensor(log)
