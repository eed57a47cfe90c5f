"""Generated kernels in the cache of compiled libraries: build them, find them, load them."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from qtensor import build as cache
from qtensor.build import Built, Recipe, Unit
from qtensor.compilers import parallel_jobs, stop_all
from qtensor.cutlass_gemm import emit, tuning
from qtensor.cutlass_gemm.launch import Kernel
from qtensor.cutlass_gemm.spec import KernelSpec
from qtensor.cutlass_gemm.toolchain import find_nvcc
from qtensor.errors import BuildError, QTensorError

GIB = 1 << 30
COMPILE_MEMORY = 6 * GIB
"""What one nvcc takes at its peak, rounded up (measured: 3.1 to 5.7 GB)."""

PREFIX = "gemm_"
"""Of the names of these libraries in the cache."""

Progress = Callable[[KernelSpec, Path | BuildError], None]


def library_name(spec: KernelSpec) -> str:
    """Of its library: the spec, and the digest of the code that generates it."""
    return f"{spec.name}_{emit.digest()}"


def recipe(spec: KernelSpec, folder: Path) -> Recipe:
    """How a kernel is compiled; its source goes into ``folder``.

    Raises:
        BuildError: there is no CUTLASS, or no nvcc for the architecture.
    """
    nvcc = find_nvcc(spec.arch)
    source = folder / f"{spec.name}.cu"
    source.write_text(emit.emit(spec))
    return Recipe(
        library_name(spec),
        (Unit(source, compile_flags(spec), "kernel", include_folders()),),
        nvcc.compiler,
        emit.HEADERS,
        nvcc.link_flags,
        title=f"kernel {spec.name}",
        effort=45.0,
    )


def compile_flags(spec: KernelSpec) -> tuple[str, ...]:
    """For nvcc. Machine code alone (no PTX), which any driver of the toolkit's major version takes."""
    return (
        "-std=c++17",
        "-O3",
        "--expt-relaxed-constexpr",
        "-DNDEBUG",
        f"-DQT_CUTLASS_{emit.version().replace('.', '_')}",  # the headers' contents, for the key
        "-gencode",
        f"arch=compute_{spec.arch.removeprefix('sm_')},code={spec.arch}",
        "-Xcompiler=-fvisibility=hidden",
        "-w",
    )


def include_folders() -> tuple[Path, ...]:
    """Ours and CUTLASS's."""
    source = emit.source_folder()
    return emit.FOLDER, source / "include", source / "tools/util/include"


def build(spec: KernelSpec, *, notice: Callable[[str], None] | None = None) -> Path:
    """The library of a kernel, compiled if the cache has none.

    Raises:
        BuildError: there is no CUTLASS or no nvcc, or it fails.
    """
    with tempfile.TemporaryDirectory(prefix="qtensor-gemm-") as folder:
        path = cache.build(recipe(spec, Path(folder)), notice=notice)
    refresh()
    return path


def build_all(
    specs: Sequence[KernelSpec], *, jobs: int | None = None, progress: Progress | None = None
) -> list[Path]:
    """Build kernels side by side, as many at once as processors and free memory allow.

    Args:
        specs: what to build.
        jobs: at most this many at once.
        progress: told of each that ends, with its library or what went wrong.

    Returns:
        Their libraries, in order.

    Raises:
        BuildError: after all have been tried, the first failure and the number of others.
    """
    room = parallel_jobs(len(specs), COMPILE_MEMORY)
    workers = min(room, jobs) if jobs else room
    done: dict[KernelSpec, Path] = {}
    errors: list[BuildError] = []
    with ThreadPoolExecutor(max(1, workers)) as pool:
        futures = {pool.submit(build, spec, notice=_silent): spec for spec in specs}
        try:
            for future in as_completed(futures):
                spec = futures[future]
                try:
                    result: Path | BuildError = done.setdefault(spec, future.result())
                except BuildError as error:
                    errors.append(error)
                    result = error
                if progress is not None:
                    progress(spec, result)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop_all()
            raise
    if errors:
        others = f"\n{len(errors) - 1} others failed too." if len(errors) > 1 else ""
        raise BuildError(f"{errors[0]}{others}")
    return [done[spec] for spec in specs]


def _silent(text: str) -> None:
    """The caller shows progress of its own."""


def list_built() -> tuple[Built, ...]:
    """The libraries of kernels in the cache, of this release and of others."""
    return tuple(entry for entry in cache.list_built() if entry.name.startswith(PREFIX))


def clean(specs: Sequence[KernelSpec]) -> tuple[Built, ...]:
    """Remove the libraries of kernels, those of older releases included; processes that have loaded one keep it."""
    names = tuple(f"{spec.name}_" for spec in specs)
    doomed = [entry for entry in list_built() if _without_digest(entry.name) in names]
    for entry in doomed:
        shutil.rmtree(entry.path.parent, ignore_errors=True)
    refresh()
    return tuple(entry for entry in doomed if not entry.path.exists())


def _without_digest(name: str) -> str:
    return name[:-8]


def built_specs() -> dict[str, Path]:
    """Names of the built kernels of this release, with their newest libraries."""
    known = {library_name(spec): spec.name for spec in tuning.specs()}
    return {known[entry.name]: entry.path for entry in list_built() if entry.name in known}


@functools.cache
def _paths() -> dict[str, Path]:
    """What ``built_specs`` found when this process first asked, or last built."""
    return built_specs()


_LOADED: dict[str, Kernel | str] = {}


def refresh() -> None:
    """Look into the cache again at the next call; kernels that are loaded stay."""
    _paths.cache_clear()
    for name in [name for name, kernel in _LOADED.items() if isinstance(kernel, str)]:
        del _LOADED[name]
    tuning.changed()


def load(spec: KernelSpec) -> Kernel | str:
    """The kernel, if the cache has it; else why not. ``QTENSOR_JIT=1`` builds it."""
    found = _LOADED.get(spec.name)
    if found is None:
        found = _LOADED[spec.name] = _load(spec)
    return found


def _load(spec: KernelSpec) -> Kernel | str:
    path = _paths().get(spec.name)
    if path is None and may_compile():
        try:
            path = build(spec)
        except QTensorError as error:
            return str(error)
    if path is None:
        return "it is not built"
    try:
        return Kernel(str(path), spec.name)
    except OSError as error:
        return f"its library cannot be loaded ({error})"


def may_compile() -> bool:
    """Whether a kernel that is missing is compiled when it is first needed: ``QTENSOR_JIT=1``."""
    return os.environ.get("QTENSOR_JIT") == "1"


def first_loadable(specs: Sequence[KernelSpec]) -> tuple[Kernel, KernelSpec] | str:
    """The first of ``specs`` that is there; with ``QTENSOR_JIT=1`` the first of all. Else why there is none."""
    reasons = []
    for spec in specs:
        found = load(spec)
        if isinstance(found, Kernel):
            return found, spec
        reasons.append(found)
    broken = next((reason for reason in reasons if reason != "it is not built"), None)
    return broken or "none of its kernels is built"


@functools.cache
def warn_missing(arch: str, recipe_name: str, instead: str) -> None:
    """Say once that kernels are missing, and how to get them."""
    warnings.warn(
        f"qtensor: no CUTLASS kernels for {recipe_name} on {arch} can be used; {instead} multiplies. "
        f"Run: qtensor kernels build --arch {arch} --recipe {recipe_name} (or set QTENSOR_JIT=1 to compile at first use, "
        "about a minute a kernel)",
        RuntimeWarning,
        stacklevel=2,
    )
