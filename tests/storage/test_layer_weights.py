"""Convolutions, embedding bags and recurrent layers with quantized weights.

The oracle is torch's own layer with the decoded weight.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from compile_helpers import Compiled
from torch import nn
from torch.nn import functional as F

import qtensor
from qtensor.kernels import table
from qtensor.library import layer_weights
from qtensor.library.define import FILLS
from qtensor.storage.rebuild import reshaped

FORMATS = ["fp8", "fp8_rowwise", "fp8_blockwise", "mxfp4", "mxfp6(packed=True)", "mxfp8", "nvfp4"]
by_format = pytest.mark.parametrize("fmt", FORMATS)


def quantized(weight, fmt):
    """Return a weight (N, C, *kernel) as ``quantize_`` stores it."""
    return reshaped(qtensor.quantize(weight.flatten(1), qtensor.api.parsed(fmt)), weight.shape)


@pytest.fixture
def decoded(monkeypatch):
    """Return the sizes of all that is decoded, of the kernels and of the reference."""
    sizes = []
    native, fill = table.dequantize_, FILLS["dequantize"]

    def by_kernels(quantizer, buffers, shape, out, *part):
        done = native(quantizer, buffers, shape, out, *part)
        sizes.extend([out.numel()] * done)
        return done

    def by_reference(out, args):
        before = len(sizes)
        fill(out, args)
        sizes.extend([out.numel()] * (len(sizes) == before))

    monkeypatch.setattr(table, "dequantize_", by_kernels)
    monkeypatch.setitem(FILLS, "dequantize", by_reference)
    return sizes


# ---- convolutions


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1},
        {"padding": "same", "dilation": 2},
        {"groups": 2, "padding": 1},
        {"groups": 4, "stride": (2,)},
    ],
)
@pytest.mark.parametrize("rank", [1, 2, 3])
@by_format
def test_a_convolution_is_that_of_the_decoded_weight(fmt, rank, options):
    groups = options.get("groups", 1)
    weight = quantized(torch.randn(12, 64 // groups, *[3] * rank), fmt)
    options = {k: v * rank if isinstance(v, tuple) else v for k, v in options.items()}
    convolve = getattr(F, f"conv{rank}d")
    x = torch.randn(2, 64, *[7] * rank, requires_grad=True)
    bias, plain = torch.randn(12), weight.dequantize()
    y, wanted = convolve(x, weight, bias, **options), convolve(x, plain, bias, **options)
    assert torch.equal(y, wanted)
    assert y.stride() == wanted.stride()
    gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in (y, wanted)]
    assert torch.equal(*gradients)
    with torch.inference_mode():
        one = x.detach()[0]
        wanted = convolve(one, plain, bias, **options)
        assert torch.equal(convolve(one, weight, bias, **options), wanted)


def test_other_inputs_and_transposed_convolutions():
    weight = quantized(torch.randn(8, 16, 3, 3), "mxfp8")
    plain = weight.dequantize()
    x = torch.randn(2, 16, 9, 9).to(memory_format=torch.channels_last)
    y, wanted = F.conv2d(x, weight), F.conv2d(x, plain)
    assert torch.equal(y, wanted)
    assert y.stride() == wanted.stride()
    q = qtensor.quantize(x.contiguous(), "mxfp8")
    assert torch.equal(F.conv2d(q, weight), F.conv2d(q.dequantize(), plain))
    assert torch.equal(F.conv2d(q, plain), F.conv2d(q.dequantize(), plain))
    turned = torch.randn(2, 8, 5, 5)
    steps = {"stride": 2, "padding": 1, "output_padding": 1}
    assert torch.equal(
        F.conv_transpose2d(turned, weight, **steps), F.conv_transpose2d(turned, plain, **steps)
    )
    half = x.bfloat16(), weight.bfloat16()
    assert torch.equal(F.conv2d(*half), F.conv2d(half[0], weight.dequantize(torch.bfloat16)))
    # Blocks along the last dim, as ``quantize`` of the weight itself has them.
    rows = qtensor.quantize(torch.randn(8, 16, 3, 32), "mxfp8")
    wide = torch.randn(1, 16, 4, 40)
    assert torch.equal(F.conv2d(wide, rows), F.conv2d(wide, rows.dequantize()))


SPLITS = {
    "one group": (300, 1, [(0, 128), (128, 256), (256, 300)]),
    "whole groups": (512, 32, [(0, 128), (128, 256), (256, 384), (384, 512)]),
    "parts of groups": (
        600,
        2,
        [(i, min(i + 128, j)) for j in (300, 600) for i in range(j - 300, j, 128)],
    ),
}
"""Output channels, groups, and the tiles of 128 channels: within a group, or whole groups."""


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("fmt", ["fp8_blockwise", "mxfp8(swizzled=True)", "nvfp4"])
def test_a_tile_is_decoded_at_a_time(fmt, split, native, monkeypatch, decoded):
    """At most 128 output channels are decoded at once, and each tile has torch's bytes."""
    channels, groups, tiles = SPLITS[split]
    plain = torch.randn(channels, 8, 4, 4)
    weight = quantized(plain, fmt)
    monkeypatch.setattr(layer_weights, "TILE", plain[:128].numel())
    if not native:
        monkeypatch.setattr(table, "dequantize_", lambda *args: False)
    x, bias = torch.randn(2, 8 * groups, 6, 6), torch.randn(channels)
    decoded.clear()
    y = F.conv2d(x, weight, bias, groups=groups)
    # Without kernels, rows are decoded from a multiple of 128 to the next one.
    rows = 128 if native else 256
    assert max(decoded) <= rows * plain[0].numel() < plain.numel()
    values, own = weight.dequantize(), channels // groups
    parts = []
    for first, end in tiles:
        inputs = x[:, first // own * 8 : (first // own + max((end - first) // own, 1)) * 8]
        count = inputs.shape[1] // 8
        parts.append(F.conv2d(inputs, values[first:end], bias[first:end], groups=count))
    assert torch.equal(y, torch.cat(parts, 1))


def test_tiles_of_a_large_weight_are_bounded(decoded):
    weight = quantized(torch.randn(1280, 640, 3, 3, dtype=torch.bfloat16), "nvfp4")
    decoded.clear()
    y = F.conv2d(torch.randn(1, 640, 4, 4, dtype=torch.bfloat16), weight)
    assert y.shape == (1, 1280, 2, 2)
    assert max(decoded) <= layer_weights.TILE < weight.numel() // 7
    assert sum(decoded) == weight.numel()


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.nightly(reason="aot_eager has the same ops")),
    ],
)
def test_a_compiled_convolution(backend):
    layer = nn.Conv2d(16, 8, 3, padding=1)
    layer.weight = nn.Parameter(quantized(layer.weight.detach(), "nvfp4"), requires_grad=False)
    compiled = Compiled(layer, backend, dynamic=True)
    for batch in (2, 3, 5):
        x = torch.randn(batch, 16, 6, 6, requires_grad=True)
        y, wanted = compiled(x), layer(x)
        assert torch.equal(y, wanted)
        gradients = [torch.autograd.grad(out.sum(), x)[0] for out in (y, wanted)]
        assert torch.equal(*gradients)
    compiled.check_graphs(1)


