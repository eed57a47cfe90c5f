"""nvcc: found on the machine or among PyPI's wheels, with a version that knows the architecture."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qtensor.compilers import Compiler
from qtensor.errors import CompilerNotFound, fail

VARIABLE = "QTENSOR_NVCC"
LEAST = {"sm_90a": (12, 0), "sm_100a": (12, 8), "sm_120a": (12, 8)}
"""Architecture -> the first CUDA toolkit that compiles for it."""

USUAL = Path("/usr/local/cuda/bin/nvcc")
"""Where toolkits install themselves."""

_RELEASE = re.compile(r"release (\d+)\.(\d+)")
_TIME_LIMIT = 60.0
_FIX = (
    "Install a CUDA toolkit, or run pip install 'qtensor[cutlass-build]' (CUDA 13), or set "
    f"{VARIABLE} to an nvcc"
)


@dataclass(frozen=True)
class Nvcc:
    """An nvcc that has run.

    Attributes:
        compiler: as the build takes it.
        release: of its toolkit.
        link_flags: what its linker needs to find the CUDA runtime.
    """

    compiler: Compiler
    release: tuple[int, int]
    link_flags: tuple[str, ...] = ()


def find_nvcc(arch: str) -> Nvcc:
    """The nvcc to compile with.

    ``$QTENSOR_NVCC``, which is used or refused; then the first that is recent enough of ``$CUDA_HOME``, ``$CUDA_PATH``,
    PATH, the wheels ``nvidia-cuda-nvcc``, and /usr/local/cuda.

    Raises:
        CompilerNotFound: none runs, or none is recent enough; the message lists what was tried.
    """
    least = LEAST[arch]
    tried = []
    for where, path in _places():
        found = _probe(str(path))
        if isinstance(found, Nvcc) and found.release >= least:
            return found
        reason = found if isinstance(found, str) else f"CUDA {_dotted(found.release)} is too old"
        tried.append(f"{where}: {reason}")
        if where == VARIABLE:
            break
    rule = f"an nvcc of CUDA {_dotted(least)} or later is needed to compile for {arch}"
    got = "; ".join(tried) or "none in CUDA_HOME, on PATH, among wheels or in /usr/local/cuda"
    fail("nvcc", rule, got, _FIX, CompilerNotFound)


def _dotted(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


def _places() -> Iterator[tuple[str, Path]]:
    """(name for messages, path) of every nvcc that may be there."""
    if own := os.environ.get(VARIABLE, "").strip():
        yield VARIABLE, Path(shutil.which(own) or own)
        return
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable, "").strip():
            yield variable, Path(root, "bin/nvcc")
    if found := shutil.which("nvcc"):
        yield "PATH", Path(found)
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for wheel in sorted(Path(folder).glob("cu1[3-9]"), reverse=True):
            if (wheel / "bin/nvcc").exists():
                yield "wheel nvidia-cuda-nvcc", wheel / "bin/nvcc"
    if USUAL.exists():
        yield str(USUAL), USUAL


@functools.cache
def _probe(path: str) -> Nvcc | str:
    """The nvcc of that path, or why it is none."""
    try:
        done = subprocess.run(
            (path, "--version"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIME_LIMIT,
            check=False,
        )
    except OSError as error:
        return f"{path} does not start ({error.strerror or error})"
    except subprocess.TimeoutExpired:
        return f"{path} gave no version within {_TIME_LIMIT:g} s"
    release = _RELEASE.search(done.stdout)
    if done.returncode or release is None:
        return f"{path} --version names no release (status {done.returncode})"
    version = done.stdout.strip().splitlines()[-1]
    compiler = Compiler(os.path.abspath(path), version, (), ("-Xcompiler=-fPIC",), VARIABLE)
    # The wheels keep libraries in lib, where nvcc looks in lib64.
    lib = Path(os.path.realpath(path)).parents[1] / "lib"
    flags = (f"-L{lib}",) if (lib / "libcudart_static.a").exists() else ()
    return Nvcc(compiler, (int(release[1]), int(release[2])), flags)
