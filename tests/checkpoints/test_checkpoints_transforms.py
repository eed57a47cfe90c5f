"""Files that ask for scaled or rotated inputs: applied, folded into plain weights, or refused."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qtensor
from qtensor import checkpoints
from qtensor.modules.input_hook import TRANSFORM, set_input_step
from qtensor.modules.input_transform import InputTransform, hadamard_matrix, rotate
from tests.helpers.checkpoint_cases import assert_same_bytes

CT, MODELOPT = "compressed-tensors", "modelopt"
K, N = 128, 48


def x_of(dtype=torch.bfloat16):
    return torch.randn(5, K, generator=torch.Generator().manual_seed(1)).to(dtype)


def layer(transform, fmt="nvfp4"):
    """A model with one layer, whose weight is quantized for transformed inputs."""
    torch.manual_seed(0)
    weight = torch.randn(N, K).bfloat16()
    if transform.scale is not None:
        weight = (weight / transform.scale).bfloat16()
    if transform.block:
        weight = rotate(weight, hadamard_matrix(transform.block))
    model = nn.Sequential(nn.Linear(K, N, bias=False, dtype=torch.bfloat16))
    values = qtensor.quantize(weight, fmt)
    model[0].weight = nn.Parameter(values, requires_grad=False)
    set_input_step(model[0], TRANSFORM, transform)
    return model


def scale():
    return (torch.rand(K, generator=torch.Generator().manual_seed(2)) + 0.5).bfloat16()


def opened(folder):
    model = nn.Sequential(nn.Linear(K, N, bias=False))
    state = checkpoints.load_state_dict(folder, accept_rotated=True)
    model.load_state_dict({"0.weight": state["0.weight"]}, assign=True)
    assert checkpoints.apply_transforms(folder, model) == ["0"]
    return model


def test_a_transform_computes_what_it_says():
    x, s = x_of(), scale()
    assert torch.equal(InputTransform(s)(x), (x.float() * s.float()).bfloat16())
    matrix = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    assert torch.equal(hadamard_matrix(4), matrix)
    blocks = x.float().view(5, K // 4, 4)
    wanted = torch.einsum("bkn,nm->bkm", blocks.double(), matrix.double()) / 2
    got = InputTransform(hadamard=4)(x_of(torch.float32))
    exact = torch.einsum("bkn,nm->bkm", x_of(torch.float32).view(5, -1, 4), matrix) / 2
    assert torch.allclose(got, exact.flatten(1), rtol=1e-6, atol=1e-6)
    assert torch.equal(InputTransform(hadamard=4)(x), wanted.flatten(1).bfloat16())
    with pytest.raises(qtensor.QTensorError, match="power of two"):
        InputTransform(hadamard=12)
    with pytest.raises(qtensor.QTensorError, match="none is 0"):
        InputTransform(torch.zeros(4))


@pytest.mark.parametrize(
    ("transform", "layout"),
    [
        (InputTransform(scale()), MODELOPT),
        (InputTransform(scale()), "qtensor"),
        (InputTransform(hadamard=32), CT),
        (InputTransform(scale(), 16), "qtensor"),
    ],
)
def test_a_file_with_a_transform_is_applied(tmp_path, transform, layout):
    model = layer(transform)
    with torch.no_grad():
        y = model(x_of())
        plain = F.linear(x_of(), model[0].weight)
        assert not torch.allclose(y, plain, rtol=0.1), "the weight is wrong without it"
    checkpoints.save(model, tmp_path / "a", layout)
    again = opened(tmp_path / "a")
    with torch.no_grad():
        assert_same_bytes(again(x_of()), y)
        torch.compiler.reset()  # graphs of other tests count towards the limit of nn.Linear
        compiled = torch.compile(again, fullgraph=True, backend="aot_eager")
        assert_same_bytes(compiled(x_of()), y)
    checkpoints.save(again, tmp_path / "b", layout)
    first, second = ((tmp_path / n / "model.safetensors").read_bytes() for n in "ab")
    assert first == second


@pytest.mark.parametrize(
    ("transform", "layout"),
    [
        (InputTransform(scale()), CT),
        (InputTransform(hadamard=32), MODELOPT),
        (InputTransform(scale()), "mlx"),
    ],
)
def test_a_layout_that_cannot_say_it_is_refused(tmp_path, transform, layout):
    with pytest.raises(checkpoints.CheckpointError, match="its inputs needs a layout"):
        checkpoints.save(layer(transform), tmp_path / "a", layout)


def test_dequantize_multiplies_the_scale_into_the_weight(tmp_path):
    model = layer(InputTransform(scale()))
    checkpoints.save(model, tmp_path / "awq", MODELOPT)
    report = checkpoints.dequantize(tmp_path / "awq", tmp_path / "plain", dtype=torch.float32)
    assert "columns" in report.not_carried["0.pre_quant_scale"]
    with checkpoints.open(tmp_path / "plain") as plain:
        values = model[0].weight.dequantize(torch.float32)
        decoded = checkpoints.open(tmp_path / "awq", accept_rotated=True)
        origin = decoded.dense("0.weight", torch.float32)
        assert torch.allclose(values, origin, rtol=1e-6)
        assert torch.equal(plain["0.weight"], origin * scale().float())
    with pytest.raises(checkpoints.CheckpointError, match="scales its inputs"):
        checkpoints.convert(tmp_path / "awq", tmp_path / "ct", CT)
    checkpoints.convert(tmp_path / "awq", tmp_path / "ours")
    with torch.no_grad():
        assert_same_bytes(opened(tmp_path / "ours")(x_of()), model(x_of()))


@pytest.mark.parametrize("layout", ["qtensor", CT])
@pytest.mark.parametrize("fmt", ["nvfp4", None])
def test_dequantize_undoes_a_rotation(tmp_path, layout, fmt):
    """Also in a plain weight, beside a quantized one."""
    transform = InputTransform(scale() if layout == "qtensor" else None, 32)
    model = layer(transform, fmt or "nvfp4")
    if fmt is None:
        values = model[0].weight.dequantize()
        model = nn.Sequential(nn.Linear(K, N, bias=False), nn.Linear(N, 32, bias=False))
        model[0].weight = nn.Parameter(values)
        set_input_step(model[0], TRANSFORM, transform)
        model[1].weight = nn.Parameter(qtensor.quantize(model[1].weight.detach(), "nvfp4"), False)
    checkpoints.save(model, tmp_path / "rotated", layout)
    checkpoints.dequantize(tmp_path / "rotated", tmp_path / "plain", dtype=torch.float32)
    origin = checkpoints.open(tmp_path / "rotated", accept_rotated=True)
    stored = origin.dense("0.weight", torch.float32) if fmt else origin["0.weight"]
    wanted = rotate(stored.float(), hadamard_matrix(32))
    wanted = wanted if transform.scale is None else wanted * transform.scale.float()
    with checkpoints.open(tmp_path / "plain") as plain:
        assert plain.keys() >= {"0.weight"}
        assert not any("rotation" in name for name in plain)
        assert torch.equal(plain["0.weight"], wanted.to(plain["0.weight"].dtype))


def test_convert_writes_rotations_into_the_config(tmp_path):
    model = layer(InputTransform(hadamard=32))
    checkpoints.save(model, tmp_path / "ours", "qtensor")
    checkpoints.save(model, tmp_path / "saved", CT)
    checkpoints.convert(tmp_path / "ours", tmp_path / "converted", CT)
    for name in ("model.safetensors", "config.json"):
        saved, made = ((tmp_path / n / name).read_bytes() for n in ("saved", "converted"))
        assert made == saved
    with pytest.raises(checkpoints.CheckpointError, match="rotates its inputs needs a layout"):
        checkpoints.convert(tmp_path / "ours", tmp_path / "modelopt", MODELOPT)
    model[0].weight = nn.Parameter(model[0].weight.dequantize())
    with pytest.raises(checkpoints.CheckpointError, match="describes quantized weights"):
        checkpoints.save(model, tmp_path / "plain", CT)


def test_convert_reads_rotations_of_the_config(tmp_path):
    checkpoints.save(layer(InputTransform(hadamard=32)), tmp_path / "ct", CT)
    checkpoints.convert(tmp_path / "ct", tmp_path / "ours")
    with checkpoints.open(tmp_path / "ours") as ours:
        assert ours["0.input_rotation"].tolist() == [32]
        with checkpoints.open(tmp_path / "ct", accept_rotated=True) as origin:
            assert ours.keys() - origin.keys() == {"0.input_rotation"}
            assert_same_bytes(ours["0.weight"], origin["0.weight"])
    for source in ("ct", "ours"):  # the layout that describes them, from itself and from ours
        checkpoints.convert(tmp_path / source, tmp_path / f"{source}_ct", CT)
        for name in ("model.safetensors", "config.json"):
            made = (tmp_path / f"{source}_ct" / name).read_bytes()
            assert made == (tmp_path / "ct" / name).read_bytes()
    with pytest.raises(checkpoints.CheckpointError, match="rotates its inputs needs a layout"):
        checkpoints.convert(tmp_path / "ct", tmp_path / "modelopt", MODELOPT)
    checkpoints.convert(tmp_path / "ct", tmp_path / "mxfp8", format="mxfp8")
    with torch.no_grad():
        model, x = layer(InputTransform(hadamard=32)), x_of()
        weight = qtensor.quantize(model[0].weight.dequantize(), "mxfp8")
        model[0].weight = nn.Parameter(weight, False)
        assert_same_bytes(opened(tmp_path / "mxfp8")(x), model(x))


def test_rotated_files_are_inspected(tmp_path):
    changed(tmp_path)
    assert checkpoints.verify(tmp_path).ok
    assert [kind.kind for kind in checkpoints.inspect(tmp_path).kinds] == ["nvfp4"]
    assert not checkpoints.calibration(tmp_path).inputs
    changed(tmp_path, location="k_cache")
    (problem,) = checkpoints.verify(tmp_path).problems
    assert "at k_cache" in problem.text


def changed(tmp_path, **change):
    checkpoints.save(layer(InputTransform(hadamard=32)), tmp_path, CT, overwrite=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (group,) = config["quantization_config"]["transform_config"]["config_groups"].values()
    places = group["apply"]
    places[0] |= {k: v for k, v in change.items() if k in ("location", "targets", "ignore")}
    group |= {k: v for k, v in change.items() if k not in places[0]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return nn.Sequential(nn.Linear(K, N, bias=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "random-hadamard"}, "of type hadamard"),
        ({"randomize": True}, "not randomized"),
        ({"location": "output"}, "at output"),
        ({"location": "k_cache"}, "at k_cache"),
        ({"head_dim": None}, "head_dim None"),
        ({"head_dim": 12}, "head_dim 12"),
        ({"head_dim": 1 << 30}, "head_dim 1073741824"),
        ({"targets": ["other"]}, "names modules of the file"),
    ],
)
def test_other_rotations_are_refused(tmp_path, change, message):
    model = changed(tmp_path, **change)
    with pytest.raises(checkpoints.CheckpointError, match=message):
        checkpoints.apply_transforms(tmp_path, model)
    with pytest.raises(checkpoints.CheckpointError, match="right only for rotated inputs"):
        checkpoints.load_state_dict(tmp_path)


@pytest.mark.parametrize("targets", [["Linear"], ["re:^0$"], ["0"]])
def test_targets(tmp_path, targets):
    model = changed(tmp_path, targets=targets)
    assert checkpoints.apply_transforms(tmp_path, model) == ["0"]
    assert model[0].input_transform.block == 32
    with pytest.raises(checkpoints.CheckpointError, match="no such layer"):
        checkpoints.apply_transforms(tmp_path, nn.Sequential())


def test_rotations_are_those_of_compressed_tensors(tmp_path):
    """Its own classes rotate weight and input of a plain layer, as our config describes it."""
    transform = pytest.importorskip("compressed_tensors.transform", reason="the extra origins")
    ours = layer(InputTransform(hadamard=32))
    checkpoints.save(ours, tmp_path, CT)
    with checkpoints.open(tmp_path, accept_rotated=True) as c:
        found = c.config["quantization_config"]["transform_config"]
    theirs = nn.Sequential(nn.Linear(K, N, bias=False, dtype=torch.bfloat16))
    torch.manual_seed(0)
    theirs[0].weight = nn.Parameter(torch.randn(N, K).bfloat16())
    transform.apply_transform_config(theirs, transform.TransformConfig(**found))
    seen = []
    theirs[0].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    theirs(x_of())
    assert_same_bytes(ours[0].input_transform(x_of()), seen[0].detach())
    rotated = qtensor.quantize(theirs[0].weight.detach(), "nvfp4")
    assert_same_bytes(rotated, ours[0].weight.detach())
