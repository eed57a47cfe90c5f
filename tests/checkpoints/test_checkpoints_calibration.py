"""Factors of activations, keys and values in files: written, read and applied."""

import json

import pytest
import torch
from torch import nn

import qtensor
from qtensor import checkpoints
from qtensor.weights import CalibratedInput, CalibratedKeysValues
from tests.helpers.checkpoint_cases import assert_same_bytes, weight

CT, MODELOPT = "compressed-tensors", "modelopt"


class Model(nn.Module):
    """Two layers that share a factor, and one with its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(64, 64), nn.Linear(64, 64)
        self.down_proj = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.relu(self.q_proj(x)) + self.k_proj(x))


def calibrated(fmt: str, inputs: str | None = None) -> tuple[nn.Module, qtensor.Calibration]:
    torch.manual_seed(0)
    model = Model()
    found = qtensor.calibrate(model, batches(), inputs or fmt)
    qtensor.quantize_(model, fmt)
    found.apply(model)
    return model, found


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(7, 64, generator=generator) for _ in range(2)]


def opened(folder: object) -> nn.Module:
    """The model of a folder, whose inputs are quantized as the folder says."""
    model = Model()
    state = checkpoints.load_state_dict(folder)
    parameters = {name: t for name, t in state.items() if name in dict(model.named_parameters())}
    model.load_state_dict(parameters, assign=True)
    checkpoints.calibration(folder).apply(model)
    return model


CELLS = [
    ("nvfp4", "qtensor"),
    ("nvfp4", MODELOPT),
    ("fp8", "qtensor"),
    ("fp8", CT),
    ("fp8", MODELOPT),
    ("mxfp8", CT),
    ("mxfp8", MODELOPT),
    ("mxfp4", CT),
    ("mxfp4", "qtensor"),
]


@pytest.mark.parametrize(("fmt", "layout"), CELLS)
def test_a_folder_runs_as_the_model_that_wrote_it(tmp_path, fmt, layout):
    model, _ = calibrated(fmt)
    checkpoints.save(model, tmp_path / "a", layout)
    assert checkpoints.verify(tmp_path / "a").ok
    again = opened(tmp_path / "a")
    with torch.no_grad():
        assert_same_bytes(again(batches()[0]), model(batches()[0]))
    checkpoints.save(again, tmp_path / "b", layout)
    names = ("model.safetensors", "config.json")
    for name in names if layout != "qtensor" else names[:1]:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_divisor_of_nvfp4_is_that_of_compressed_tensors(tmp_path):
    """``generate_gparam`` divides a number by a tensor, which torch rounds twice."""
    model, found = calibrated("nvfp4")
    checkpoints.save(model, tmp_path / "a", CT)
    with checkpoints.open(tmp_path / "a") as a:
        for name, own in found.inputs.items():
            amax = torch.tensor([own.amax])
            assert_same_bytes(a[f"{name}.input_global_scale"], amax.reciprocal() * 2688)
        config = a.config["quantization_config"]["config_groups"]["group_0"]
    assert config["input_activations"]["dynamic"] == "local"
    again = opened(tmp_path / "a")
    divisors = {name: own.factor for name, own in qtensor.Calibration.of(again).inputs.items()}
    for name, own in found.inputs.items():
        amax = torch.tensor([own.amax])
        assert divisors[name] == (torch.ones(1) / (amax.reciprocal() * 2688)).item()
    checkpoints.save(again, tmp_path / "b", CT)
    first, second = ((tmp_path / n / "model.safetensors").read_bytes() for n in "ab")
    assert first == second


def test_every_divisor_is_written_again(tmp_path):
    """Also one that no amax gives."""
    generator = torch.Generator().manual_seed(0)
    divisors = {
        f"up{i}": g for i, g in enumerate(torch.rand(200, 1, generator=generator) * 1000 + 0.01)
    }
    weights = {f"{n}.weight": qtensor.quantize(torch.ones(16, 16), "nvfp4") for n in divisors}
    given = {f"{n}.input_global_scale": g for n, g in divisors.items()}
    checkpoints.save({**weights, **given}, tmp_path / "a", CT)
    found = checkpoints.calibration(tmp_path / "a")
    checkpoints.save(weights, tmp_path / "b", CT, calibration=found)
    with checkpoints.open(tmp_path / "b") as b:
        for name, g in divisors.items():
            assert found.inputs[name].factor == (torch.ones(1) / g).item()
            kept = b[f"{name}.input_global_scale"]
            assert torch.ones(1) / kept == torch.ones(1) / g
            unit = torch.nextafter(g, torch.tensor(2e9)) - g
            assert (kept - g).abs() <= 2 * unit


def test_factors_of_keys_values_and_experts(tmp_path):
    weight = qtensor.quantize(torch.randn(64, 32), "fp8")
    names = [f"mlp.experts.{i}.{p}" for i in (0, 1) for p in ("gate_proj", "down_proj")]
    state = {f"{name}.weight": weight for name in names}
    found = qtensor.Calibration(
        {
            "mlp.experts.gate_up_proj": CalibratedInput("fp8", 3.0),
            "mlp.experts.down_proj": CalibratedInput("fp8", 5.0),
        },
        {"attn": CalibratedKeysValues(7.0, 9.0)},
    )
    for layout, ends in (
        (CT, ("k_scale", "v_scale")),
        (MODELOPT, ("k_proj.k_scale", "v_proj.v_scale")),
    ):
        checkpoints.save(state, tmp_path / layout, layout, calibration=found)
        with checkpoints.open(tmp_path / layout) as c:
            for name in names:
                amax = torch.tensor(3.0 if "gate" in name else 5.0)
                assert c[f"{name}.input_scale"].item() == (amax / torch.tensor(448.0)).item()
            for end, amax in zip(ends, (7.0, 9.0), strict=True):
                assert c[f"attn.{end}"].item() == (torch.tensor(amax) / torch.tensor(448.0)).item()


def test_refusals(tmp_path):
    model, found = calibrated("fp8", "nvfp4")
    with pytest.raises(checkpoints.CheckpointError, match="in the format of the weight"):
        checkpoints.save(model, tmp_path / "a", CT)
    checkpoints.save(model, tmp_path / "ours")
    with torch.no_grad():
        x = batches()[0]
        assert torch.equal(opened(tmp_path / "ours")(x), model(x))
    with pytest.raises(checkpoints.CheckpointError, match="together with their formats"):
        checkpoints.save(model.state_dict(), tmp_path / "a")
    with pytest.raises(checkpoints.CheckpointError, match="belongs to a quantized weight"):
        checkpoints.save({"x": torch.ones(1)}, tmp_path / "a", calibration=found)
    state = {"up.weight": qtensor.quantize(torch.ones(16, 16), "fp8")}
    checkpoints.save({**state, "up.input_scale": torch.zeros(1)}, tmp_path / "zero", CT)
    with pytest.raises(checkpoints.CheckpointError, match="positive and finite number; got 0"):
        checkpoints.calibration(tmp_path / "zero")
    checkpoints.save(state, tmp_path / "none", MODELOPT)
    with pytest.raises(checkpoints.CheckpointError, match="have a factor in the file"):
        checkpoints.calibration(tmp_path / "none")
    state = {"up.weight": qtensor.quantize(torch.ones(16, 32), "mxfp4")}
    checkpoints.save(state, tmp_path / "mx", MODELOPT)
    with pytest.raises(checkpoints.CheckpointError, match="MXFP4"):
        checkpoints.calibration(tmp_path / "mx")
    text = torch.tensor(list(b"[]"), dtype=torch.uint8)
    checkpoints.save({**state, "up.input_quantizer": text}, tmp_path / "text")
    with pytest.raises(checkpoints.CheckpointError, match="format, amax and scale_inv"):
        checkpoints.calibration(tmp_path / "text")


@pytest.mark.parametrize(
    ("inputs", "found"),
    [
        (None, {}),
        ({"num_bits": 8, "strategy": "token", "dynamic": True}, {"up": "fp8_rowwise"}),
        ({"num_bits": 8, "strategy": "tensor", "dynamic": True}, {"up": "fp8"}),
        ({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}, "one of"),
        ({"num_bits": 8, "strategy": "tensor", "dynamic": False}, "have a factor"),
    ],
)
def test_inputs_that_the_config_of_compressed_tensors_describes(tmp_path, inputs, found):
    state = {"up.weight": qtensor.quantize(torch.ones(16, 32), "fp8")}
    checkpoints.save(state, tmp_path, CT)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = inputs
    (tmp_path / "config.json").write_text(json.dumps(config))
    if isinstance(found, str):
        with pytest.raises(checkpoints.CheckpointError, match=found):
            checkpoints.calibration(tmp_path)
        return
    read = checkpoints.calibration(tmp_path).inputs
    assert {name: own.format for name, own in read.items()} == found
    assert all(own.amax is None for own in read.values())


def test_factors_equal_those_of_compressed_tensors(tmp_path):
    """Its functions get the same minima and maxima, in float32."""
    helpers = pytest.importorskip(
        "compressed_tensors.quantization.utils.helpers", reason="compressed-tensors (origins)"
    )
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="extra origins")
    seen: dict[str, list[torch.Tensor]] = {}
    torch.manual_seed(0)
    model = Model()
    for name, module in model.named_children():
        own = seen.setdefault(name, [])
        module.register_forward_pre_hook(lambda m, args, own=own: own.append(args[0].detach()))
    found = {fmt: qtensor.calibrate(model, batches(), fmt) for fmt in ("fp8", "nvfp4")}
    args = quantization.QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False)
    for fmt, last in (("fp8", "input_scale"), ("nvfp4", "input_global_scale")):
        quantized = Model()
        quantized.load_state_dict(model.state_dict())
        qtensor.quantize_(quantized, fmt)
        checkpoints.save(quantized, tmp_path / fmt, CT, calibration=found[fmt])
        with checkpoints.open(tmp_path / fmt) as c:
            for name, xs in seen.items():
                low, high = torch.cat(xs).aminmax()
                if fmt == "fp8":
                    wanted = helpers.calculate_qparams(low, high, args)[0]
                else:
                    wanted = helpers.generate_gparam(low, high)
                assert_same_bytes(c[f"{name}.{last}"], wanted)


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), -1.0])
@pytest.mark.parametrize("source", [CT, "modelopt"])
def test_wrong_factors_of_activations_are_named(tmp_path, source, value):
    """An expert that calibration never reached has 0 or infinity; a reciprocal would hide it."""
    last = "input_global_scale" if source == CT else "input_scale"
    shape = (1,) if source == CT else ()
    name = f"up.{last}"
    state = {"up.weight": weight("nvfp4"), name: torch.full(shape, value)}
    checkpoints.save(state, tmp_path / "a", layout=source)
    (problem,) = checkpoints.verify(tmp_path / "a").problems
    assert problem.severity == "error"
    assert problem.tensor == name
    assert f"positive and finite; got {value}" in problem.text
    assert f"got {value}" in checkpoints.inspect(tmp_path / "a").odd[name]
    other = "modelopt" if source == CT else CT
    report = checkpoints.convert(tmp_path / "a", tmp_path / "b", other)
    assert f"got {value}" in report.not_carried[name]
    with checkpoints.open(tmp_path / "b") as b:
        assert list(b) == ["up.weight"]
    copy = checkpoints.convert(tmp_path / "a", tmp_path / "c", source)
    assert copy.not_carried == {}
    assert any(name in note and f"got {value}" in note for note in copy.notes)


def test_a_factor_without_a_finite_reciprocal_is_not_carried(tmp_path):
    state = {"up.weight": weight("nvfp4"), "up.input_global_scale": torch.tensor([1e-45])}
    checkpoints.save(state, tmp_path / "a", layout=CT)
    report = checkpoints.convert(tmp_path / "a", tmp_path / "b", "modelopt")
    assert "reciprocal" in report.not_carried["up.input_global_scale"]


@pytest.mark.parametrize(("fmt", "layout"), [("nvfp4", CT), ("nvfp4", MODELOPT), ("fp8", CT)])
def test_conversion_keeps_the_factors(tmp_path, fmt, layout):
    """From our layout to another one, and back."""
    model, found = calibrated(fmt)
    checkpoints.save(model, tmp_path / "ours")
    checkpoints.save(model, tmp_path / "saved", layout)
    report = checkpoints.convert(tmp_path / "ours", tmp_path / "converted", layout)
    assert report.not_carried == {}
    names = ("model.safetensors", "config.json")
    first, second = (checkpoints.open(tmp_path / n) for n in ("saved", "converted"))
    with first, second:
        assert sorted(first) == sorted(second)
        for name in first:
            assert_same_bytes(second[name], first[name])
    configs = [(tmp_path / n / names[1]).read_text() for n in ("saved", "converted")]
    inputs = [text.partition("input_activations")[2][:300] for text in configs]
    assert inputs[0] == inputs[1]
    checkpoints.convert(tmp_path / "converted", tmp_path / "back")
    with torch.no_grad():
        y = opened(tmp_path / "converted")(batches()[0])
        assert_same_bytes(opened(tmp_path / "back")(batches()[0]), y)
    again = checkpoints.convert(tmp_path / "ours", tmp_path / "other", layout, "mxfp8")
    assert "calibrate again" in again.not_carried["q_proj.input_quantizer"]
    assert found.inputs
