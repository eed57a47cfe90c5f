"""``qtensor.calibrate``: factors of the inputs of linear layers."""

import copy
import math

import pytest
import torch
from torch import nn

import qtensor
from qtensor.weights import CalibratedInput


class Attention(nn.Module):
    """Layers with the names of a Llama model."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "o_proj"):
            setattr(self, name, nn.Linear(64, 64))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.o_proj(self.dropout(self.q_proj(x) * scale + self.k_proj(2 * x)))


def batches(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 5, 64, generator=generator) for _ in range(count)]


def random_model(name: str, **options: int) -> nn.Module:
    cases = pytest.importorskip("tests.helpers.transformers_models", reason="needs transformers")
    torch.manual_seed(0)
    made = cases.config(name)
    for option, value in options.items():
        setattr(made, option, value)
    return cases.transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()


def test_the_largest_magnitudes_and_shared_groups():
    torch.manual_seed(0)
    model, seen = Attention(), []
    model.o_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
    before = copy.deepcopy(model.state_dict())
    state = torch.random.get_rng_state()
    found = qtensor.calibrate(model, batches(), "nvfp4")
    largest = max(x.abs().amax().item() for x in batches())
    assert found.inputs["q_proj"].amax == found.inputs["k_proj"].amax == 2 * largest
    assert found.inputs["o_proj"].amax == max(x.abs().amax().item() for x in seen)
    assert found.inputs["o_proj"].rows == 60
    # torch divides a number by a tensor with a rounded reciprocal; a quotient rounds once.
    factor = torch.tensor(2 * largest) / torch.tensor(2688.0)
    assert found.inputs["q_proj"].factor == factor.item()
    assert model.training
    assert len(model.o_proj._forward_pre_hooks) == 1
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    alone = qtensor.calibrate(model, batches(), "fp8", groups=[["o_proj"]], headroom=1.5)
    assert alone.inputs["q_proj"].amax == torch.tensor(1.5 * largest).item()
    assert alone.inputs["k_proj"].amax == 2 * alone.inputs["q_proj"].amax


def test_generators_dicts_tuples_and_inference_mode():
    model = Attention()
    wanted = qtensor.calibrate(model, batches(), "fp8")
    with torch.inference_mode():
        found = qtensor.calibrate(model, ({"x": x} for x in batches()), "fp8")
    assert found.inputs == wanted.inputs
    found = qtensor.calibrate(model, iter([(x, 1.0) for x in batches()]), "fp8")
    assert found.inputs == wanted.inputs


def test_an_input_of_one_dim_is_one_row():
    torch.manual_seed(0)
    model, x = Attention(), batches(1)[0]
    alone = qtensor.calibrate(model, [x[0, 0]], "fp8", observer="mse")
    row = qtensor.calibrate(model, [x[0, :1]], "fp8", observer="mse")
    assert alone.inputs == row.inputs
    assert alone.inputs["q_proj"].rows == 1
    qtensor.quantize_(model, "nvfp4", rounding="gptq", calibration=[x[0, 0]])


def test_a_percentile_encodes_its_share():
    model = nn.Sequential(nn.Linear(64, 8))
    values = torch.cat([x.flatten() for x in batches()]).abs().sort().values
    for share in (50, 99, 99.9):
        found = qtensor.calibrate(
            model, batches(), "fp8", observer="percentile", percentile=share
        ).inputs["0"]
        exact = values[math.ceil(len(values) * share / 100) - 1].item()
        assert exact <= found.amax <= exact * (1 + 2**-7)
    bf16 = [x.bfloat16() for x in batches()]
    found = qtensor.calibrate(model.bfloat16(), bf16, "fp8", observer="percentile", percentile=90)
    ordered = torch.cat([x.flatten() for x in bf16]).float().abs().sort().values
    rank = math.ceil(len(ordered) * 0.9) - 1
    assert found.inputs["0"].amax == ordered[rank].item(), "magnitudes of bfloat16 are exact"
    whole = qtensor.calibrate(
        model.float(), batches(), "fp8", observer="percentile", percentile=100
    )
    assert whole.inputs["0"].amax == values[-1].item()


def test_the_least_squared_error():
    """An outlier makes a smaller amax better: compare with all clips, decoded by another way."""
    model, xs = nn.Sequential(nn.Linear(64, 8)), batches()
    xs[0][0, 0, 0] = 300.0
    found = qtensor.calibrate(model, xs, "nvfp4", observer="mse").inputs["0"].amax
    errors = {}
    for step in range(17):
        amax = torch.tensor(300.0 * (1 - step / 32))
        top = torch.zeros(1, 64)
        top[0, 0] = amax
        rows = torch.cat([x.flatten(0, 1) for x in xs])
        limited = torch.cat([rows.clamp(-amax, amax), top])
        values = qtensor.quantize(limited, "nvfp4").dequantize()[:-1]
        errors[amax.item()] = (values.double() - rows).square().sum().item()
    assert found in errors
    assert errors[found] == min(errors.values())


def test_experts_without_tokens_share_the_amax_of_the_others():
    model = random_model("qwen3-moe", num_experts=8)
    ids = [torch.tensor([[3, 4]])]
    found = qtensor.calibrate(model, ids, "fp8", filter_fn=lambda m, name: "experts" in name)
    for name, own in found.inputs.items():
        assert own.idle_experts >= 4, "two tokens reach at most four experts"
        assert own.rows == 4
        assert 0 < own.amax < math.inf, name
    quantized = copy.deepcopy(model)
    qtensor.quantize_(quantized, "nvfp4", lambda m, name: "experts" in name)
    again = qtensor.calibrate(quantized, ids, "fp8", filter_fn=lambda m, name: "experts" in name)
    first = next(iter(found.inputs))
    assert again.inputs[first].rows == found.inputs[first].rows
    before = model(ids[0]).logits
    found.apply(model)  # tests/integrations/test_expert_inputs.py
    assert not torch.equal(model(ids[0]).logits, before)


class Experts(nn.Module):
    """Experts as modules, of which one gets all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.ModuleDict({"w2": nn.Linear(32, 32)}) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[1]["w2"](x)


