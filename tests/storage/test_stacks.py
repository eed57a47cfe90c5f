"""Products with stacks of quantized matrices: only the matrices that are used are read."""

from __future__ import annotations

from typing import Any

import few_rows_oracle as oracle
import pytest
import torch
from few_rows_cases import same_bits
from torch.nn import functional as F

import qtensor
from qtensor.integrations.experts import ExpertWeights
from qtensor.kernels.products import reference, stacks
from qtensor.library.define import FILLS
from qtensor.library.native_ops import left_to_python
from qtensor.storage.ops.grouped import group_sizes, grouped_product
from qtensor.storage.ops.products import operand_of

STACKS: list[tuple[str, dict[str, Any]]] = [
    ("fp8", {}),
    ("fp8_rowwise", {}),
    ("fp8_blockwise", {"block_scaling_dim": 1}),
    ("fp8_blockwise", {"block_scaling_dim": 2}),
    ("mxfp8", {}),
    ("mxfp8", {"swizzled": True}),
    ("mxfp6", {"packed": True}),
    ("mxfp4", {}),
    ("nvfp4", {}),
    ("nvfp4", {"swizzled": True}),
    ("nvfp4", {"row_scaled": True}),
    ("nvfp4", {"with_2d_quantization": True}),
]
every_stack = pytest.mark.parametrize(
    ("fmt", "options"), STACKS, ids=[f"{f}-{'-'.join(map(str, o.values()))}" for f, o in STACKS]
)
E, N, K = 4, 128, 192


def stack_of(fmt: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return qtensor.quantize(torch.randn(E, N, K), fmt, **options)


@every_stack
def test_buffers_of_a_matrix(fmt: str, options: dict[str, Any]):
    """They are those of ``stack[i]``, without a tensor for each matrix."""
    stack = stack_of(fmt, options)
    assert stacks.stack_refusal(stack.quantizer.canonical, (E, N, K)) is None
    for i in range(E):
        got = stacks.matrix_of(operand_of(stack), i).buffers
        for found, want in zip(got, stack[i].buffers(), strict=True):
            assert torch.equal(found.view(torch.uint8), want.view(torch.uint8))
            assert found.untyped_storage().data_ptr() == want.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("fmt", "options", "rows"),
    [("fp8_blockwise", {"block_scaling_dim": 2}, 96), ("mxfp8", {"swizzled": True}, 64)],
)
def test_matrices_that_share_factors(fmt: str, options: dict[str, Any], rows: int):
    stack = qtensor.quantize(torch.randn(2, rows, 64), fmt, **options)
    x = torch.randn(2, 3, 64)
    why = qtensor.explain(x, stack)
    assert "rows share entries of _rowwise_scale_inv" in dict(why.reasons)["few_rows"]
    got = qtensor.gemm(x, stack, "TN")
    torch.testing.assert_close(got, x @ stack.dequantize().mT, rtol=1e-5, atol=1e-4)


@every_stack
def test_a_batch_is_one_product_after_the_other(
    fmt: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    stack, x = stack_of(fmt, options), torch.randn(E, 5, K)
    bias = torch.randn(E, 1, N)
    want = torch.stack([oracle.product(x[i], stack[i].clone()) for i in range(E)])
    monkeypatch.setattr(reference, "matmul", lambda *_: pytest.fail("the reference"))
    assert qtensor.explain(x, stack).backend == "few_rows"
    same_bits(qtensor.gemm(x, stack, "TN"), want)
    same_bits(qtensor.gemm(x, stack, "TN", bias), want + bias)
    same_bits(qtensor.gemm(x[:, :1], stack, "TN"), want[:, :1])
    same_bits(torch.bmm(x, ExpertWeights(stack, swapped=True)), want)


def poisoned(stack: Any, index: int) -> Any:
    """A copy of a stack of which a matrix has codes and factors of NaN."""
    copy = stack.clone()
    for buffer in stacks.matrix_of(operand_of(copy), index).buffers:
        if buffer.numel() > 1 and buffer.is_contiguous():
            buffer.view(torch.uint8).fill_(0xFF)
    return copy


@every_stack
@pytest.mark.parametrize("experts", [False, True], ids=["stack", "ExpertWeights"])
def test_unused_matrices_are_not_read(
    fmt: str, options: dict[str, Any], experts: bool, monkeypatch: pytest.MonkeyPatch
):
    stack, x = stack_of(fmt, options), torch.randn(6, K)
    offs = torch.tensor([1, 1, 4, 6], dtype=torch.int32)
    sizes = group_sizes(offs, 6, "test")
    parts = zip(x.split([1, 0, 3, 2]), range(E), strict=True)
    want = torch.cat([oracle.product(rows, stack[i].clone()) for rows, i in parts if len(rows)])
    bad = poisoned(stack, 1)
    assert not torch.isfinite(bad[1].dequantize()).all() or fmt in ("fp8", "mxfp6", "mxfp4")
    calls: list[Any] = []
    fill = FILLS["gemm"]
    monkeypatch.setitem(FILLS, "gemm", lambda out, args: (calls.append(1), fill(out, args)))

    def multiply() -> torch.Tensor:
        if experts:
            return F.grouped_mm(x, ExpertWeights(bad, swapped=True), offs=offs)
        return grouped_product(x, bad, "TN", sizes)

    same_bits(multiply(), want)
    del calls[:]
    with left_to_python():
        same_bits(multiply(), want)
    assert len(calls) == 3


def test_a_stack_of_another_number_of_matrices():
    stack, x = stack_of("mxfp8", {}), torch.randn(4, K)
    sizes = group_sizes(torch.tensor([2, 4]), 4, "test")
    operands = ([x], "", x.shape, stack.buffers(), "mxfp8", (E, N, K))
    with pytest.raises(qtensor.QTensorError, match="a stack of one for each group"):
        torch.ops.qtensor.grouped_gemm(*operands, [], sizes, 2, "TN", x.dtype, None)
