"""A large tensor is quantized, and decoded, with no memory beside its outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from native_cases import call_of

import qtensor
from benchmarks.memory import RESET, peak_mib
from qtensor.build.compilers import _free_memory
from qtensor.kernels.cpu import native

SHAPE = (1 << 14, 1 << 14)
"""512 MiB of bfloat16. Zeros that were never written take no memory of their own, so only what a
call adds is seen.
"""
MIB = 1 << 20
SLACK = 24
"""MiB that a call may hold beside its outputs: a few tiles a thread, and pages that the system
hands out in advance.
"""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("fp8", {}),
    "fp8 both": ("fp8", {"columnwise": True}),
    "fp8_rowwise both": ("fp8_rowwise", {"columnwise": True}),
    "fp8_blockwise both": ("fp8_blockwise", {"columnwise": True}),
    "fp8_blockwise 2D": ("fp8_blockwise", {"columnwise": True, "block_scaling_dim": 2}),
    "mxfp8 both": ("mxfp8", {"columnwise": True, "swizzled": True}),
    "mxfp6 packed": ("mxfp6", {"packed": True}),
    "mxfp4": ("mxfp4", {}),
    "nvfp4 both": ("nvfp4", {"columnwise": True}),
}


@pytest.fixture(autouse=True)
def _room() -> None:
    if not RESET.exists():
        pytest.skip(reason="this system does not reset the peak of a process")
    free = _free_memory()
    if free is None or free < 2 << 30:
        pytest.skip(reason="512 MiB of bfloat16 decode to 512 MiB beside their codes")
    if isinstance(native.library(), str):
        pytest.skip(reason=f"no native kernels: {native.library()}")


@pytest.mark.parametrize("name", CASES)
def test_peak_of_quantizing(name: str) -> None:
    format_name, options = CASES[name]
    codec = qtensor.quantizer(format_name, **options)
    x = torch.zeros(SHAPE, dtype=torch.bfloat16)
    call = call_of(format_name, options)
    outputs = codec.quantize(x[:64], **call).nbytes * (SHAPE[0] // 64) / MIB
    peak = peak_mib(lambda: codec.quantize(x, **call))
    assert 0.9 * outputs < peak < outputs + SLACK


def test_peak_of_decoding() -> None:
    codec = qtensor.quantizer("mxfp8")
    q = codec.quantize(torch.zeros(SHAPE, dtype=torch.bfloat16))
    q.dequantize()
    values = SHAPE[0] * SHAPE[1] * 2 / MIB
    assert 0.9 * values < peak_mib(q.dequantize) < values + SLACK


def test_the_peak_sees_a_copy() -> None:
    """A call that holds a second copy is over the limit."""
    x = torch.ones(16 * MIB)
    assert peak_mib(lambda: x.clone() + x.clone()) > 64 + SLACK
