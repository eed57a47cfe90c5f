"""Large results ask for large pages."""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qtensor
from qtensor.kernels.cpu import native, pages

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    monkeypatch.setattr(pages, "_madvise", lambda: lambda *call: found.append(call))
    monkeypatch.setattr(pages, "_advice", lambda: 14)
    return found


def test_whole_pages_within_a_large_result(asked: list[tuple[int, int, int]]) -> None:
    storage = torch.empty(pages.LARGE + 100, dtype=torch.uint8)
    pages.ask_for_large_pages(storage[3:])
    ((start, size, advice),) = asked
    assert start % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
    assert storage.data_ptr() <= start < start + size <= storage.data_ptr() + storage.nbytes
    assert size > pages.LARGE - 2 * mmap.PAGESIZE
    assert advice == 14
    pages.ask_for_large_pages(storage[101:])
    assert len(asked) == 1


@pytest.mark.skipif(isinstance(native.library(), str), reason="no C++ compiler: no native kernels")
def test_who_asks(asked: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "LARGE", 1 << 20)
    q = qtensor.quantize(torch.randn(1024, 1024), "mxfp8")
    assert len(asked) == 1
    q.dequantize()
    assert len(asked) == 2
    qtensor.quantize(torch.randn(64, 64), "mxfp8").dequantize()
    assert len(asked) == 2


def flags_at(address: int, smaps: str) -> list[str]:
    """Return the flags of the memory around an address, by the text of /proc/PID/smaps."""
    blocks = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) [\s\S]*?^VmFlags: (.*)$", smaps, re.MULTILINE)
    (flags,) = (f for start, end, f in blocks if int(start, 16) <= address < int(end, 16))
    return flags.split()


@pytest.mark.skipif(not SYSTEM.exists(), reason="this kernel has no transparent huge pages")
def test_the_system_hears_it() -> None:
    t = torch.empty(2 * pages.LARGE, dtype=torch.uint8)
    pages.ask_for_large_pages(t)
    smaps = Path("/proc/self/smaps").read_text()
    assert "hg" in flags_at(t.data_ptr() + pages.LARGE, smaps)


LOAD = """
import sys, torch, qtensor
codes = torch.load(sys.argv[1], weights_only=True).buffers()[0]
print(codes.data_ptr() + codes.nbytes // 2)
print(open("/proc/self/smaps").read())
"""


@pytest.mark.skipif(not SYSTEM.exists(), reason="this kernel has no transparent huge pages")
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param("0", False, marks=pytest.mark.nightly(reason="torch's own default")),
        ("1", True),
    ],
)
def test_a_variable_of_torch_gives_loaded_weights_large_pages(
    tmp_path: Path, value: str, expected: bool
) -> None:
    """docs/kernels.md names the variable, which torch does not document."""
    torch.save(qtensor.quantize(torch.zeros(4096, 4096), "fp8"), tmp_path / "weight.pt")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "weight.pt")],
        env={**os.environ, "THP_MEM_ALLOC_ENABLE": value},
        capture_output=True,
        text=True,
        check=True,
    )
    address, _, smaps = done.stdout.partition("\n")
    assert ("hg" in flags_at(int(address), smaps)) == expected
