"""Models with quantized weights in ONNX: values to the bit, in onnx's evaluator and onnxruntime."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formats import BY_NAME, rand
from torch import Tensor, nn

import qtensor
from qtensor.core.errors import QTensorError

onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")
pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
from onnx.reference import ReferenceEvaluator  # noqa: E402

from qtensor.integrations.onnx import export  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)
ROWS, COLS = 40, 96
WEIGHTS = [
    ("fp8", {}),
    ("fp8", {"dtype": "e5m2"}),
    ("fp8", {"rowwise": False, "columnwise": True}),
    ("fp8_delayed", {}),
    ("fp8_rowwise", {}),
    ("fp8_rowwise", {"axis": 0}),
    ("fp8_blockwise", {"force_pow_2_scales": False}),
    ("fp8_blockwise", {"block_scaling_dim": 2}),
    ("mxfp8", {}),
    ("mxfp8", {"swizzled": True}),
    ("mxfp8", {"rowwise": False, "columnwise": True}),
    ("mxfp4", {}),
    ("nvfp4", {}),
    ("nvfp4", {"row_scaled": True}),
    ("nvfp4", {"with_global_scale_inv": True, "swizzled": True}),
    ("nvfp4", {"use_4over6": True, "with_2d_quantization": True}),
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """torch names every library that is not installed."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


class Weights(nn.Module):
    """Adds each of its weights to the input."""

    def __init__(self, *weights: Tensor) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(w, requires_grad=False) for w in weights)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [weight.float() + x for weight in self.weights]


