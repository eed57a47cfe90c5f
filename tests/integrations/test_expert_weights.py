"""``ExpertWeights``: stacked experts that were quantized apart, and their products."""

import copy
import io

import pytest
import torch
from torch.nn import functional as F

import qtensor
from qtensor.integrations.experts import ExpertWeights
from qtensor.integrations.stacking import common_factors, quantize_each, stack
from qtensor.library.define import FILLS
from qtensor.library.native_ops import left_to_python
from qtensor.quantizers import NVFP4Quantizer

FORMATS = ["fp8", "fp8_rowwise", "fp8_blockwise", "mxfp4", "mxfp6", "mxfp8", "nvfp4"]
EXPERTS, ROWS, COLUMNS = 4, 128, 64
OFFS = torch.tensor([3, 3, 9, 12], dtype=torch.int32)


def values(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(EXPERTS, ROWS, COLUMNS, dtype=dtype) * torch.tensor([1, 3, 5, 9]).view(
        -1, 1, 1
    ).to(dtype)


def experts(fmt, swapped=False):
    return ExpertWeights(quantize_each(values(), qtensor.quantizer(fmt)), swapped)


@pytest.mark.parametrize("fmt", FORMATS)
def test_each_expert_has_the_values_of_its_own_quantization(fmt):
    weight = experts(fmt)
    for i, matrix in enumerate(values()):
        wanted = qtensor.quantize(matrix, fmt).dequantize()
        assert torch.equal(weight[i].dequantize(), wanted)
        assert torch.equal(weight.dequantize()[i], wanted)


@pytest.mark.parametrize("fmt", FORMATS)
def test_parts_of_rows_that_were_quantized_apart(fmt):
    """Gate and up projections have separate factors in most checkpoints."""
    grid = [[qtensor.quantize(m[:128], fmt), qtensor.quantize(7 * m, fmt)] for m in values()]
    stacked = stack(grid)
    assert tuple(stacked.shape) == (EXPERTS, 2 * ROWS, COLUMNS)
    for i, parts in enumerate(grid):
        wanted = torch.cat([part.dequantize() for part in parts])
        assert torch.equal(stacked.dequantize()[i], wanted)


def test_nvfp4_with_and_without_a_stored_factor():
    plain = qtensor.quantize(values()[0], "nvfp4")
    other = NVFP4Quantizer(with_global_scale_inv=True)(values()[1])
    fourth = NVFP4Quantizer(e4m3_max=256.0)(values()[2])
    stacked = stack([[plain], [other], [fourth]])
    for i, matrix in enumerate((plain, other, fourth)):
        assert torch.equal(stacked[i].dequantize(), matrix.dequantize())


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
def test_common_factors_gives_the_bytes_back(fmt):
    matrices = [qtensor.quantize(m, fmt) for m in values()]
    stacked = stack([[m] for m in matrices])
    for i, matrix in enumerate(matrices):
        back = common_factors(stacked[i])
        assert back.quantizer == matrix.quantizer
        assert all(map(torch.equal, back.buffers(), matrix.buffers()))


def test_stack_refuses_what_shares_factors_or_differs():
    block = qtensor.quantize(torch.randn(96, 128), "fp8_blockwise", block_scaling_dim=2)
    with pytest.raises(qtensor.QTensorError, match="multiple of 128 rows"):
        stack([[block], [block]])
    mixed = [[qtensor.quantize(torch.randn(32, 32), f)] for f in ("mxfp8", "mxfp4")]
    with pytest.raises(qtensor.QTensorError, match="one shape, dtype and format"):
        stack(mixed)
    sides = [[qtensor.quantize(torch.randn(32, 32), "nvfp4", columnwise=True)]] * 2
    with pytest.raises(qtensor.QTensorError, match="rowwise"):
        stack(sides)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("swapped", [False, True])
def test_products_agree_with_the_decoded_weight(fmt, swapped):
    weight = experts(fmt, swapped)
    dense = weight.dequantize().double()
    rows = torch.randn(12, dense.shape[1], requires_grad=True)
    y = F.grouped_mm(rows, weight, offs=OFFS)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    sizes = [3, 0, 6, 3]
    parts = zip(rows.detach().double().split(sizes), dense, strict=True)
    wanted = torch.cat([r @ m for r, m in parts])
    assert (y.double() - wanted).abs().max() < 1e-3
    parts = zip(gradient.double().split(sizes), dense, strict=True)
    wanted = torch.cat([r @ m.T for r, m in parts])
    assert (rows.grad.double() - wanted).abs().max() < 1e-3
    batch = torch.randn(EXPERTS, 2, dense.shape[1])
    assert (torch.bmm(batch, weight).double() - batch.double() @ dense).abs().max() < 1e-3
    column = torch.randn(EXPERTS, dense.shape[2], 1)
    assert (torch.bmm(weight, column).double() - dense @ column.double()).abs().max() < 1e-3


def test_only_the_experts_with_rows_are_multiplied(monkeypatch):
    products = []
    fill = FILLS["gemm"]
    monkeypatch.setitem(FILLS, "gemm", lambda out, args: (products.append(1), fill(out, args)))
    with left_to_python():
        F.grouped_mm(torch.randn(12, COLUMNS), experts("nvfp4").mT, offs=OFFS)
    assert len(products) == 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("swapped", [False, True])
def test_views_share_the_codes(swapped, mode):
    weight = torch.nn.Parameter(experts("nvfp4", swapped), requires_grad=False)
    with mode():
        check_views(weight, swapped)


def check_views(weight, swapped):
    dense = weight.dequantize()
    codes = weight.stored.buffers()[0].data_ptr()
    for view in (weight.mT, weight.detach(), weight.permute(0, 2, 1), weight.contiguous()):
        assert view.stored.buffers()[0].data_ptr() == codes
    assert torch.equal(weight.mT.dequantize(), dense.mT)
    assert torch.equal(weight[torch.tensor(2)].dequantize(), dense[2])
    assert torch.equal(weight[torch.tensor([1, 1, 3])].dequantize(), dense[[1, 1, 3]])
    assert torch.equal(weight.unbind()[3].dequantize(), dense[3])
    halves = torch.chunk(weight, 2, dim=2 if swapped else 1)
    assert torch.equal(halves[1].dequantize(), dense.chunk(2, dim=2 if swapped else 1)[1])
    assert torch.equal(weight.split(1)[2].squeeze(0).dequantize(), dense[2])
    assert torch.equal(weight.to(torch.bfloat16).dequantize(), dense.to(torch.bfloat16))


def test_experts_in_whole_blocks_of_128():
    """Each expert has blocks of its own, so the experts of tokens are gathered by their codes."""
    quantizer = qtensor.quantizer("fp8_blockwise", block_scaling_dim=2)
    weight = ExpertWeights(quantize_each(values(), quantizer))
    gathered = weight[torch.tensor([3, 0, 3])]
    assert gathered.stored.quantizer == quantizer
    assert torch.equal(gathered.dequantize(), weight.dequantize()[[3, 0, 3]])
    x = torch.randn(3, 5, COLUMNS)
    assert torch.equal(torch.bmm(x, gathered.mT)[1], torch.bmm(x[1:2], weight[[0]].mT)[0])


def test_parameters_are_copied_and_saved():
    parameter = torch.nn.Parameter(experts("nvfp4", True), requires_grad=False)
    assert isinstance(parameter, ExpertWeights)
    for same in (copy.deepcopy(parameter), ExpertWeights(parameter, requires_grad=False)):
        assert isinstance(same, torch.nn.Parameter)
        assert torch.equal(same.dequantize(), parameter.dequantize())
    file = io.BytesIO()
    torch.save({"w": parameter}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["w"]
    assert torch.equal(loaded.dequantize(), parameter.dequantize())
    assert "nvfp4" in repr(loaded)
    assert loaded.nbytes < parameter.numel()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("swapped", [False, True])
def test_it_compiles_in_one_graph(swapped):
    weight = experts("nvfp4", swapped)
    rows = torch.randn(12, weight.shape[1])
    compiled = torch.compile(
        lambda x, w, offs: F.grouped_mm(x, w, offs=offs), backend="aot_eager", fullgraph=True
    )
    for offs in (OFFS, torch.tensor([0, 12, 12, 12], dtype=torch.int32)):
        assert torch.equal(compiled(rows, weight, offs), F.grouped_mm(rows, weight, offs=offs))


@pytest.mark.parametrize("kind", ["ExpertWeights", "transposed stack"])
def test_the_grouped_product_of_transformers(kind):
    """Its models call the op ``grouped_mm_fallback`` when they are compiled in float32."""
    pytest.importorskip("transformers.integrations.moe", reason="needs transformers")
    weight = experts("nvfp4", swapped=True)
    if kind == "transposed stack":
        weight = qtensor.quantize(values(), "mxfp8").mT
    rows = torch.randn(12, COLUMNS, requires_grad=True)
    op = torch.ops.transformers.grouped_mm_fallback
    got = op(rows, weight, offs=OFFS)
    assert torch.equal(got, F.grouped_mm(rows.detach(), weight, offs=OFFS))
    grad = torch.randn(12, ROWS)
    found = torch.autograd.grad(got, rows, grad)
    wanted = torch.autograd.grad(op(rows, weight.dequantize(), offs=OFFS), rows, grad)
    assert torch.equal(*found, *wanted)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: w + 0 * w.sum(), "not defined for the weights of experts"),
        (lambda w: w.transpose(0, 1), "last two dims"),
        (lambda w: w.permute(1, 0, 2), "last two dims"),
        (lambda w: w[:, 3], "along dim 0"),
        (lambda w: w.chunk(2, dim=2), "along which factors run"),
        (lambda w: w[torch.ones(4, dtype=torch.bool)], "by their numbers"),
        (lambda w: w.squeeze(0), "one expert"),
        (lambda w: ExpertWeights(w.stored[0]), r"quantized \(E, N, K\)"),
        (lambda w: ExpertWeights(torch.ones(2, 2, 2)), r"quantized \(E, N, K\)"),
        (lambda w: F.grouped_mm(torch.ones(4, 3), w, offs=OFFS), r"rows \(M, K\)"),
    ],
)
def test_what_is_not_defined_says_what_to_do(call, message):
    with pytest.raises(qtensor.QTensorError, match=message):
        call(experts("mxfp8"))
