"""``benchmarks.checkpoints`` at a tiny size: the copy is a copy, and every entry is measured."""

import sys

import pytest

from benchmarks import checkpoints as benchmark
from qtensor import checkpoints

pytestmark = pytest.mark.project


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(benchmark, "WEIGHT", (128, 64))


def test_the_copy_has_every_tensor(tmp_path):
    benchmark.write_model(tmp_path / "a", 3 * 128 * 64 * 2, 128 * 64 * 2)
    benchmark.copy_model(tmp_path / "a", tmp_path / "b")
    assert len(list((tmp_path / "b").glob("*.safetensors"))) == 3
    (tmp_path / "a" / benchmark.INDEX).rename(tmp_path / "b" / benchmark.INDEX)
    with checkpoints.open(tmp_path / "b") as copied:
        assert len(copied) == 3


def test_ratios_are_measured(tmp_path):
    found = benchmark.ratios(tmp_path, 128 * 64 * 2, 1)
    assert found["copy"]["ratio"] == 1
    for name in ("to mxfp8", "to nvfp4", "to fp8", "nvfp4 to bfloat16", "moved, mxfp8"):
        assert found[name]["seconds"] >= 0


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status is part of Linux")
def test_memory_that_was_in_use_counts():
    block = bytearray(50_000_000)
    with_block = benchmark.anonymous_bytes()
    assert len(block) == 50_000_000
    del block
    assert with_block - benchmark.anonymous_bytes() > 30_000_000
