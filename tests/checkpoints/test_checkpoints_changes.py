"""What a conversion stores otherwise although all values stay: the report says so."""

import pytest
import torch
from checkpoint_cases import assert_same_bytes, weight

import qtensor
from qtensor import checkpoints
from qtensor.checkpoints import layouts
from qtensor.core.quantizer_registry import parse

CT, NAME = "compressed-tensors", "l.up.weight"


def converted(state, first, second, folder, **options):
    """Write a state dict in one layout, convert it to another, and return the report."""
    checkpoints.save(state, folder / "first", layout=first, config={"dtype": "bfloat16"})
    return checkpoints.convert(folder / "first", folder / "second", second, **options)


@pytest.mark.parametrize(
    ("fmt", "first", "second", "order"),
    [
        ("nvfp4", "torchao", "comfyui", "swizzled"),
        ("nvfp4(swizzled=True)", "torchao", "modelopt", "plain"),
        ("mxfp8(swizzled=True)", "qtensor", CT, "plain"),
        ("mxfp8(swizzled=True)", "comfyui", "mlx", "plain"),
        ("mxfp8(swizzled=True)", "comfyui", "torchao", None),
        ("mxfp8(swizzled=True)", "torchao", "qtensor", None),
        ("mxfp8", "torchao", CT, None),
    ],
)
def test_the_order_of_factors(fmt, first, second, order, tmp_path):
    tensor = parse(fmt)(torch.randn(128, 256).bfloat16())
    report = converted({NAME: tensor}, first, second, tmp_path)
    (found,) = report.tensors
    assert found.action == "moved"
    with checkpoints.open(tmp_path / "second") as checkpoint:
        assert (found.before, found.after) == (fmt, checkpoint[NAME].quantizer.canonical)
    notes = [note for note in report.notes if "order" in note]
    want = f"factors of blocks are stored in {order} order: 1 weights"
    assert notes == ([] if order is None else [want])


@pytest.mark.parametrize("name", [n for n, layout in layouts().items() if layout.writer])
def test_each_writer_states_its_order_of_factors(name, tmp_path):
    """``Writer.swizzled`` is what a reader of the file finds."""
    writer = layouts()[name].writer
    for swizzled in (False, True):
        for fmt in ("nvfp4", "mxfp8", "mxfp4"):
            quantizer = parse(f"{fmt}(swizzled=True)" if swizzled else fmt)
            state = {NAME: quantizer(torch.randn(128, 256).bfloat16())}
            path = tmp_path / f"{fmt}-{swizzled}"
            try:
                checkpoints.save(state, path, layout=name)
            except checkpoints.CheckpointError:
                continue  # the layout does not hold the format
            with checkpoints.open(path, layout=name) as checkpoint:
                order = swizzled if writer.swizzled is None else writer.swizzled
                assert checkpoint[NAME].quantizer.swizzled == order


@pytest.mark.parametrize(("first", "second"), [(CT, "modelopt"), ("modelopt", CT), (CT, "gguf")])
def test_reciprocal_tensor_factors(first, second, tmp_path):
    state = {
        NAME: weight("nvfp4", 64, 128),
        "l.down.weight": weight("nvfp4", 64, 128),
        "l.norm": torch.ones(4),
    }
    report = converted(state, first, second, tmp_path)
    (note,) = (note for note in report.notes if "reciprocals" in note)
    assert f"layout {second} stores" in note
    assert "2 weights" in note
    assert checkpoints.compare(tmp_path / "first", tmp_path / "second").equal


def test_ours_keeps_the_factor_of_the_file(tmp_path):
    """300 divisors: back in compressed-tensors each is the same number, and no note warns."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for i in range(300):
        scaled = torch.randn(2, 64, generator=generator) * torch.rand(1, generator=generator)
        state[f"l{i}.weight"] = qtensor.quantize(scaled, "nvfp4")
    report = converted(state, CT, "qtensor", tmp_path)
    assert not any("reciprocals" in note for note in report.notes)
    checkpoints.convert(tmp_path / "second", tmp_path / "back", CT)
    with (
        checkpoints.open(tmp_path / "first") as first,
        checkpoints.open(tmp_path / "back") as back,
    ):
        for name in state:
            for role, tensor in first.stored(name).items():
                assert_same_bytes(back.stored(name)[role], tensor)


def test_shapes_of_factors_of_one_element(tmp_path):
    state = {NAME: weight("fp8", 64, 128), "l.up.input_scale": torch.ones(1)}
    report = converted(state, CT, "modelopt", tmp_path)
    assert "layout modelopt stores factors of one element as []: 1 tensors" in report.notes
    back = checkpoints.convert(tmp_path / "second", tmp_path / "back", CT)
    assert f"layout {CT} stores factors of one element as [1]: 1 tensors" in back.notes
    state = {NAME: weight("nvfp4", 64, 128), "l.up.input_scale": torch.ones(1)}
    report = converted(state, "gguf", "qtensor", tmp_path / "gguf")
    assert not any("one element" in note for note in report.notes)
    checkpoints.convert(tmp_path / "gguf" / "second", tmp_path / "back.gguf", "gguf")
    with checkpoints.open(tmp_path / "back.gguf") as checkpoint:
        assert checkpoint["l.up.input_scale"].shape == (1,)


def test_padding_that_a_file_does_not_describe(tmp_path):
    """ComfyUI pads weights, and holds no shape: a copy of the copy has the padded one."""
    tensor = qtensor.quantize(torch.randn(48, 96).bfloat16(), "mxfp8")
    report = converted({NAME: tensor}, "torchao", "comfyui", tmp_path)
    (note,) = (note for note in report.notes if "padded" in note)
    assert f"pass shape= for {NAME}" in note
    whole = converted({NAME: weight("mxfp8", 64, 128)}, "torchao", "comfyui", tmp_path / "whole")
    assert not any("padded" in note for note in whole.notes)
