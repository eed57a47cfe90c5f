"""Batches of matrices: those of both operands are equal, or torch repeats them; anything else is
named.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from formats import FormatCase, formats, rand, refusal

import qtensor

K = 32
BATCHES = [(1,), (2,), (3,)]


def operands(case: FormatCase, a: tuple[int, ...], b: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """(*a, 4, K) and (*b, K, 5): both quantized, then one of them plain."""
    left, right = rand(*a, 4, K), rand(*b, K, 5, seed=1)
    quantized = case.quantize(left), case.quantize(right, rowwise=False, columnwise=True)
    return [quantized, (quantized[0], right), (left, quantized[1])]


def decoded(t: Any) -> torch.Tensor:
    return t.dequantize() if isinstance(t, qtensor.QuantizedTensor) else t


PRODUCTS: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "bmm": torch.bmm,
    "baddbmm": lambda a, b: torch.baddbmm(torch.ones(1, 4, 5), a, b),
    "baddbmm with factors": lambda a, b: torch.baddbmm(torch.ones(4, 5), a, b, beta=0.5, alpha=2),
    "gemm": lambda a, b: qtensor.gemm(a, b, "NN"),
}
RULE = (
    r"gemm\[.*\]: both operands must have the same batch dims, or b none; got a \(%d, 4, 32\), b "
    r"\(%d, 32, 5\)\. Use torch.matmul"
)


@pytest.mark.parametrize("product", PRODUCTS)
@formats
def test_unequal_batches_are_refused(case: FormatCase, product: str) -> None:
    """A batch of one too, which torch's bmm refuses, and which a product used to repeat on one side
    only.
    """
    for (m,), (n,) in itertools.permutations(BATCHES, 2):
        for a, b in operands(case, (m,), (n,)):
            with pytest.raises(qtensor.QTensorError, match=RULE % (m, n)):
                PRODUCTS[product](a, b)


@formats
def test_matmul_repeats_batches(case: FormatCase) -> None:
    """As torch does, or torch's own error where it does not; it folds some by transposing b, where
    that can be.
    """
    batches = [(), *BATCHES, (2, 3), (2, 1), (1, 3)]
    refused = 0
    for m, n in itertools.product(batches, batches):
        for a, b in operands(case, m, n):
            try:
                want = torch.matmul(decoded(a), decoded(b))
            except RuntimeError:
                with pytest.raises(
                    RuntimeError, match=r"must match the size of tensor b|^transpose"
                ):
                    torch.matmul(a, b)
                continue
            if said := refusal(lambda: torch.matmul(a, b)):  # noqa: B023
                assert "Call .dequantize() first" in said
                refused += 1
                continue
            got = torch.matmul(a, b)
            # 32 products of unit size in float32, in another order.
            torch.testing.assert_close(got, want, rtol=0, atol=32 * 2**-20)
    assert (refused > 0) == (case.name in ("fp8_rowwise", "fp8_blockwise"))


@formats
def test_gemm_takes_one_matrix_for_a_batch(case: FormatCase) -> None:
    for m in [(2,), (2, 3)]:
        for a, b in operands(case, m, ()):
            want = torch.matmul(decoded(a), decoded(b))
            torch.testing.assert_close(qtensor.gemm(a, b, "NN"), want, rtol=0, atol=32 * 2**-20)


@formats
def test_a_batch_of_transposes_times_one_matrix(case: FormatCase) -> None:
    for m in [(2,), (2, 3)]:
        a, b = rand(*m, K, 4), rand(K, 5, seed=1)
        quantized = [case.quantize(t, rowwise=False, columnwise=True) for t in (a, b)]
        for left, right in (quantized, (quantized[0], b), (a, quantized[1])):
            want = torch.matmul(decoded(left).mT, decoded(right))
            torch.testing.assert_close(
                qtensor.gemm(left, right, "NT"), want, rtol=0, atol=32 * 2**-20
            )


def test_plain_operands_are_checked_too() -> None:
    a, b = torch.ones(2, 4, K), torch.ones(3, K, 5)
    with pytest.raises(qtensor.QTensorError, match=r"gemm: both operands must have the same batch"):
        qtensor.gemm(a, b, "NN")
    with pytest.raises(qtensor.QTensorError, match=r"gemm: the last dims of a and b must be equal"):
        qtensor.gemm(a, torch.ones(5, K + 1), "TN")
    for layout in ("TT", 3, None):
        with pytest.raises(
            qtensor.QTensorError, match=f"gemm: layout must be one of TN, NN, NT; got {layout!r}. C"
        ):
            qtensor.gemm(a, b, layout)
