"""The report of the GEMM benchmark, from times that are made up; the times themselves need a
GPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gemm

pytestmark = pytest.mark.project


ROOT = Path(__file__).parents[2]


def report() -> dict[str, object]:
    times = {"tensor": 1.0, "tensor scaled_mm": 2.0, "bf16 mm": 4.0}
    rows = [
        {"sizes": (1000, 1000, 1000), "ms": times},
        {"sizes": (1, 1000, 1000), "ms": {"tensor": 0.5}},
    ]
    return {
        "device": "A GPU",
        "peak": 1979.0,
        "rows": rows,
        "means": [("tensor", "tensor scaled_mm", 2.0, 1)],
        "host_us": {"qtensor.gemm": 9.87},
        "errors": {"block scaled_mm": "no such mode"},
    }


def test_the_report() -> None:
    text = gemm.markdown(report())
    lines = text.splitlines()
    assert "| M x N x K | tensor | tensor scaled_mm | bf16 mm |" in lines
    # 2e9 operations in 1, 2 and 4 ms.
    assert "| 1000 x 1000 x 1000 | 2 (0%) | 1 (0%) | 0 (0%) |" in lines
    assert "| 1 x 1000 x 1000 | 0 (0%) | n/a | n/a |" in lines
    assert "- tensor against tensor scaled_mm: 2.000 (1 shapes)" in lines
    assert "- qtensor.gemm: 9.9" in lines
    assert "- block scaled_mm: no such mode" in lines


def test_geometric_mean() -> None:
    assert gemm.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert gemm.geometric_mean([]) == 0.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: it would run")
def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, "-m", "benchmarks.gemm"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (2, "benchmarks.gemm needs a CUDA device\n")
