"""A large tensor is quantized, and decoded, with no memory beside its outputs.

Attention needs a bounded scratch beside its result, however many tokens the cache has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from native_cases import call_of, threads

import qtensor
from benchmarks.memory import RESET, peak_mib
from qtensor.build.compilers import _free_memory
from qtensor.kernels.cpu import attention, native

SHAPE = (1 << 12, 1 << 14)
"""128 MiB of bfloat16. Zeros that were never written take no memory of their own, so only what a
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
    if free is None or free < 1 << 30:
        pytest.skip(reason="128 MiB of bfloat16 decode to 128 MiB beside their codes")
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


TOKENS = 1 << 20
"""Their keys and values take 68 MiB or more, and 256 MiB in bfloat16."""


@pytest.fixture
def _attends() -> None:
    if attention.library() is None:
        pytest.skip(reason="no native kernels of attention")


def long_cache(name: str, capacity: int = TOKENS) -> qtensor.KVCache:
    """A cache full of tokens that were never written."""
    cache = qtensor.KVCache(1, 1, 64, capacity, k_format=name)
    cache.lengths.fill_(capacity)
    return cache


@pytest.mark.usefixtures("_attends")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", ["fp8_rowwise", "mxfp8", "mxfp4", "nvfp4", "bfloat16"])
def test_attention_over_many_tokens(name: str, count: int) -> None:
    """No part of the cache is decoded to memory, and no row of scores is kept."""
    q = torch.randn(1, 8, 1, 64).bfloat16()
    long_cache(name, 1 << 14).attention(q)
    cache = long_cache(name)
    assert cache.nbytes > 2 * SLACK * MIB
    with threads(count):
        assert peak_mib(lambda: cache.attention(q)) < SLACK


@pytest.mark.usefixtures("_attends")
@pytest.mark.parametrize("count", [1, 2])
def test_attention_of_many_queries(count: int) -> None:
    """The scores of all queries and tokens would take 256 MiB."""
    q = torch.randn(1, 4, 4096, 32).bfloat16()
    k = qtensor.quantize(torch.randn(1, 2, 4096, 32).bfloat16(), "mxfp8")
    with threads(count):
        qtensor.attention(q[:, :, :64], k, k, causal=True)
        assert peak_mib(lambda: qtensor.attention(q, k, k, causal=True)) < SLACK


@pytest.mark.usefixtures("_attends")
def test_appending_copies_no_token_before() -> None:
    cache, new = long_cache("mxfp8"), torch.randn(1, 1, 1, 64)
    cache.crop(TOKENS - 2)
    cache.append(new, new)
    assert peak_mib(lambda: cache.append(new, new)) < SLACK


NEW_PAGES = """
import resource
import torch
import qtensor

a, b = (qtensor.quantize(torch.randn(rows, 1536), "mxfp4") for rows in (512, 16))
for calls in (3, 20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(calls):
        qtensor.gemm(a, b, "TN")
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // calls)
"""


@pytest.mark.nightly(reason="a process of its own, whose system frees each block at once")
def test_a_call_uses_the_pages_of_the_call_before() -> None:
    """The decoded left operand alone takes 200 pages, the result 4."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
    command = (sys.executable, "-c", NEW_PAGES)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20


def test_the_peak_sees_a_copy() -> None:
    """A call that holds a second copy is over the limit."""
    x = torch.ones(16 * MIB)
    assert peak_mib(lambda: x.clone() + x.clone()) > 64 + SLACK