def test_the_rule_for_experts_that_are_modules():
    x = torch.randn(4, 32)
    shared = qtensor.calibrate(Experts(), [x], "fp8")
    apart = qtensor.calibrate(Experts(), [x], "fp8", groups=[])
    for found in (shared, apart):
        assert {own.amax for own in found.inputs.values()} == {x.abs().amax().item()}
    with pytest.raises(qtensor.QTensorError, match="must reach each layer"):
        qtensor.calibrate(Experts(), [x], "fp8", filter_fn=lambda m, n: "experts.0" in n)


def test_zeros_have_a_normal_factor():
    found = qtensor.calibrate(nn.Sequential(nn.Linear(32, 32)), [torch.zeros(2, 32)], "nvfp4")
    assert found.inputs["0"].amax == 2.0**-40
    assert found.inputs["0"].factor >= torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_name_the_layer(value):
    model = Attention()
    model.q_proj.weight.data[0, 0] = value
    with pytest.raises(qtensor.QTensorError, match="NaN or inf in the input of o_proj"):
        qtensor.calibrate(model, batches(), "fp8")
    assert model.training
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_failing_model_leaves_no_hooks():
    model = Attention()
    with pytest.raises(qtensor.QTensorError, match=r"inputs\[1\] failed"):
        qtensor.calibrate(model, [batches()[0], torch.zeros(2, 3)], "fp8")
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_formats_by_layer_and_formats_without_a_factor():
    formats = {"q_proj": None, "k_proj": "mxfp8", "*": "fp8"}
    found = qtensor.calibrate(Attention(), batches(), formats)
    assert list(found.inputs) == ["k_proj", "o_proj"]
    assert found.inputs["k_proj"].amax is None
    assert found.inputs["k_proj"].factor is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "fp8_delayed"}, "rowwise, to nearest"),
        ({"format": {"nope": "fp8"}}, "must match a layer"),
        ({"observer": "mean"}, "observer is one of"),
        ({"percentile": 0}, "above 0"),
        ({"percentile": True}, "a number above 0 .*; got True"),
        ({"headroom": 0.5}, "of at least 1"),
        ({"headroom": True}, "of at least 1; got True"),
        ({"groups": ["q_proj"]}, "calibrate: each group is a list"),
        ({"inputs": []}, "at least one input"),
        ({"inputs": torch.zeros(1)}, "list of inputs"),
        ({"inputs": [*batches(), torch.zeros(1, 3)]}, r"; inputs\[3\] failed"),
        ({"filter_fn": lambda m, n: False}, "needs a linear layer"),
        ({"kv_cache": "fp8"}, "models of transformers"),
        ({"kv_cache": "nvfp4"}, "kv_cache is None"),
    ],
)
def test_illegal_arguments(options, message):
    arguments = {"inputs": batches(), "format": "fp8", **options}
    with pytest.raises(qtensor.QTensorError, match=message):
        qtensor.calibrate(Attention(), **arguments)


