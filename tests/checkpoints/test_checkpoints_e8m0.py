"""E8M0 factors in every MX layout: U8 or F8_E8M0, and the code 255."""

import pytest
import torch
from checkpoint_cases import assert_same_bytes, assert_same_values
from safetensors import safe_open
from safetensors.torch import save_file

from qtensor import checkpoints
from qtensor.checkpoints import CheckpointError, layouts
from qtensor.core.quantizer_registry import parse

NAME = "l.up.weight"
U8, E8M0 = torch.uint8, torch.float8_e8m0fnu
DTYPES = {"qtensor": (U8,), "mlx": (U8,), "torchao": (E8M0,), "gpt-oss": ()}
"""The layouts that store one dtype alone; the others have both. torchao 0.18 asserts E8M0, and
test_checkpoints_gpt_oss.py has the experts of gpt-oss."""
NAN = ("qtensor", "torchao")
"""Layouts whose origin decodes 255 to NaN; others give infinity, or no result that is defined."""
FORMATS = ("mxfp8", "mxfp4", "mxfp6(packed=True)")


def held(fmt):
    """The safetensors layouts that hold a format."""
    words = fmt.partition("(")[0]
    for name, layout in layouts().items():
        formats = " ".join(layout.writer.formats if layout.writer else ())
        if name == "qtensor" or (words in formats and layout.writer.suffix == ".safetensors"):
            yield name


def stored(folder, name, fmt, dtype, change=lambda codes: None):
    """Write a weight, its factors in ``dtype`` after a change of their codes."""
    tensor = parse(fmt)(torch.randn(128, 256).bfloat16())
    checkpoints.save({NAME: tensor}, folder, layout=name, config={"dtype": "bfloat16"})
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        texts, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    (key,) = (key for key in tensors if "scale" in key)
    codes = tensors[key].clone().view(U8)
    change(codes)
    save_file({**tensors, key: codes.view(dtype)}, path, texts)
    return tensor


CASES = [
    (name, fmt, dtype)
    for fmt in FORMATS
    for name in held(fmt)
    for dtype in DTYPES.get(name, (U8, E8M0))
    if not (name == "torchao" and fmt.startswith("mxfp6"))  # it holds FP6 unpacked
]


@pytest.mark.parametrize(("name", "fmt", "dtype"), CASES)
def test_factors_of_either_dtype(name, fmt, dtype, tmp_path):
    tensor = stored(tmp_path / "x", name, fmt, dtype)
    with checkpoints.open(tmp_path / "x", name) as checkpoint:
        values = checkpoint[NAME].dequantize(torch.float32)
        assert_same_values(values, tensor.dequantize(torch.float32))
        assert_same_values(checkpoint.dense(NAME, torch.float32), values)
        if name != "comfyui":  # which swizzles them
            assert_same_bytes(checkpoint[NAME], tensor)


@pytest.mark.parametrize(("name", "fmt", "dtype"), CASES)
def test_a_factor_of_255(name, fmt, dtype, tmp_path):
    """Ours is NaN. The origin's values are refused where origins disagree about them."""
    stored(tmp_path / "x", name, fmt, dtype, lambda codes: codes.view(-1)[:1].fill_(255))
    with checkpoints.open(tmp_path / "x", name) as checkpoint:
        nans = checkpoint[NAME].dequantize(torch.float32).isnan()
        assert nans.sum() == 32
        assert nans[0, :32].all()
        if name in NAN:
            assert checkpoint.dense(NAME, torch.float32).isnan().sum() == 32
        else:
            with pytest.raises(CheckpointError, match="factors are not 255") as raised:
                checkpoint.dense(NAME)
            assert raised.value.tensor == NAME
    assert "1 of 1024 factors are NaN" in checkpoints.verify(tmp_path / "x", name).problems[0].text