def quantized(name: str, kind: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Any:
    x = rand(ROWS, COLS, seed=seed) * torch.exp(rand(ROWS, 1, seed=seed + 1))
    x[3] = 0
    return BY_NAME[name].quantize(x.to(kind), **options)


def written(*weights: Tensor, **options: Any) -> Any:
    model = Weights(*weights).eval()
    program = export(model, (torch.zeros(weights[0].shape),), verbose=False, **options)
    onnx.checker.check_model(program.model_proto, full_check=True)
    return program.model_proto


def evaluated(proto: Any, shape: Any) -> list[np.ndarray[Any, Any]]:
    zeros = {proto.graph.input[0].name: np.zeros(shape, np.float32)}
    with np.errstate(invalid="ignore"):
        return ReferenceEvaluator(proto).run(None, zeros)


def in_onnxruntime(proto: Any, shape: Any) -> list[np.ndarray[Any, Any]]:
    runtime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    session = runtime.InferenceSession(proto.SerializeToString())
    return session.run(None, {proto.graph.input[0].name: np.zeros(shape, np.float32)})


LIKE_OTHERS = pytest.mark.nightly(reason="an export takes a second; another cell is like it")


def assert_bits(got: np.ndarray[Any, Any], want: Tensor) -> None:
    # The model adds 0, which turns -0 into 0.
    bits = (want.float() + 0).numpy().view(np.int32)
    assert np.array_equal(got.view(np.int32), bits)


@pytest.mark.parametrize(
    ("dtype", "opset"),
    [
        (torch.bfloat16, 24),
        pytest.param(torch.float32, 23, marks=LIKE_OTHERS),
        pytest.param(torch.float16, 23, marks=LIKE_OTHERS),
        pytest.param(torch.float32, 25, marks=LIKE_OTHERS),
    ],
    ids=str,
)
def test_values_are_those_of_dequantize(dtype: torch.dtype, opset: int) -> None:
    tensors = [quantized(name, dtype, i, **options) for i, (name, options) in enumerate(WEIGHTS)]
    proto = written(*tensors, opset_version=opset)
    for q, got in zip(tensors, evaluated(proto, (ROWS, COLS)), strict=True):
        assert_bits(got, q.dequantize())
    kinds = {i.name: onnx.TensorProto.DataType.Name(i.data_type) for i in proto.graph.initializer}
    size = {i.name: len(i.raw_data) for i in proto.graph.initializer}
    codes = {"e4m3": "FLOAT8E4M3FN", "e5m2": "FLOAT8E5M2", "e2m1": "FLOAT4E2M1"}
    factors = {"mxfp8": "FLOAT8E8M0" if opset > 23 else "FLOAT", "nvfp4": "FLOAT8E4M3FN"}
    factors["mxfp4"] = factors["mxfp8"]
    for i, q in enumerate(tensors):
        assert kinds[f"weights.{i}.codes"] == codes[q.quantizer.element.name]
        assert kinds[f"weights.{i}.scale"] == factors.get(q.quantizer.format, "FLOAT")
        assert size[f"weights.{i}.codes"] == ROWS * COLS * q.quantizer.element.bits // 8


def test_onnxruntime_gives_the_values() -> None:
    """onnxruntime 1.32 has no kernel for FLOAT4E2M1, nor for FLOAT8E8M0 factors."""
    names = ("fp8", "fp8_delayed", "fp8_rowwise", "fp8_blockwise", "mxfp8")
    tensors = [quantized(n, torch.bfloat16, **options) for n, options in WEIGHTS if n in names]
    for q, got in zip(tensors, in_onnxruntime(written(*tensors), (ROWS, COLS)), strict=True):
        assert_bits(got, q.dequantize())


@pytest.mark.nightly(reason="exports models; others here compare the bits of every format")
def test_blocks_that_end_inside_a_weight() -> None:
    x = rand(200, 300)
    for option in ({"block_scaling_dim": 2}, {}):
        q = qtensor.quantize(x, "fp8_blockwise", force_pow_2_scales=False, **option)
        assert_bits(in_onnxruntime(written(q), q.shape)[0], q.dequantize())


@pytest.mark.nightly(reason="exports models; others here compare the bits of every format")
def test_two_dequantize_nodes_round_twice() -> None:
    q = quantized("nvfp4")
    proto = written(q, exact=False)
    assert [node.op_type for node in proto.graph.node] == ["DequantizeLinear"] * 2 + ["Add"]
    got, want = evaluated(proto, q.shape)[0], q.dequantize().numpy()
    assert not np.array_equal(got, want)
    # The product of both factors and the value are rounded: two half units in the last place.
    assert (np.abs(got - want) <= 2.0**-23 * np.abs(want)).all()
    rows = quantized("nvfp4", row_scaled=True)
    got = evaluated(written(rows, exact=False), q.shape)[0]
    want = rows.dequantize().numpy()
    assert (np.abs(got - want) <= 2.0**-23 * np.abs(want)).all()


@pytest.mark.nightly(reason="exports models; others here compare the bits of every format")
def test_special_codes() -> None:
    """NaN of a block, the smallest factor of MX, and codes of both signs of zero."""
    x = torch.zeros(2, 96)
    x[0, 3], x[1, 40], x[1, 70] = float("nan"), 1e-45, -1e-40
    for opset in (23, 24):
        q = qtensor.quantize(x, "mxfp8")
        got = evaluated(written(q, opset_version=opset), x.shape)[0]
        want = q.dequantize().numpy()
        assert np.array_equal(np.isnan(got), np.isnan(want))
        assert np.array_equal(np.nan_to_num(got), np.nan_to_num(want + 0))


@pytest.mark.nightly(reason="exports models; others here compare the bits of every format")
def test_stacks_and_shared_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(quantized("mxfp8"), requires_grad=False)
            self.embed = nn.Embedding(ROWS, COLS)
            self.head = nn.Linear(COLS, ROWS, bias=False)
            self.embed.weight = self.head.weight = weight
            stack = qtensor.quantize(rand(3, COLS, 64), "fp8_rowwise")
            self.register_buffer("experts", stack)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.embed(ids)
            return self.head(hidden), hidden @ self.experts.dequantize()[1]

    model, ids = Tied().eval(), torch.tensor([[3, 1, 39]])
    weight, stack = model.head.weight, model.experts
    program = export(model, (ids,), verbose=False)
    assert model.head.weight is model.embed.weight is weight
    assert model.experts is stack
    names = [i.name for i in program.model_proto.graph.initializer if i.name.endswith(".codes")]
    assert len(names) == 2
    feeds = {program.model_proto.graph.input[0].name: ids.numpy()}
    logits, hidden = ReferenceEvaluator(program.model_proto).run(None, feeds)
    values = weight.dequantize()
    np.testing.assert_allclose(logits, (values[ids] @ values.t()).numpy(), rtol=1e-4, atol=1e-4)
    want = (values[ids] @ stack.dequantize()[1]).numpy()
    np.testing.assert_allclose(hidden, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "fmt", ["fp8_rowwise", *(pytest.param(n, marks=LIKE_OTHERS) for n in ("mxfp8", "nvfp4"))]
)
def test_a_convolution(fmt: str) -> None:
    """The weight is decoded as a matrix and takes its shape."""
    model, x = nn.Conv2d(12, 16, 3, padding=1).eval(), torch.randn(2, 12, 5, 5)
    qtensor.quantize_(model, fmt, kinds=["convolution"])
    program = export(model, (x,), verbose=False)
    proto = program.model_proto
    onnx.checker.check_model(proto, full_check=True)
    (y,) = ReferenceEvaluator(proto).run(None, {proto.graph.input[0].name: x.numpy()})
    np.testing.assert_allclose(y, model(x).detach().numpy(), rtol=1e-4, atol=1e-4)


def test_a_model_in_a_file(tmp_path: Path) -> None:
    """Any batch, in onnxruntime, from a file a quarter as large as that of the plain model."""
    runtime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 256)).eval()
    plain, file = tmp_path / "plain.onnx", tmp_path / "model.onnx"
    options = {"verbose": False, "dynamic_shapes": ({0: torch.export.Dim("batch")},)}
    torch.onnx.export(model, (rand(4, 512),), plain, external_data=False, dynamo=True, **options)
    qtensor.quantize_(model, "mxfp8")
    export(model, (rand(4, 512),), file, external_data=False, **options)
    assert file.stat().st_size < 0.3 * plain.stat().st_size
    session = runtime.InferenceSession(file)
    for batch in (1, 9):
        x = rand(batch, 512, seed=batch)
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(got, model(x).detach().numpy(), rtol=1e-3, atol=1e-3)