def test_apply_remove_save_and_load(tmp_path):
    torch.manual_seed(0)
    model = Attention().eval()
    plain = model(batches()[0])
    found = qtensor.calibrate(model, batches(), {"q_proj": "nvfp4", "k_proj": "mxfp8"})
    found.save(tmp_path / "factors.json")
    loaded = qtensor.Calibration.load(tmp_path / "factors.json")
    assert loaded == found
    assert "q_proj" in str(loaded)
    report = loaded.apply(model)
    assert [r.name for r in report.swapped] == ["q_proj", "k_proj"]
    assert [r.name for r in report.skipped] == ["o_proj"]
    quantized = model(batches()[0])
    assert not torch.equal(quantized, plain)
    factors = [(own.format, own.amax) for own in qtensor.Calibration.of(model).inputs.values()]
    assert factors == [(own.format, own.amax) for own in found.inputs.values()]
    loaded.apply(model)  # replaces, and adds nothing
    assert torch.equal(model(batches()[0]), quantized)
    qtensor.Calibration.remove(model)
    assert torch.equal(model(batches()[0]), plain)
    with pytest.raises(qtensor.QTensorError, match="every layer of the calibration"):
        loaded.apply(nn.Sequential(nn.Linear(4, 4)))
    wrong = {"q_proj": CalibratedInput("mxfp8"), "k_proj": CalibratedInput("mxfp9")}
    with pytest.raises(qtensor.QTensorError, match="mxfp9"):
        qtensor.Calibration(wrong).apply(model)
    assert not qtensor.Calibration.of(model).inputs
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(qtensor.QTensorError, match=r"Calibration\.save wrote"):
        qtensor.Calibration.load(tmp_path / "other.json")


@pytest.mark.parametrize("fails", [False, True])
def test_inputs_that_are_quantized_are_measured_again(fails):
    """An amax could not grow: the inputs were cut off at the one that the layer had."""
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    want = qtensor.calibrate(model, [10 * x], "fp8").inputs
    qtensor.calibrate(model, [x], "fp8").apply(model)
    y, state = model(x), list(model.state_dict())
    if fails:
        with pytest.raises(qtensor.QTensorError, match="the model must run on each input"):
            qtensor.calibrate(model, [x[:, 1:]], "fp8")
    else:
        assert qtensor.calibrate(model, [10 * x], "fp8").inputs == want
    assert list(model.state_dict()) == state
    assert torch.equal(model(x), y)


def test_keys_and_values_are_those_of_the_cache():
    caches = pytest.importorskip("qtensor.integrations.caches", reason="needs transformers")
    model = random_model("llama")
    model.to(torch.bfloat16)
    ids = torch.tensor([[3, 14, 15, 9, 26]])
    found = qtensor.calibrate(model, [ids, {"input_ids": ids + 1}], "fp8", kv_cache="fp8")
    amaxes = []
    for batch in (ids, ids + 1):
        cache = caches.QTensorCache(model.config, "bfloat16")
        with torch.no_grad():
            model(batch, past_key_values=cache)
        amaxes.append([
            (own.keys.abs().amax().item(), own.values.abs().amax().item())
            for own in cache._caches().values()
        ])
    for layer, (name, own) in enumerate(found.keys_values.items()):
        assert name.endswith(f"layers.{layer}.self_attn")
        for which, value in enumerate((own.keys, own.values)):
            assert value == max(amaxes[0][layer][which], amaxes[1][layer][which])


def test_a_fused_layer_of_torch_quantizes_its_inputs():
    """torch computes an encoder layer as one op, but not one whose modules have hooks."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(64, 2, 96, batch_first=True).eval()
    inputs = [torch.randn(2, 5, 64) for _ in range(2)]
    with torch.no_grad():
        plain = model(inputs[0])
        found = qtensor.calibrate(model, inputs, "nvfp4")
        found.apply(model)
        assert list(found.inputs) == ["linear1", "linear2"]
        seen = []
        model.linear2.input_quantizer.register_forward_hook(lambda m, args, y: seen.append(y))
        quantized = model(inputs[0])
    assert not torch.equal(quantized, plain)
    assert isinstance(seen[0], qtensor.QuantizedTensor)


def test_a_sharded_model_is_refused():
    """The largest magnitude of one rank is not that of all."""
    distributed = pytest.importorskip("torch.distributed.tensor")
    if torch.distributed.is_initialized():
        pytest.skip("the process is in a group of other tests")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(32, 32))
        weight = distributed.distribute_tensor(model[0].weight.detach(), mesh)
        model[0].weight = nn.Parameter(weight)
        with pytest.raises(qtensor.QTensorError, match="its weight is a DTensor"):
            qtensor.calibrate(model, [torch.randn(2, 32)], "fp8")
    finally:
        torch.distributed.destroy_process_group()
