"""Results do not depend on ``torch.set_default_dtype``, under which other code builds models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch_process
from checkpoint_cases import READ

import qtensor
from qtensor.checkpoints import arithmetic
from qtensor.cutlass_gemm import autotune, tuning
from qtensor.kernels.cpu import native
from qtensor.kernels.products import dot_products
from qtensor.storage.numbers import factors_of_elements
from tests.checkpoints import test_checkpoints_examples as examples


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def other_default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Another default dtype until the end of the test."""
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_the_first_product_of_a_process(dtype: str) -> None:
    torch_process.run(
        "import torch, qtensor\n"
        f"torch.set_default_dtype(torch.{dtype})\n"
        "weight = qtensor.quantize(torch.randn(32, 64, dtype=torch.float32), 'mxfp8')\n"
        "x = torch.randn(100, 64, dtype=torch.float32)\n"
        "found = [torch.nn.functional.linear(x, weight) for _ in range(2)]\n"
        "values = torch.mm(x, weight.dequantize().t())\n"
        "assert all(torch.equal(y, values) for y in found)\n"
    )


def test_the_first_use_of_dot_products() -> None:
    """It decides for the process whether the CPU has them."""
    find = dot_products.is_available.__wrapped__
    usual = find(native.linear_)
    torch.set_default_dtype(torch.float64)
    try:
        assert find(native.linear_) == usual
    finally:
        torch.set_default_dtype(torch.float32)


def test_checkpoints_of_other_libraries(other_default: torch.dtype) -> None:
    """The tables of 4-bit and 6-bit codes are made at the first use, and stay."""
    arithmetic._e2m1_pairs.cache_clear()
    try:
        for example in READ:
            examples.test_origin_rounding(example)
            examples.test_as_quantized_tensors(example)
    finally:
        arithmetic._e2m1_pairs.cache_clear()


def test_the_factors_of_rotated_data(other_default: torch.dtype) -> None:
    rotated = qtensor.quantize(
        torch.randn(32, 64, dtype=torch.float32),
        "nvfp4",
        with_rht=True,
        rowwise=False,
        columnwise=True,
    )
    assert factors_of_elements(rotated).dtype is torch.float32


def test_factors_for_a_measured_kernel(other_default: torch.dtype) -> None:
    spec = next(spec for spec in tuning.specs() if spec.block)
    tensors = autotune.random_tensors(spec, (128, 128, 128), torch.device("cpu"))
    assert tensors.sfa.dtype is torch.float32
    assert tensors.sfb.dtype is torch.float32
