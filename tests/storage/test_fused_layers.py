"""Layers that torch runs as one op without gradients: attention and encoders of ``torch.nn``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qtensor

FORMATS = ["fp8", "fp8_rowwise", "fp8_blockwise", "mxfp4", "mxfp6", "mxfp8", "nvfp4"]
MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
PADDING = torch.arange(16).expand(2, -1) >= torch.tensor([[16], [10]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(16)
MASKS = {
    "none": {},
    "padding": {"src_key_padding_mask": PADDING},
    "causal": {"mask": CAUSAL, "is_causal": True},
    "bool": {"mask": torch.isinf(CAUSAL)},
    "both": {"mask": torch.isinf(CAUSAL), "src_key_padding_mask": PADDING},
}


@MODES
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("masks", list(MASKS))
@pytest.mark.parametrize(("norm_first", "activation"), [(False, "relu"), (True, "gelu")])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_an_encoder_computes_what_it_does_with_gradients(fmt, masks, norm_first, activation, mode):
    layer = nn.TransformerEncoderLayer(
        128, 4, 256, batch_first=True, norm_first=norm_first, activation=activation
    )
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    qtensor.quantize_(model, fmt, lambda module, name: "linear" in name)
    x = torch.randn(2, 16, 128)
    wanted = model(x, **MASKS[masks])
    with mode():
        found = model(x, **MASKS[masks])
    # Rows of padding have no meaning; torch leaves zeros in them.
    rows = ~PADDING if "src_key_padding_mask" in MASKS[masks] else slice(None)
    # The same ops in another order of float32 sums: about 20 roundings of values near 3.
    assert (found - wanted)[rows].abs().max() < 1e-4


@MODES
@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_attention_with_quantized_projections(fmt, need_weights, average, same, mode):
    layer = nn.MultiheadAttention(128, 4, batch_first=True).eval()
    for module, name in ((layer, "in_proj_weight"), (layer.out_proj, "weight")):
        weight = qtensor.quantize(getattr(module, name).detach(), fmt)
        setattr(module, name, nn.Parameter(weight, requires_grad=False))
    query = torch.randn(2, 16, 128)
    key = query if same else torch.randn(2, 16, 128)
    options = {"need_weights": need_weights, "average_attn_weights": average}
    wanted = layer(query, key, key, **options)
    with mode():
        found = layer(query, key, key, **options)
    torch.testing.assert_close(found[0], wanted[0], atol=1e-5, rtol=0)
    assert (found[1] is None) == (wanted[1] is None)
    if need_weights:
        torch.testing.assert_close(found[1], wanted[1], atol=1e-5, rtol=0)


def test_quantized_inputs_are_named():
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True).eval()
    x = qtensor.quantize(torch.randn(2, 16, 128), "mxfp8")
    with torch.no_grad(), pytest.raises(qtensor.UnsupportedError, match="inputs must be plain"):
        layer(x)
