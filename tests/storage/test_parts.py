"""Parts of tensors: writes never change values outside a part, wherever the part has been."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_process
from formats import (
    BY_NAME,
    FORMATS,
    FormatCase,
    assert_same_tensor,
    formats,
    layouts,
    rand,
    snapshot,
    usages,
)
from torch.nn import functional as F

import qtensor

SHARED = pytest.mark.parametrize("name", ["fp8", "fp8_delayed", "nvfp4"])
SQUARE = ["mxfp8", "mxfp6", "mxfp4", "nvfp4"]
INDUCTOR = pytest.mark.nightly(
    reason="aot_eager has the same views; test_compile_boundary.py runs inductor"
)
backends = pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=INDUCTOR)]
)


def whole(name: str, rows: int = 128) -> torch.Tensor:
    return BY_NAME[name].quantize(torch.randn(rows, 128))


@SHARED
def test_a_write_keeps_the_factor_that_the_whole_shares(name: str) -> None:
    """Values beyond the range of the shared factor saturate; nothing outside the part moves."""
    q = whole(name)
    before, largest = q.dequantize(), q.dequantize().abs().max()
    q[32:64].mul_(100)
    after = q.dequantize()
    assert torch.equal(after[:32], before[:32])
    assert torch.equal(after[64:], before[64:])
    assert not torch.equal(after[32:64], before[32:64])
    assert after[32:64].abs().max() <= 448 / 32 if name == "fp8_delayed" else largest * 1.07


@SHARED
def test_quantizing_a_part_again_gives_bytes_of_its_own(name: str) -> None:
    q = whole(name)
    before = q.dequantize()
    call = BY_NAME[name].call()
    q.quantizer.quantize(q[32:64], **call).mul_(100)
    assert torch.equal(q.dequantize(), before)


@SHARED
@backends
def test_the_note_crosses_compile_boundaries(name: str, backend: str) -> None:
    q = whole(name)
    before = q.dequantize()
    torch.compile(lambda p: p.mul_(100), fullgraph=True, backend=backend)(q[64:])
    assert torch.equal(q.dequantize()[:64], before[:64])
    part = torch.compile(lambda t: t[64:], fullgraph=True, backend=backend)(q)
    part.mul_(0)
    assert torch.equal(q.dequantize()[:64], before[:64])
    assert not q.dequantize()[64:].any()


RESULTS: dict[str, Callable[[Any], Any]] = {
    "cat": lambda q: torch.cat([q, q]),
    "cat of one": lambda q: torch.cat([q]),
    "cat of parts": lambda q: torch.cat(q.split(128)),
    "cat of clones": lambda q: torch.cat([q.clone(), q]),
    "cat of columns": lambda q: torch.cat([q, q], 1),
    "pad": lambda q: F.pad(q, (0, 0, 0, 128)),
    "pad columns": lambda q: F.pad(q, (0, 128)),
    "pad nothing": lambda q: F.pad(q, (0, 0)),
    "index_select": lambda q: q.index_select(0, torch.tensor([2, 0])),
    "index": lambda q: q[torch.tensor([2, 0])],
    "index in 2 dims": lambda q: q[torch.tensor([[2, 0]])],
    "clone": lambda q: q.clone(),
    "to": lambda q: q.to(torch.bfloat16),
}


@layouts
@usages
@pytest.mark.parametrize("result", RESULTS)
def test_a_result_owns_its_memory(
    case: FormatCase, options: dict[str, Any], rowwise: bool, columnwise: bool, result: str
) -> None:
    """Where torch copies, a write to the result changes no byte of the operand, nor the reverse."""
    q = case.quantize(rand(256, 256), rowwise=rowwise, columnwise=columnwise, **options)
    before = snapshot(q)
    try:
        got = RESULTS[result](q)
    except qtensor.UnsupportedError:
        return
    own = {b.untyped_storage().data_ptr() for b in q.buffers()}
    assert not own & {b.untyped_storage().data_ptr() for b in got.buffers()}
    got.fill_(1000)
    assert_same_tensor(q, before)


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "fp8_rowwise"])
def test_a_checkpoint_is_loaded_into_a_joined_weight(name: str) -> None:
    parts = [w.clone() for w in whole(name, 96).split(32)]
    before = [part.dequantize() for part in parts]
    layer = torch.nn.Linear(128, 96, bias=False)
    layer.weight = torch.nn.Parameter(torch.cat(parts), requires_grad=False)
    loaded = BY_NAME[name].quantize(10 * torch.randn(96, 128))
    layer.load_state_dict({"weight": loaded})
    assert torch.equal(layer.weight.dequantize(), loaded.dequantize())
    for part, values in zip(parts, before, strict=True):
        assert torch.equal(part.dequantize(), values)


@SHARED
def test_data_takes_over_that_it_is_a_part(name: str) -> None:
    q, p = whole(name), whole(name, 32)
    before, values = q.dequantize(), torch.randn(32, 128)
    p.data = q[32:64]
    control = q.clone()
    control[32:64].copy_(100 * values)
    p.copy_(100 * values)
    assert torch.equal(q.dequantize(), control.dequantize())
    assert torch.equal(q.dequantize()[:32], before[:32])
    assert torch.equal(q.dequantize()[64:], before[64:])
    assert torch.equal(p.dequantize(), q.dequantize()[32:64])
    p.detach().copy_(values)
    assert torch.equal(q.dequantize()[64:], before[64:])


@SHARED
def test_data_of_a_whole_tensor_makes_a_part_whole(name: str) -> None:
    q, own = whole(name), whole(name, 32)
    p, before = q[32:64], q.dequantize()
    p.data = own
    values = 1000 * torch.randn(32, 128)
    p.copy_(values)
    want = whole(name, 32).copy_(values)
    assert torch.equal(p.dequantize(), want.dequantize())
    assert torch.equal(own.dequantize(), want.dequantize())
    assert torch.equal(q.dequantize(), before)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_data_takes_over_that_it_is_a_copy(name: str) -> None:
    """Columns of tiles of swizzled factors are copies: a write would not reach the whole."""
    q = BY_NAME[name].quantize(torch.randn(256, 512), swizzled=True)
    p = BY_NAME[name].quantize(torch.randn(256, 256), swizzled=True)
    p.data = q[:, :256]
    with pytest.raises(qtensor.UnsupportedError, match="copy"):
        p.zero_()


def test_data_takes_over_the_usages() -> None:
    p = qtensor.quantize(torch.randn(32, 64), "mxfp8", columnwise=True)
    p.data = qtensor.quantize(torch.randn(32, 64), "mxfp8")
    assert p.get_usages() == {"rowwise": True, "columnwise": False}
    assert p._columnwise_data is None
    assert p.__tensor_flatten__()[1][2] == p.quantizer


@SHARED
def test_a_saved_part_is_on_its_own(name: str) -> None:
    q = whole(name)
    file = io.BytesIO()
    torch.save({"whole": q, "part": q[:32]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    before = loaded["whole"].dequantize()
    loaded["part"].mul_(100)
    assert torch.equal(loaded["whole"].dequantize(), before)


@pytest.mark.parametrize("name", SQUARE)
def test_rows_cut_across_square_blocks_derive_nothing_wrong(name: str) -> None:
    x = torch.randn(256, 256) * torch.logspace(-3, 3, 256)[:, None]
    q = qtensor.quantize(x, name, with_2d_quantization=True)
    pick = torch.tensor([0, 200, 3])
    cut = (q[3:77], q.index_select(0, pick), torch.cat([q[3:20], q[100:200]]), q.view(128, 512))
    for part in cut:
        assert not part.quantizer.with_2d_quantization
        with pytest.raises(qtensor.UnsupportedError, match="cannot be derived"):
            part.update_usage(columnwise=True)
    for part in (q[32:64], torch.cat(q.chunk(2))):
        assert part.quantizer == q.quantizer
        values = part.dequantize()
        part.update_usage(rowwise=False, columnwise=True)
        assert torch.equal(part.dequantize(), values)


@formats
def test_autograd_sees_a_requantized_weight(case: FormatCase) -> None:
    x = torch.randn(8, 128, requires_grad=True)
    q = case.quantize(torch.randn(32, 128))
    y = F.linear(x, q)
    q.quantize_(torch.zeros(32, 128))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


LAYOUTS = [
    ("TN", (5, 64, 96), (48, 96)),
    ("TN", (3, 64, 96), (3, 32, 96)),
    ("NN", (64, 96), (96, 48)),
    ("NN", (3, 64, 96), (3, 96, 32)),
    ("NT", (64, 96), (64, 48)),
]


@formats
@pytest.mark.parametrize(("layout", "left", "right"), LAYOUTS)
def test_gemm_has_gradients(case: FormatCase, layout: str, left: tuple, right: tuple) -> None:
    """Those of the matmul of the values, to the order of float32 sums of at most 320 products."""
    a = torch.randn(left, requires_grad=True)
    b = case.quantize(torch.randn(right), columnwise=True).requires_grad_()
    bias = torch.randn(1, requires_grad=True)
    y = qtensor.gemm(a, b, layout, bias=bias)
    grad = torch.randn_like(y)
    y.backward(grad)
    a64 = a.detach().double().requires_grad_()
    b64 = b.detach().dequantize().double().requires_grad_()
    product = {"TN": lambda: a64 @ b64.mT, "NN": lambda: a64 @ b64, "NT": lambda: a64.mT @ b64}[
        layout
    ]()
    product.backward(grad.double())
    for got, want, sizes in ((a.grad, a64.grad, b64), (b.grad, b64.grad, a64)):
        bound = 320 * torch.finfo(torch.float32).eps * sizes.abs().max() * grad.abs().max() * 32
        assert ((got - want).abs() <= bound).all()
    assert (
        abs(bias.grad.item() - grad.double().sum().item()) <= grad.numel() * 1e-6 * grad.abs().max()
    )


def test_devices_must_agree() -> None:
    """A tensor on another device would make the op run as its fake and return bytes that nobody
    wrote.
    """
    x = torch.randn(4, 32)
    with pytest.raises(qtensor.QTensorError, match="scale must be on the device"):
        qtensor.quantize(x, "fp8_delayed", scale=torch.ones(1, device="meta"))
    seed = torch.ones(1, dtype=torch.int64, device="meta")
    with pytest.raises(qtensor.QTensorError, match="seed must be on the device"):
        qtensor.quantize(x, "nvfp4", stochastic_rounding=True, generator=seed)
    q = qtensor.quantize(x, "fp8")
    with pytest.raises(qtensor.QTensorError, match="operands must be on one device"):
        qtensor.gemm(x, q, "TN", bias=torch.ones(4, device="meta"))


@pytest.mark.parametrize("case", FORMATS, ids=lambda c: c.name)
def test_defaults_of_the_caller_do_not_matter(case: FormatCase) -> None:
    """Tables made at the first call are float32 on the right device, whatever the default dtype or
    mode is then.
    """
    from qtensor.reference import constants, elements, hadamard  # noqa: PLC0415

    x, call = torch.randn(32, 64), case.call()
    want = case.quantizer(columnwise=True).quantize(x, **call)
    for cached in (
        constants.constant,
        elements.code_values,
        elements._values,
        elements._pairs,
        hadamard.matrix,
    ):
        cached.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            first = case.quantizer(columnwise=True).quantize(x, **call)
            first.dequantize()
    finally:
        torch.set_default_dtype(torch.float32)
    again = case.quantizer(columnwise=True).quantize(x, **call)
    for t in (first, again):
        assert all(torch.equal(a, b) for a, b in zip(t.buffers(), want.buffers(), strict=True))
        assert torch.equal(t.dequantize(), want.dequantize())
    (again.dequantize() * torch.ones((), requires_grad=True)).sum().backward()


@SHARED
def test_the_storage_of_a_part_stays_a_part(name: str) -> None:
    q = whole(name)
    part, before = q[32:64], q.dequantize()
    tensors, layout = part.prepare_for_saving()
    restored, left = part.restore_from_saved(layout, tensors)
    assert not left
    with pytest.raises(qtensor.QTensorError, match="whole tensor"):
        restored.quantize_(1000 * torch.randn(32, 128))
    restored.copy_(1000 * torch.randn(32, 128))
    assert torch.equal(q.dequantize()[64:], before[64:])
    assert torch.equal(part.dequantize(), restored.dequantize())


def _write(part: torch.Tensor) -> None:
    part.copy_(1000 * torch.ones(32, 128))


@SHARED
def test_another_process_gets_the_part_itself(name: str) -> None:
    """As of a plain part: a write over there reaches the whole here, and nothing outside of it."""
    q = whole(name)
    part, before = q[32:64], q.dequantize()
    process = torch_process.SERVER.Process(target=_write, args=(part,))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    after = q.dequantize()
    assert torch.equal(after[:32], before[:32])
    assert torch.equal(after[64:], before[64:])
    assert (after[32:64] == after[32, 0]).all()
    assert after[32, 0] >= before.abs().max()


def _read(turned: torch.Tensor) -> None:
    assert (turned.dequantize() == 1).all()
    assert turned._origin.layout == "transposed"


def test_another_process_gets_the_transpose_of_a_stack() -> None:
    stack = qtensor.quantize(torch.zeros(2, 32, 64), "mxfp8")
    process = torch_process.SERVER.Process(target=_read, args=(stack.mT,))
    stack.fill_(1)
    process.start()
    process.join(120)
    assert process.exitcode == 0


@formats
@pytest.mark.parametrize("part", ["rows", "columns"])
def test_a_write_to_a_part_of_zeros_arrives(case: FormatCase, part: str) -> None:
    """NVFP4 stores a maximum of 0 for zeros, with which no other value can be encoded."""
    q = case.quantize(torch.zeros(256, 256))
    written = (slice(0, 128), slice(None)) if part == "rows" else (slice(None), slice(128, 256))
    values = torch.zeros(256, 256)
    values[written] = 3.0
    q[written] = 3.0
    torch.testing.assert_close(q.dequantize(), values, rtol=2**-20, atol=0)


@pytest.mark.parametrize("options", [{}, {"row_scaled": True}], ids=repr)
def test_a_quantized_part_is_copied_into_zeros(options: dict[str, Any]) -> None:
    q = qtensor.quantize(torch.zeros(64, 128), "nvfp4", **options)
    source = qtensor.quantize(torch.full((64, 64), 3.0), "nvfp4", **options)
    q[:, 64:].copy_(source)
    assert torch.equal(q[:, 64:].dequantize(), source.dequantize())
    assert not q[:, :64].dequantize().any()


@formats
@pytest.mark.parametrize("scale", [0.0, 1.0], ids=["zeros", "values"])
def test_a_quantized_part_that_shows_float64_is_copied(case: FormatCase, scale: float) -> None:
    source = case.quantize(torch.randn(128, 256))
    got, want = case.quantize(torch.eye(256) * scale), case.quantize(torch.eye(256) * scale)
    got[:128].copy_(source.double())
    want[:128].copy_(source)
    assert torch.equal(got.dequantize(), want.dequantize())


def test_columns_of_appended_rows_can_be_written() -> None:
    q = F.pad(qtensor.quantize(torch.ones(2, 64), "fp8_rowwise"), (0, 0, 0, 2))
    q[:, 32:] = 0.5
    assert torch.equal(q.dequantize()[:, 32:], torch.full((4, 32), 0.5))


@formats
def test_quantize_refuses_to_leave_an_alias_behind(case: FormatCase) -> None:
    q = case.quantize(torch.ones(128, 128), rowwise=True, columnwise=True)
    alias = q.detach()
    alias.update_usage(columnwise=False)
    before = q.dequantize()
    with pytest.raises(qtensor.UnsupportedError, match=r"update_quantized\[.*a direction"):
        alias.quantize_(torch.zeros(128, 128))
    assert torch.equal(q.dequantize(), before)


def test_a_part_has_new_factors_where_it_shares_none() -> None:
    """Rows of row-scaled NVFP4 share the maxima of columns, not those of rows."""
    values = torch.zeros(64, 64)
    values[:32] = 1.0
    q = qtensor.quantize(values, "nvfp4", row_scaled=True, columnwise=True)
    q[32:] = 0.5
    assert torch.equal(q[32:].dequantize(), torch.full((32, 64), 0.5))
    assert torch.equal(q[:32].dequantize(), values[:32])
