"""A weight of a convolution: a quantized matrix under the shape of the weight."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from formats import FORMATS, FormatCase, assert_same_tensor
from torch import nn

import qtensor
import qtensor.checkpoints
from qtensor.storage.rebuild import reshaped, tensor_of

formats = pytest.mark.parametrize("case", FORMATS, ids=lambda case: case.name)
SHAPE = (40, 6, 3, 3)


def view(case: FormatCase, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    return reshaped(case.quantize(torch.randn(40, 54, generator=draw)), SHAPE)


def assert_same_view(a, b):
    assert tuple(a.shape) == tuple(b.shape) == SHAPE
    assert_same_tensor(tensor_of(a), tensor_of(b))


def by_pickle(t):
    return pickle.loads(pickle.dumps(t))


def by_torch(t):
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file)


COPIES = {
    "clone": torch.clone,
    "deepcopy": copy.deepcopy,
    "pickle": by_pickle,
    "torch.save": by_torch,
    "to": lambda t: t.to("cpu", copy=True),
    "contiguous": lambda t: t.contiguous(),
    "detach": lambda t: t.detach(),
    "view": lambda t: reshaped(t.view(40, 54), SHAPE),
    "copy_": lambda t: torch.empty_like(t).copy_(t),
}


@formats
@pytest.mark.parametrize("name", COPIES)
def test_copies_hold_the_same_codes(case: FormatCase, name):
    t = view(case)
    assert_same_view(COPIES[name](t), t)


@formats
def test_it_reads_and_writes_as_its_shape(case: FormatCase):
    t = view(case)
    values = tensor_of(t).dequantize().view(SHAPE)
    assert torch.equal(t.dequantize(), values)
    assert torch.equal(t[:32].dequantize(), values[:32])
    assert torch.equal(t[3, 1], values[3, 1])
    assert torch.equal(t * 2, values * 2)
    assert t.nbytes == tensor_of(t).nbytes
    other = view(case, 1)
    t.copy_(other)
    assert_same_view(t, other)
    t.copy_(values)
    again = view(case).copy_(values)
    assert_same_view(t, again)
    with pytest.raises(qtensor.UnsupportedError, match=r"View it back to \(40, 54\)"):
        t.codes()
    with pytest.raises(qtensor.UnsupportedError, match=r"before quantize_"):
        t.to(memory_format=torch.channels_last)
    values = t.dequantize()
    assert torch.equal(t.view(-1).view(SHAPE).dequantize(), values)
    report = qtensor.error_report(values, t)
    assert (report.max_abs_error, report.shape) == (0, SHAPE)
    assert "40x6x3x3" in str(qtensor.debug.show(t, original=values))


@torch.no_grad()
def test_a_layer_moves_and_loads():
    layer, case = nn.Conv2d(6, 40, 3, bias=False), FORMATS[-1]
    layer.weight = nn.Parameter(view(case), requires_grad=False)
    x = torch.randn(2, 6, 5, 5)
    y = layer(x)
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    layer.float()
    assert torch.equal(layer(x), y)
    empty = copy.deepcopy(layer).to("meta").to_empty(device="cpu")
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty(x), y)
    plain = nn.Conv2d(6, 40, 3, bias=False)
    plain.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(plain(x), y)
    assert_same_view(plain.weight, layer.weight)
    layer.share_memory()
    assert layer.weight.is_shared()
    assert torch.equal(layer(x), y)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@formats
def test_files_hold_it(case: FormatCase, tmp_path):
    t, plain = view(case), torch.randn(3)
    path = tmp_path / "model.safetensors"
    qtensor.checkpoints.save({"conv.weight": t, "conv.bias": plain}, path)
    with qtensor.checkpoints.open(path) as checkpoint:
        assert_same_view(checkpoint["conv.weight"], t)
        assert torch.equal(checkpoint.dense("conv.weight"), t.dequantize())
    qtensor.checkpoints.convert(path, tmp_path / "again.safetensors", layout="qtensor")
    assert_same_view(
        qtensor.checkpoints.load_state_dict(tmp_path / "again.safetensors")["conv.weight"], t
    )
    rule = "quantized matrices|2-D 'weight'|rowwise"
    with pytest.raises(qtensor.QTensorError, match=rule):
        qtensor.checkpoints.save({"conv.weight": t}, tmp_path / "other", "compressed-tensors")
    dcp.save({"w": t}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    loaded = {"w": view(case, 1)}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_same_view(loaded["w"], t)


def test_a_file_that_lies_about_the_matrix(tmp_path):
    path = tmp_path / "model.safetensors"
    qtensor.checkpoints.save({"conv.weight": view(FORMATS[-1])}, path)
    data = path.read_bytes()
    assert b'matrix\\":[40,54]' in data
    path.write_bytes(data.replace(b'matrix\\":[40,54]', b'matrix\\":[54,50]'))
    with pytest.raises(qtensor.QTensorError, match=r"the matrix of a weight \[40, 6, 3, 3\]"):
        qtensor.checkpoints.open(path)


def test_a_pickle_that_lies():
    rebuild, (_, shape, *rest) = view(FORMATS[0]).__reduce_ex__(2)
    with pytest.raises(qtensor.QTensorError, match="as many elements"):
        rebuild(torch.zeros(40, 54), shape, *rest)
    with pytest.raises(qtensor.QTensorError, match="as many elements"):
        rebuild(qtensor.quantize(torch.zeros(40, 50), "mxfp8"), shape, *rest)
