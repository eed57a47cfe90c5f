"""Measurements. Run them from the repository root: ``python -m benchmarks.run``, or one of them by its name."""

import os

# Read once, when torch loads its OpenMP runtime, so it stands before any import of torch. Spinning
# worker threads stall operators of a few microseconds by milliseconds on a machine with few cores;
# ones that sleep at once take up to 50 us to wake. A short spin has neither cost.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
