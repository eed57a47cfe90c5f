"""Large results ask for large pages."""

from __future__ import annotations

import mmap
import re
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


@pytest.mark.skipif(not SYSTEM.exists(), reason="this kernel has no transparent huge pages")
def test_the_system_hears_it() -> None:
    t = torch.empty(2 * pages.LARGE, dtype=torch.uint8)
    pages.ask_for_large_pages(t)
    inside = t.data_ptr() + pages.LARGE
    blocks = re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) [\s\S]*?^VmFlags: (.*)$",
        Path("/proc/self/smaps").read_text(),
        re.MULTILINE,
    )
    (flags,) = (f for start, end, f in blocks if int(start, 16) <= inside < int(end, 16))
    assert "hg" in flags.split()
