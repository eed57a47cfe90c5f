"""Embeddings, rows and slices are decoded from their codes by a kernel, with the same bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from formats import FormatCase, formats
from torch.nn import functional as F

import qtensor
from qtensor.kernels import table
from qtensor.kernels.cpu import native
from qtensor.library import dequantize

ROWS, K = 300, 96


@pytest.fixture
def kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode that no kernel serves fails."""
    if isinstance(native.library(), str):
        pytest.skip(reason="no compiler")
    decode = table.dequantize_

    def served(*args: Any) -> bool:
        assert decode(*args), "no kernel decodes these buffers"
        return True

    monkeypatch.setattr(dequantize.table, "dequantize_", served)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    assert torch.equal(found.view(torch.uint8), wanted.contiguous().view(torch.uint8))


@formats
def test_embedding(case: FormatCase, kernels_only: None):
    for options in case.each_option():
        q = case.quantize(torch.randn(ROWS, K).bfloat16(), **options)
        whole = q.dequantize()
        for index in (torch.tensor([[7]]), torch.randint(0, ROWS, (3, 5)), torch.tensor(299)):
            for _ in range(3):
                same(F.embedding(index, q), whole[index])


@formats
def test_embedding_reads_rowwise_data_alone(case: FormatCase, kernels_only: None):
    """A table with both usages is not decoded as a whole."""
    q = case.quantize(torch.randn(ROWS, K), columnwise=True)
    whole = q.dequantize()
    if case.name != "fp8_blockwise" or not q.quantizer.two_dimensional:
        index = torch.randint(0, ROWS, (4,))
        sizes: list[int] = []
        decode = table.dequantize_
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                dequantize.table, "dequantize_", lambda *a: (sizes.append(a[2][0]), decode(*a))[1]
            )
            for _ in range(2):
                same(F.embedding(index, q), whole[index])
        assert set(sizes) <= {4}


@formats
def test_rows_and_slices(case: FormatCase, kernels_only: None):
    for options in case.each_option():
        q = case.quantize(torch.randn(ROWS, K).bfloat16(), **options)
        whole = q.dequantize()
        parts: list[Any] = [
            7,
            slice(0, 128),
            slice(128, 256),
            slice(31, 33),
            (slice(None), slice(0, 64)),
        ]
        for part in parts:
            try:
                found = q[part]
            except qtensor.UnsupportedError:
                continue  # It cuts a block: tests/storage/test_aten_raises.py
            if not isinstance(found, qtensor.QuantizedTensor):
                same(found, whole[part])  # It cuts a block: tests/storage/test_part_values.py
                continue
            for _ in range(3):
                same(found.dequantize(), whole[part])


def test_a_large_table_is_not_decoded():
    """An embedding of one row allocates little more than the row."""
    q = qtensor.quantize(torch.randn(4096, 512).bfloat16(), "nvfp4")
    index = torch.tensor([5])
    F.embedding(index, q)
    with torch.profiler.profile(profile_memory=True) as profile:
        F.embedding(index, q)
    most = max(event.cpu_memory_usage for event in profile.events())
    assert most < 1 << 14
