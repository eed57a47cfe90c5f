"""Where the parts of scripts/gpu_check.sh run: a GPU, or a rehearsal without one.

With ``QTENSOR_GPU_CHECK=rehearsal``, kernels of Hopper are stand-ins that compute on the CPU, and
Triton interprets its kernels.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/helpers"), str(ROOT / "tests"), str(ROOT)]

REHEARSAL = os.environ.get("QTENSOR_GPU_CHECK") == "rehearsal"
CAPABILITY = (9, 0)
PROCESSORS = 132


def device() -> torch.device:
    """Return the device of all tensors: the current GPU, or the CPU in a rehearsal."""
    return torch.device("cpu") if REHEARSAL else torch.device("cuda", torch.cuda.current_device())


def processors() -> int | None:
    """Return the multiprocessors that kernels are told of; None: ask the device."""
    return PROCESSORS if REHEARSAL else None


def arch() -> str:
    """Return the name of the device's architecture, as ``tuning.select`` takes it."""
    major, minor = CAPABILITY if REHEARSAL else torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def install_standins() -> None:
    """Put stand-ins for all kernels into the cache, and let products treat the CPU as a GPU."""
    # Only a rehearsal needs the tests' helpers.
    import standin  # noqa: PLC0415

    from qtensor.cutlass_gemm import library, tuning  # noqa: PLC0415
    from qtensor.kernels.products import choice  # noqa: PLC0415

    built = library.built_specs()
    for spec in tuning.select(arch()):
        if spec.name not in built:
            standin.install(spec)
    choice._device = lambda place: (str(place), CAPABILITY, PROCESSORS)  # type: ignore[assignment]


def prepare() -> None:
    """Make a rehearsal ready; do nothing where there is a GPU."""
    if REHEARSAL:
        install_standins()
