"""``aten._grouped_mm`` of a quantized weight (groups, K, N): the products that experts need."""

import copy
import pickle

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

import qtensor
from qtensor.library.define import FILLS
from qtensor.storage import geometry

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


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f != "fp8"])
def test_a_transposed_stack_is_not_copied(fmt, monkeypatch):
    """``weight.mT`` reads the experts that have rows, and has the bits of their own products."""
    weight = qtensor.quantize(torch.randn(4, 256, 128), fmt)
    x = torch.randn(12, 128)
    experts = [F.linear(rows, weight[e]) for e, rows in enumerate(x.split([3, 0, 6, 3]))]

    def refuse(*args):
        raise AssertionError("the stack was copied")

    monkeypatch.setattr(geometry, "transpose_each", refuse)
    turned = weight.mT
    assert torch.equal(F.grouped_mm(x, turned, offs=OFFS), torch.cat(experts))
    batch = x.view(4, 3, 128)
    products = torch.stack([F.linear(rows, weight[e]) for e, rows in enumerate(batch)])
    assert torch.equal(torch.bmm(batch, turned), products)
    assert torch.equal(torch.matmul(batch, turned.detach()), products)
    assert torch.equal(qtensor.gemm(batch, turned.mT, "TN"), products)
    gradient = torch.randn(4, 3, 256)
    assert torch.equal(qtensor.gemm(gradient, turned, "TN"), torch.bmm(gradient, weight))
    assert turned.nbytes == weight.nbytes
    with pytest.raises(AssertionError, match="was copied"):
        turned.buffers()


@pytest.mark.parametrize("fmt", ["mxfp4", "fp8_blockwise", "nvfp4"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_graph_reads_the_stack(fmt):
    weight = qtensor.quantize(torch.randn(4, 256, 128), fmt)
    x = torch.randn(12, 128)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    def step(x, weight):
        return F.grouped_mm(x, weight.mT, offs=OFFS)

    compiled = torch.compile(step, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    with torch.no_grad():
        assert torch.equal(compiled(x, weight), step(x, weight))
    (graph,) = graphs
    names = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert "qtensor.grouped_gemm.default" in names
    copies = ("aten.permute", "aten.clone", "aten.copy.")
    assert not {name for name in names if name.startswith(copies)}

    turn = torch.compile(lambda w: w.mT * 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(turn(weight), weight.dequantize().mT)


def test_a_reader_of_a_transposed_stack_gets_bytes_of_its_own():
    weight = qtensor.quantize(torch.randn(4, 256, 128), "mxfp4")
    turned = weight.mT
    saved = pickle.loads(pickle.dumps(turned))
    assert torch.equal(saved.dequantize(), weight.dequantize().mT)
    assert turned.get_usages() == {"rowwise": False, "columnwise": True}
    assert [b.shape for b in turned.buffers()] == [b.shape for b in saved.buffers()]
    turned.copy_(torch.zeros(4, 128, 256))
    assert not weight.dequantize().any()
    assert copy.deepcopy(weight.mT).dequantize().equal(weight.dequantize().mT)


def change_data(weight, other):
    weight.data = other


def drop_a_usage(weight, other):
    weight.update_usage(columnwise=False)


@pytest.mark.parametrize("change", [change_data, drop_a_usage])
def test_a_transposed_stack_keeps_its_values_when_the_stack_gets_other_buffers(change):
    weight, other = (
        qtensor.quantize(torch.randn(4, 256, 128), "mxfp4", columnwise=True) for _ in range(2)
    )
    turned, want = weight.mT, weight.dequantize().mT
    change(weight, other)
    assert torch.equal(turned.dequantize(), want)
    assert turned.get_usages() == {"rowwise": True, "columnwise": True}
    turned.buffers()
    assert torch.equal(turned.dequantize(), want)


def test_a_transposed_stack_takes_over_other_buffers():
    weight, other = (qtensor.quantize(torch.randn(4, 256, 128), "mxfp4") for _ in range(2))
    parameter, x = torch.nn.Parameter(weight.mT), torch.randn(4, 3, 128)
    parameter.data = other.mT
    assert torch.equal(parameter.dequantize(), other.dequantize().mT)
    assert torch.equal(torch.bmm(x, parameter.detach()), torch.bmm(x, other.mT))


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
