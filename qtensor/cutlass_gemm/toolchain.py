"""Find an nvcc, on the machine or in PyPI's wheels, that is recent enough for an architecture."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qtensor.build.compilers import Compiler, version_lines
from qtensor.core.errors import CompilerNotFound, fail
from qtensor.core.version import install_command

VARIABLE = "QTENSOR_NVCC"
LEAST = {"sm_90a": (12, 0), "sm_100f": (12, 9), "sm_120f": (12, 9)}
"""Architecture -> the first CUDA toolkit that compiles for it."""

USUAL = Path("/usr/local/cuda/bin/nvcc")
"""The path at which CUDA toolkits install nvcc by default."""

_RELEASE = re.compile(r"release (\d+)\.(\d+)")
_FIX = (
    f"Install a CUDA toolkit, or run {install_command('cutlass-build')} (CUDA 13), or set "
    f"{VARIABLE} to an nvcc"
)


@dataclass(frozen=True)
class Nvcc:
    """An nvcc that answered ``--version``.

    Attributes:
        compiler: the compiler, in the form that ``qtensor.build.cache`` takes.
        release: (major, minor) of its CUDA toolkit.
        link_flags: flags with which its linker finds the CUDA runtime.
    """

    compiler: Compiler
    release: tuple[int, int]
    link_flags: tuple[str, ...] = ()


def find_nvcc(arch: str) -> Nvcc:
    """Return the nvcc that compiles for ``arch``.

    If ``$QTENSOR_NVCC`` is set, only that nvcc is tried. Otherwise the first one that is recent
    enough is returned, in this order: ``$CUDA_HOME``, ``$CUDA_PATH``, PATH, the
    ``nvidia-cuda-nvcc`` wheels, /usr/local/cuda.
    """
    least = LEAST[arch]
    tried = []
    for where, path in _nvcc_paths():
        nvcc = _probe(str(path))
        if isinstance(nvcc, Nvcc) and nvcc.release >= least:
            return nvcc
        reason = nvcc if isinstance(nvcc, str) else f"CUDA {_dotted(nvcc.release)} is too old"
        tried.append(f"{where}: {reason}")
        if where == VARIABLE:
            break
    rule = f"an nvcc of CUDA {_dotted(least)} or later is needed to compile for {arch}"
    got = "; ".join(tried) or "none in CUDA_HOME, on PATH, among wheels or in /usr/local/cuda"
    fail("nvcc", rule, got, _FIX, CompilerNotFound)


def _dotted(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


def _nvcc_paths() -> Iterator[tuple[str, Path]]:
    """Yield (name for messages, path) of each place where an nvcc may be."""
    if own := os.environ.get(VARIABLE, "").strip():
        yield VARIABLE, Path(shutil.which(own) or own)
        return
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable, "").strip():
            yield variable, Path(root, "bin/nvcc")
    if on_path := shutil.which("nvcc"):
        yield "PATH", Path(on_path)
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for wheel in sorted(Path(folder).glob("cu1[3-9]"), reverse=True):
            if (wheel / "bin/nvcc").exists():
                yield "wheel nvidia-cuda-nvcc", wheel / "bin/nvcc"
    if USUAL.exists():
        yield str(USUAL), USUAL


@functools.cache
def _probe(path: str) -> Nvcc | str:
    """Return the nvcc at ``path``, or the reason why it cannot be used."""
    found = version_lines((path,))
    if isinstance(found, str):
        return f"{path} {found}"
    status, lines = found
    release = _RELEASE.search("\n".join(lines))
    if status or release is None:
        return f"{path} --version printed no release (status {status})"
    compiler = Compiler(os.path.abspath(path), lines[-1], (), ("-Xcompiler=-fPIC",), VARIABLE)
    # The wheels store libraries in lib, but nvcc searches lib64.
    lib = Path(os.path.realpath(path)).parents[1] / "lib"
    flags = (f"-L{lib}",) if (lib / "libcudart_static.a").exists() else ()
    return Nvcc(compiler, (int(release[1]), int(release[2])), flags)
