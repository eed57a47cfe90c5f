"""If an allocation fails inside a kernel, the reference computes the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from compiler_scripts import SECONDS
from places import PYTHONPATH

from qtensor.build.compilers import find_cxx
from qtensor.kernels.cpu import native

ROOT = Path(__file__).parents[2]

ALLOCATOR = """
#include <atomic>
#include <cstdlib>
#include <new>

static std::atomic<long> left{-1};

// The allocation number n + 1 from now on fails; returns whether that of the last call has failed.
extern "C" int fail_after(long n) { return left.exchange(n) == -1; }

static void* take(std::size_t size, std::align_val_t alignment) {
    if (left >= 0 && left.fetch_sub(1) == 0) throw std::bad_alloc();
    const std::size_t a = std::size_t(alignment);
    void* p = std::aligned_alloc(a, (size + a - 1) / a * a);
    if (!p) throw std::bad_alloc();
    return p;
}
void* operator new(std::size_t size, std::align_val_t a) { return take(size, a); }
void* operator new[](std::size_t size, std::align_val_t a) { return take(size, a); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
"""

PROGRAM = """
import ctypes, sys
import torch, qtensor
from formats import FORMATS
from qtensor.kernels.cpu import native

allocator = ctypes.CDLL(sys.argv[1])
assert not isinstance(native.library(), str), native.library()
torch.set_num_threads(2)
ops = torch.ops.qtensor
failed = set()


def bits(tensors):
    return [t.contiguous().view(torch.uint8) for t in tensors if t is not None and t.ndim]


def check(name, call):
    want = bits(call())
    for n in range(100):
        allocator.fail_after(n)
        got = bits(call())
        if not allocator.fail_after(-1):
            return
        failed.add(name)
        assert len(got) == len(want) and all(map(torch.equal, got, want)), (name, n)
    raise AssertionError(f"{name} allocates more than 100 times")


for shape in ((96, 160), (1024, 1056)):
    x = torch.randn(shape).bfloat16()
    for case in FORMATS:
        for columnwise in (False, True):
            codec = case.quantizer(rowwise=not columnwise, columnwise=columnwise)
            q = codec.quantize(x, **case.call())
            check("quantize", lambda: codec.quantize(x, **case.call()).buffers())
            check("dequantize", lambda: [q.dequantize()])
    weight = torch.ones(shape[1])
    settings = (weight, None, "rmsnorm", 1e-5, False, torch.bfloat16)
    check("norm", lambda: ops.norm(x, *settings))
    check("norm_quantize", lambda: ops.norm_quantize(x, *settings, "mxfp8"))
    check("bias_grad", lambda: [ops.bias_grad(x)])
print(*sorted(failed))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is preloaded as Linux does it")
def test_an_allocation_that_fails(tmp_path: Path) -> None:
    """Each allocation of each call fails once, in one thread and in several."""
    if isinstance(native.library(), str):
        pytest.skip(reason="there is no compiler for the native kernels")
    source, library = tmp_path / "allocator.cpp", tmp_path / "allocator.so"
    source.write_text(ALLOCATOR)
    flags = ("-std=c++17", "-O1", "-shared", "-fPIC")
    command = [*find_cxx().command, *flags, str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=SECONDS)
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        "PYTHONPATH": PYTHONPATH,
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(library)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["bias_grad", "dequantize", "norm", "norm_quantize", "quantize"]
