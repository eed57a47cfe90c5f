"""Integer block types of GGUF files: decoded as the package gguf does, quantized again."""

import numpy as np
import pytest
import torch
from checkpoint_cases import assert_same_bytes, assert_same_values

import qtensor
from qtensor import checkpoints
from qtensor.checkpoints.containers.gguf import NUMBERS, TYPES
from qtensor.checkpoints.ggml_blocks import DECODERS
from tests.checkpoints.test_checkpoints_gguf import NO_GGUF, raw, write

gguf = pytest.importorskip("gguf", reason=NO_GGUF)


FACTORS = {"Q6_K": [208], "Q4_0": [0], "Q5_0": [0], "Q8_0": [0]}
"""Bytes of a block at which its float16 factors begin; other types have two, at its beginning."""


def blocks_of(kind, *shape, finite=True):
    """Random blocks of a type for a shape, and the values that the package decodes."""
    size = TYPES[NUMBERS[kind]]
    stored = (*shape[:-1], shape[-1] // size.block, size.nbytes)
    data = np.random.default_rng(len(shape)).integers(0, 256, stored, dtype=np.uint8)
    for at in FACTORS.get(kind, [0, 2]) if finite else ():
        data[..., at : at + 2] = np.float16(0.0371).reshape(1).view(np.uint8)
    with np.errstate(all="ignore"):
        values = gguf.dequantize(data.reshape(*shape[:-1], -1), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(data), torch.from_numpy(values)


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("shape", [(40, 512), (3, 5, 256), (256,)], ids=str)
def test_every_type_as_the_package_decodes_it(kind, shape, tmp_path):
    """Random bytes, so that all codes and factors occur, NaN and infinite ones too."""
    blocks, want = blocks_of(kind, *shape, finite=False)
    with write(tmp_path, [("a.weight", shape, NUMBERS[kind], raw(blocks))]) as checkpoint:
        assert_same_values(checkpoint["a.weight"], want)
        for dtype in (torch.float32, torch.bfloat16):
            assert_same_values(checkpoint.dense("a.weight", dtype), want.to(dtype))
        assert checkpoint.why_dense("a.weight") == f"no format holds type {kind}"
        (row,) = checkpoint.table().rows
        assert (row.kind, row.shape, row.nbytes) == ("dense", shape, blocks.numel())


def test_values_that_were_quantized_to_a_type(tmp_path):
    """The package's own codes of a matrix decode to values near it: the order of elements fits."""
    values = np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)
    bits = {"Q4_0": 0.3, "Q4_1": 0.3, "Q5_0": 0.15, "Q5_1": 0.15, "Q8_0": 0.02}
    for kind, bound in bits.items():  # a step is at most max |x| / 7, x < 4.2
        data = gguf.quantize(values, gguf.GGMLQuantizationType[kind])
        file = write(tmp_path, [("a", (8, 256), NUMBERS[kind], data.tobytes())])
        with file as checkpoint:
            error = (checkpoint["a"] - torch.from_numpy(values)).abs().max()
            assert 0 < error < bound


def test_a_file_is_quantized_again(tmp_path):
    """As the values would be, also where a weight is decoded in parts of rows."""
    shapes = {"a.weight": ("Q4_K", (2100, 512)), "b.weight": ("Q6_K", (64, 256))}
    made = {name: blocks_of(kind, *shape) for name, (kind, shape) in shapes.items()}
    tensors = [
        (name, shape, NUMBERS[kind], raw(made[name][0])) for name, (kind, shape) in shapes.items()
    ]
    write(tmp_path, tensors).close()
    path = tmp_path / "x.gguf"
    with pytest.raises(checkpoints.CheckpointError, match="no format holds type Q4_K"):
        checkpoints.convert(path, tmp_path / "none")
    report = checkpoints.convert(path, tmp_path / "again", format="nvfp4")
    assert report.counts() == {"requantized": 2}
    with checkpoints.open(tmp_path / "again") as again:
        for name, (_, values) in made.items():
            assert_same_bytes(again[name], qtensor.quantize(values, "nvfp4"))
    checkpoints.dequantize(path, tmp_path / "dense", dtype="f32")
    with checkpoints.open(tmp_path / "dense") as dense:
        for name, (_, values) in made.items():
            assert_same_bytes(dense[name], values)
