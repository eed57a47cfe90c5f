"""``aten._grouped_mm`` of a quantized weight (groups, K, N): the products that experts need."""

import pytest
import torch
from torch.nn import functional as F

import qtensor
from qtensor.library.define import FILLS

FORMATS = ["fp8", "fp8_rowwise", "fp8_blockwise", "mxfp4", "mxfp6", "mxfp8", "nvfp4"]
OFFS = torch.tensor([3, 3, 9, 12], dtype=torch.int32)  # the second group has no rows


def operands(fmt, dtype=torch.float32):
    torch.manual_seed(0)
    weight = qtensor.quantize(torch.randn(4, 128, 256, dtype=dtype), fmt)
    return torch.randn(12, 128, dtype=dtype), weight


def by_hand(x, values):
    parts = zip(x.split([3, 0, 6, 3]), values, strict=True)
    return torch.cat([rows.double() @ matrix.double() for rows, matrix in parts])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_product_of_each_group(fmt, dtype):
    x, weight = operands(fmt, dtype)
    y = F.grouped_mm(x, weight, offs=OFFS)
    assert y.dtype == dtype
    wanted = by_hand(x, weight.dequantize())
    bound = {torch.float32: 1e-4, torch.bfloat16: 0.2}[dtype]
    assert (y.double() - wanted).abs().max() < bound


@pytest.mark.parametrize("fmt", ["fp8", "mxfp4", "mxfp8", "nvfp4"])
def test_a_transposed_weight_and_the_gradient(fmt):
    torch.manual_seed(0)
    weight = qtensor.quantize(torch.randn(4, 256, 128), fmt)
    x = torch.randn(12, 128, requires_grad=True)
    y = F.grouped_mm(x, weight.mT, offs=OFFS)
    gradient = torch.randn(12, 256)
    y.backward(gradient)
    values = weight.dequantize()
    assert (y.double() - by_hand(x.detach(), values.mT)).abs().max() < 1e-4
    assert (x.grad.double() - by_hand(gradient, values)).abs().max() < 2e-4


def test_a_group_without_rows_is_not_decoded(monkeypatch):
    x, weight = operands("nvfp4")
    products = []
    fill = FILLS["gemm"]
    monkeypatch.setitem(FILLS, "gemm", lambda out, args: (products.append(1), fill(out, args)))
    F.grouped_mm(x, weight, offs=OFFS)
    assert len(products) == 3


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_graph_serves_other_groups():
    x, weight = operands("mxfp8")
    compiled = torch.compile(
        lambda x, w, offs: F.grouped_mm(x, w, offs=offs), backend="aot_eager", fullgraph=True
    )
    for offs in (OFFS, torch.tensor([0, 12, 12, 12], dtype=torch.int32)):
        assert torch.equal(compiled(x, weight, offs), F.grouped_mm(x, weight, offs=offs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w: (x[:, :64], w, OFFS), r"rows \(M, K\), a weight \(groups, K, N\)"),
        (lambda x, w: (x, w, OFFS[:3]), r"offs \(groups,\)"),
        (lambda x, w: (x, w, OFFS.flip(0)), "must have zero or more rows"),
        (lambda x, w: (x, w, OFFS - 1), "must sum to the rows"),
        (lambda x, w: (x, w[0], OFFS), r"a weight \(groups, K, N\)"),
    ],
    ids=["columns", "groups", "negative", "sum", "matrix"],
)
def test_bad_calls_are_refused(change, message):
    x, weight, offs = change(*operands("mxfp8"))
    with pytest.raises(qtensor.QTensorError, match=message):
        torch.ops.aten._grouped_mm(x, weight, offs)
