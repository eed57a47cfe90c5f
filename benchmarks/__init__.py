"""Measurements. Run one as a module from the repository root: ``python -m benchmarks.overhead``."""

import os

# Read once, when torch loads its OpenMP runtime, so it stands before any import of torch. Spinning
# worker threads stall operators of a few microseconds by milliseconds on a machine with few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
