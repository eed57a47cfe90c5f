"""GGUF files have no layers that scale or rotate their inputs."""

import pytest
import torch
from gguf_models import model

import qtensor
from qtensor import checkpoints
from qtensor.core.errors import UnsupportedError
from qtensor.integrations.gguf import save_gguf
from qtensor.integrations.transformers import weights
from qtensor.modules.input_hook import TRANSFORM, set_input_step
from qtensor.modules.input_transform import InputTransform

pytest.importorskip("gguf", reason="the package gguf is not installed: pip install gguf")


@pytest.mark.parametrize("layout", ["qtensor", "modelopt", "compressed-tensors"])
def test_scaled_and_rotated_inputs_are_refused(layout, tmp_path):
    """The file was written without the scales, with which alone the weights are right."""
    made = model("qwen3")
    qtensor.quantize_(made, {"*mlp*": "nvfp4"})
    layer = made.model.layers[1].mlp.down_proj
    rotated = layout == "compressed-tensors"
    transform = InputTransform(hadamard=32) if rotated else InputTransform(torch.ones(192))
    set_input_step(layer, TRANSFORM, transform)
    checkpoints.save(weights(made), tmp_path / "x", layout=layout, config=made.config.to_dict())
    with checkpoints.open(tmp_path / "x", accept_rotated=True) as opened:
        for source in (made, opened):
            with pytest.raises(
                UnsupportedError, match=r"neither scales nor .*layers\.1\.mlp\.down"
            ):
                save_gguf(source, tmp_path / "x.gguf")
