"""Check an installed wheel without a compiler, and print what was found as one JSON line.

``scripts/release.py`` runs this file in bare environments; it also runs by itself, with any Python
that has torch and an installed wheel. The compiled kernels and C++ ops of the wheel must serve from
the first call on, and nothing may be compiled. Layers must have the bytes of the ops in Python, and
quantized tensors those of the reference, which runs in a process of its own (``--reference``).
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch_smoke import cases, digest, values

import qtensor
from qtensor.kernels.cpu import native, prebuilt
from qtensor.library import native_ops

ROOT = Path(__file__).parents[1]
LAYERS = ("Linear ", "boundary mxfp8 ")
ENDS = (" eager", " aot_eager")
"""Modes that need no C++ compiler."""


def quantized() -> dict[str, str]:
    """Return the digests of quantized and decoded tensors of every format."""
    return {name: digest(case()) for name, case in cases().items() if name.startswith("quantize ")}


def layers() -> dict[str, str]:
    """Return the digests of layers under every recipe, and of products."""
    return {
        name: digest(case())
        for name, case in cases().items()
        if name.startswith(LAYERS) and name.endswith(ENDS)
    }


def of_the_reference() -> dict[str, str]:
    """Return the digests of `quantized` in a process without native kernels."""
    command = [sys.executable, __file__, "--reference"]
    environment = os.environ | {"QTENSOR_NATIVE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def differences() -> list[str]:
    """Return the cases that have other bytes than they should."""
    reference, found = of_the_reference(), layers()
    with native_ops.left_to_python():
        reference |= layers()
    return [name for name, text in (quantized() | found).items() if text != reference[name]]


def raises_through_the_op() -> bool:
    """Return whether an op of C++ raises the error of its Python kernel."""
    try:
        torch.ops.qtensor.quantize(values(4, 32), "no format", None, None, None)
    except qtensor.QTensorError:
        return True
    return False


def faults(cache: Path) -> tuple[list[str], float]:
    """Return what is wrong with the wheel, and the seconds of the first call."""
    began = time.perf_counter()
    qtensor.quantize(values(64, 128), "mxfp8")
    first = time.perf_counter() - began
    kernels, ops = native.library(), native_ops.library()
    found = []
    if Path(qtensor.__file__).is_relative_to(ROOT):
        found.append(f"qtensor is that of the checkout: {qtensor.__file__}")
    if isinstance(kernels, str):
        found.append(f"no kernels: {kernels}")
    elif Path(kernels.handle._name).parent != prebuilt.FOLDER:
        found.append(f"other kernels: {kernels.handle._name}")
    if platform.system() == "Linux" and (ops is None or Path(ops._name).parent != prebuilt.FOLDER):
        found.append("other C++ ops, or none")
    if not raises_through_the_op():
        found.append("an op does not raise the error of its Python kernel")
    found += [f"other bytes: {name}" for name in differences()]
    if cache.exists() and any(cache.rglob("*.so")):
        found.append("something was compiled")
    return found, first


def main() -> int:
    """Run the check and return the exit status: 1 if something is wrong."""
    warnings.simplefilter("ignore")
    if sys.argv[1:] == ["--reference"]:
        print(json.dumps(quantized()))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        os.environ |= {"QTENSOR_CACHE_DIR": str(cache), "QTENSOR_CXX": str(cache / "none")}
        found, first = faults(cache)
    line = {
        "python": platform.python_version(),
        "free-threaded": not getattr(sys, "_is_gil_enabled", lambda: True)(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "first quantize (s)": round(first, 3),
        "faults": found,
    }
    print(json.dumps(line))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