# ---- errors


def test_torchs_own_export_names_this_one() -> None:
    model = nn.Sequential(nn.Linear(64, 32)).eval()
    qtensor.quantize_(model, "mxfp8")
    message = r"Export quantized weights with qtensor.integrations.onnx.export\(model, args, file\)"
    with pytest.raises(torch.onnx.errors.OnnxExporterError, match=message):
        torch.onnx.export(model, (rand(4, 64),), dynamo=True, verbose=False)


@pytest.mark.parametrize(
    ("name", "options", "call", "message"),
    [
        ("mxfp6", {}, {}, r"onnx.export\[weights.0\]: DequantizeLinear has no mxfp6"),
        ("mxfp4", {}, {"opset_version": 22}, "has e2m1 codes from opset 23 on.*opset_version=23"),
        ("fp8", {}, {"opset_version": 19}, "has e4m3 codes from opset 21 on"),
        ("nvfp4", {"with_rht": True, "rht_side": "rowwise"}, {}, "a rotation"),
        ("fp8", {}, {"verify": True}, "verify=True would run the program"),
        ("fp8", {}, {"dynamo": False}, "dynamo must be True; got False"),
    ],
)
def test_what_onnx_cannot_say(
    name: str, options: dict[str, Any], call: dict[str, Any], message: str
) -> None:
    model = Weights(quantized(name, **options)).eval()
    with pytest.raises(QTensorError, match=message):
        export(model, (torch.zeros(ROWS, COLS),), **call)
    assert isinstance(model.weights[0], qtensor.QuantizedTensor)


def test_a_failed_export_keeps_the_weights() -> None:
    class Fails(Weights):
        def forward(self, x: Tensor) -> list[Tensor]:
            raise RuntimeError("the model fails")

    model = Fails(quantized("fp8"))
    with pytest.raises(torch.onnx.errors.OnnxExporterError, match="the model fails"):
        export(model, (torch.zeros(ROWS, COLS),), verbose=False)
    assert isinstance(model.weights[0], qtensor.QuantizedTensor)
    with pytest.raises(QTensorError, match="must have quantized parameters or buffers; got Linear"):
        export(nn.Linear(4, 4), (torch.zeros(1, 4),))
    with pytest.raises(QTensorError, match="example inputs must be plain; got 1 quantized"):
        export(Weights(quantized("fp8")), (quantized("fp8"),))
    converted = nn.Sequential(nn.Linear(32, 32))
    qtensor.convert_(converted, qtensor.recipes.MXFP8BlockScaling())
    with pytest.raises(QTensorError, match=r"a recipe after qtensor\.revert_"):
        export(converted, (torch.zeros(32, 32),))