def test_arguments_that_do_not_fit_are_named():
    weight = quantized(torch.randn(8, 16, 3, 3), "mxfp8")
    buffers = weight._parts[0].buffers(), "mxfp8", [8, 144], [8, 16, 3, 3]
    steps = ([1], [0], [1], False, [0])
    op, x = torch.ops.qtensor.convolution, torch.randn(1, 16, 5, 5)
    with pytest.raises(RuntimeError, match="expected input"):
        F.conv2d(torch.randn(1, 15, 5, 5), weight.dequantize())  # torch's own words
    with pytest.raises(qtensor.QTensorError, match=r"channels and dims of the weight; got \(1, 15"):
        F.conv2d(torch.randn(1, 15, 5, 5), weight)
    with pytest.raises(qtensor.QTensorError, match=r"stride holds 2 integers from 1 on"):
        op(x, *buffers, None, [0], *steps[1:], 1)
    with pytest.raises(qtensor.QTensorError, match=r"a value for each output channel"):
        op(x, *buffers, torch.ones(7), *steps, 1)
    with pytest.raises(qtensor.QTensorError, match=r"rows and values of the weight"):
        op(x, *buffers[:3], [8, 8, 3, 3], None, *steps, 2)


@pytest.mark.parametrize("layer", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
def test_the_dtypes_of_a_convolution_are_equal(layer):
    """As torch has it, with a bias and without; a converted module keeps its codes."""
    module = layer(32, 32, 3, bias=False)
    module.weight = nn.Parameter(quantized(module.weight.detach(), "mxfp8"), requires_grad=False)
    x = torch.randn(2, 32, *[5] * (module.weight.ndim - 2))
    rule = r"convolution: the input and the bias have the dtype of the weight; got torch\.bf"
    with pytest.raises(qtensor.QTensorError, match=rule):
        module(x.bfloat16())
    module.bias = nn.Parameter(torch.ones(32, dtype=torch.bfloat16))
    words = r"Input type \(float\) and bias type|float32 and torch\.bfloat16 for torch\.float32"
    with pytest.raises((RuntimeError, qtensor.QTensorError), match=words):
        module(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    half = module.to(torch.bfloat16)
    assert half.weight.quantizer.format == "mxfp8"
    assert torch.equal(half(x.bfloat16()), y)


# ---- embedding bags


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@by_format
def test_an_embedding_bag_is_that_of_the_decoded_table(fmt, mode, padding, last, decoded):
    q = qtensor.quantize(torch.randn(50, 64), qtensor.api.parsed(fmt))
    plain = q.dequantize()
    index = torch.tensor([3, 4, 4, 9, 3, 3, 49, 0, 3])
    # The third bag is empty, and the last has nothing but padding.
    offsets = torch.tensor([0, 4, 6, 6, 8, *([9] if last else [])])
    weights = torch.randn(9, requires_grad=True) if mode == "sum" else None
    kind = ("sum", "mean", "max").index(mode)

    def bag(table_):
        return torch.embedding_bag(
            table_, index, offsets, False, kind, False, weights, last, padding
        )

    decoded.clear()
    found = bag(q)
    assert sum(decoded) == len(index.unique()) * 64, "each row that is needed, once"
    for one, wanted in zip(found, bag(plain), strict=True):
        assert torch.equal(one, wanted)
    if weights is not None:
        gradients = [torch.autograd.grad(bag(t)[0].square().sum(), weights)[0] for t in (q, plain)]
        assert torch.equal(*gradients)


def test_a_compiled_embedding_bag():
    layer = nn.EmbeddingBag(50, 64, mode="max", padding_idx=3)
    weight = qtensor.quantize(layer.weight.detach(), "mxfp4")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    compiled = Compiled(layer, dynamic=True)
    for count in (2, 3, 5):
        index = torch.randint(0, 50, (count, 4))
        wanted = F.embedding_bag(index, weight.dequantize(), mode="max", padding_idx=3)
        assert torch.equal(compiled(index), wanted)
    assert compiled.graphs == 2, "as many as for a plain table"


def test_wrong_indices_are_named():
    q = qtensor.quantize(torch.randn(50, 64), "mxfp8")
    for wrong in (50, -1):
        with pytest.raises(qtensor.QTensorError, match=f"from 0 to 49.*got {wrong}"):
            F.embedding_bag(torch.tensor([[1, wrong]]), q)
    with pytest.raises(qtensor.UnsupportedError, match="only the table may be quantized"):
        F.embedding_bag(torch.tensor([[1] * 64]), q, mode="sum", per_sample_weights=q[:1])


# ---- recurrent layers


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("fmt", ["fp8", "mxfp8", "nvfp4"])
def test_an_lstm_is_that_of_the_decoded_weights(fmt, mode):
    layer = nn.LSTM(64, 32, 2, bidirectional=True)
    qtensor.quantize_(layer, fmt, kinds=["recurrent"])
    plain = copy.deepcopy(layer)
    for name, parameter in list(plain.named_parameters()):
        if name.startswith("weight"):
            setattr(plain, name, nn.Parameter(parameter.dequantize(), requires_grad=False))
    x = torch.randn(5, 3, 64)
    with mode():
        found, wanted = layer(x), plain(x)
    assert torch.equal(found[0], wanted[0])
    assert all(map(torch.equal, found[1], wanted[1]))
    if mode is torch.enable_grad:
        x.requires_grad_()
        gradients = [torch.autograd.grad(m(x)[0].square().sum(), x)[0] for m in (layer, plain)]
        assert torch.equal(*gradients)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_other_recurrent_layers_multiply_by_codes(kind):
    layer = kind(64, 32, 2)
    qtensor.quantize_(layer, "mxfp8", kinds=["recurrent"])
    plain = copy.deepcopy(layer)
    for name, parameter in list(plain.named_parameters()):
        if name.startswith("weight"):
            setattr(plain, name, nn.Parameter(parameter.dequantize(), requires_grad=False))
    x = torch.randn(5, 3, 64, requires_grad=True)
    found, wanted = layer(x)[0], plain(x)[0]
    # Sums of 64 products of values near 1, in another order, and five steps.
    assert (found - wanted).abs().max() < 5 * 64 * 2**-24 * math.sqrt(64)
    gradients = [torch.autograd.grad(m(x)[0].square().sum(), x)[0] for m in (layer, plain)]
    assert torch.allclose(*gradients, atol=1e-4)
