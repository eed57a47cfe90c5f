"""Launch every built GEMM of the current GPU once, for compute-sanitizer.

``compute-sanitizer python scripts/launch_each.py``
"""

from __future__ import annotations

import sys

import torch

from qtensor.cutlass_gemm import library, tuning
from qtensor.cutlass_gemm.autotune import random_tensors
from qtensor.cutlass_gemm.launch import Kernel, Launcher

SIZES = (160, 272, 656)
"""(M, N, K), not multiples of any tile.

Rows are multiples of 16 bytes. FP4 needs a larger K, which ``main`` rounds up.
"""


def main() -> int:
    """Launch the kernels; the exit status is the number of kernels that are missing or fail."""
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    failed = 0
    for spec in tuning.select(f"sm_{major}{minor}a"):
        kernel = library.load(spec)
        if not isinstance(kernel, Kernel):
            print(f"missing  {spec.name}: {kernel}")
            failed += 1
            continue
        m, n, k = SIZES
        size = (m, n, k + (-k) % 32)
        tensors = random_tensors(spec, size, device)
        Launcher(kernel, (1, *size), device)(tensors, 1.0 if kernel.accumulates else 0.0)
        torch.cuda.synchronize()
        print(f"launched {spec.name}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
