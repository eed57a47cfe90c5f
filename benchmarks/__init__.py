"""Benchmarks.

Run all with ``python -m benchmarks.run`` from the repository root, or one by name.
"""

import os

# OpenMP reads these variables once, when torch loads it, so they are set before any import of
# torch. Spinning worker threads delay operators of a few microseconds by milliseconds on a machine
# with few cores; threads that sleep at once take up to 50 us to wake. A short spin avoids both.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# Kernels are compiled before they are measured, and not meanwhile.
os.environ["QTENSOR_BACKGROUND"] = "0"
