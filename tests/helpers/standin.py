"""Kernel libraries that compute on the CPU and record their calls, in place of CUTLASS."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from qtensor.build import cache as cache
from qtensor.build.compilers import find_cxx
from qtensor.cutlass_gemm import emit, library
from qtensor.cutlass_gemm.launch import Arguments
from qtensor.cutlass_gemm.spec import KernelSpec
from qtensor.kernels.products import choice
from qtensor.kernels.products.problem import Product
from qtensor.library.define import FILLS

SOURCE = Path(__file__).with_suffix(".cpp")


@functools.cache
def compiled(*flags: str) -> Path:
    """Return the path of the stand-in library; ``flags`` can give it another interface."""
    folder = Path(tempfile.mkdtemp(prefix="qtensor-standin-"))
    path = folder / "standin.so"
    common = ["-std=c++17", "-O2", "-shared", "-fPIC", f"-I{emit.FOLDER}"]
    command = [*find_cxx().command, *common, *flags, str(SOURCE), "-o", str(path), "-ldl"]
    subprocess.run(command, check=True)
    return path


def install(spec: KernelSpec, source: Path | None = None, *, key: str = "0" * 32) -> Path:
    """Put a library into the cache as the kernel ``spec``, as a build does."""
    name = library.library_name(spec)
    entry = cache.cache_dir() / "libraries" / f"{name}-{key}"
    entry.mkdir(parents=True, exist_ok=True)
    path = entry / f"{name}.so"
    shutil.copy(source or compiled(), path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    facts = {"name": name, "key": key, "size": path.stat().st_size, "time": time.time()}
    facts["sha256"] = digest
    (entry / "manifest.json").write_text(json.dumps(facts))
    library.refresh()
    return path


@dataclass
class Call:
    """The last launch of a library."""

    arguments: Arguments
    stream: int | None
    workspace: int | None
    bytes: int


class Standin:
    """A handle of the library at ``path``."""

    def __init__(self, path: Path) -> None:
        self._library: Any = ctypes.CDLL(str(path))

    @property
    def calls(self) -> int:
        return self._library.qt_standin_calls()

    def last(self) -> Call:
        arguments = Arguments()
        stream, workspace, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int64()
        pointers = [ctypes.byref(x) for x in (arguments, stream, workspace, size)]
        self._library.qt_standin_last(*pointers)
        return Call(arguments, stream.value, workspace.value, size.value)

    def set(self, status: int = 0, workspace: int = 0) -> None:
        self._library.qt_standin_set(ctypes.c_int(status), ctypes.c_int64(workspace))


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Treat CPU tensors as tensors of a GPU with this compute capability."""
    monkeypatch.setattr(choice, "_device", lambda device: (str(device), capability, 132))
    monkeypatch.setattr(choice, "_CHOICES", {})
    monkeypatch.setattr(choice, "_FAILED", {})
    choice.choose.cache_clear()
    monkeypatch.setattr(library, "_LOADED", {})
    library.warn_missing.cache_clear()
    library.refresh()


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the matmul op choose a backend for CPU tensors too."""

    def fill(out: torch.Tensor, args: Any) -> None:
        choice.multiply_(
            out, Product(args.operands, args.layout, args.bias, args.backend, args.fast)
        )

    monkeypatch.setitem(FILLS, "gemm", fill)
