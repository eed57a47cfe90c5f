"""Build, find and load generated kernels in the cache of compiled libraries."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from qtensor.build import cache as cache
from qtensor.build.cache import BuildSpec, Built, Unit
from qtensor.build.compilers import parallel_jobs, stop_all
from qtensor.core.errors import BuildError, QTensorError
from qtensor.cutlass_gemm import emit, tuning
from qtensor.cutlass_gemm.launch import Kernel
from qtensor.cutlass_gemm.spec import KernelSpec
from qtensor.cutlass_gemm.toolchain import find_nvcc

GIB = 1 << 30
COMPILE_MEMORY = 6 * GIB
"""Peak memory of one nvcc process, rounded up (measured: 3.1 to 5.7 GB)."""

PREFIX = "gemm_"
"""Prefix of the names of these libraries in the cache."""

Progress = Callable[[KernelSpec, Path | BuildError], None]


def library_name(spec: KernelSpec) -> str:
    """Return the name of a kernel's library: the spec's name and the digest of its generator."""
    return f"{spec.name}_{emit.digest()}"


def build_spec(spec: KernelSpec, folder: Path) -> BuildSpec:
    """Return the build of a kernel, and write its source into ``folder``."""
    nvcc = find_nvcc(spec.arch)
    source = folder / f"{spec.name}.cu"
    source.write_text(emit.emit(spec))
    return BuildSpec(
        library_name(spec),
        (Unit(source, compile_flags(spec), "kernel", include_folders()),),
        nvcc.compiler,
        emit.HEADERS,
        nvcc.link_flags,
        title=f"kernel {spec.name}",
        effort=45.0,
    )


def compile_flags(spec: KernelSpec) -> tuple[str, ...]:
    """Return the flags for nvcc.

    They ask for machine code alone (no PTX), which any driver of the toolkit's major version runs.
    With ``QTENSOR_CUTLASS_TRACE=1``, CUTLASS prints each step of a launch.
    """
    trace = os.environ.get("QTENSOR_CUTLASS_TRACE") == "1"
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
        *(("-DCUTLASS_DEBUG_TRACE_LEVEL=1",) if trace else ()),
    )


def include_folders() -> tuple[Path, ...]:
    """Return the include folders of this package and of CUTLASS."""
    source = emit.source_folder()
    return emit.FOLDER, source / "include", source / "tools/util/include"


def build(spec: KernelSpec, *, notice: Callable[[str], None] | None = None) -> Path:
    """Return the path of a kernel's library, and compile it if the cache has none."""
    with tempfile.TemporaryDirectory(prefix="qtensor-gemm-") as folder:
        path = cache.build(build_spec(spec, Path(folder)), notice=notice)
    refresh()
    return path


def build_all(
    specs: Sequence[KernelSpec], *, jobs: int | None = None, progress: Progress | None = None
) -> list[Path]:
    """Build kernels in parallel, as many at once as memory allows, and return their paths.

    ``progress`` is called after each build with its spec and its library or error.

    Raises:
        BuildError: at least one build failed. All builds are tried first; the message holds the
            first failure and the number of others.
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
        others = f"\n{len(errors) - 1} other builds failed too." if len(errors) > 1 else ""
        raise BuildError(f"{errors[0]}{others}")
    return [done[spec] for spec in specs]


def _silent(message: str) -> None:
    """Print nothing: the caller of ``build_all`` shows its own progress."""


def list_built() -> tuple[Built, ...]:
    """Return the kernel libraries in the cache, of this release and of others."""
    return tuple(entry for entry in cache.list_built() if entry.name.startswith(PREFIX))


def clean(specs: Sequence[KernelSpec]) -> tuple[Built, ...]:
    """Remove the libraries of kernels, of older releases too, and return what was removed.

    Processes that have loaded a library can go on using it.
    """
    names = tuple(f"{spec.name}_" for spec in specs)
    doomed = [entry for entry in list_built() if entry.name[:-8] in names]  # without the digest
    for entry in doomed:
        shutil.rmtree(entry.path.parent, ignore_errors=True)
    refresh()
    return tuple(entry for entry in doomed if not entry.path.exists())


def built_specs() -> dict[str, Path]:
    """Return built kernel name -> path of its newest library, for this release.

    The libraries are not read; ``load`` refuses one whose contents have changed.
    """
    return {name: entries[-1].path for name, entries in _find_entries().items()}


def _find_entries() -> dict[str, list[Built]]:
    """Return kernel name -> its libraries of this release, the oldest first."""
    known = {library_name(spec): spec.name for spec in tuning.specs()}
    found: dict[str, list[Built]] = {}
    for entry in list_built():
        if entry.name in known:
            found.setdefault(known[entry.name], []).append(entry)
    return found


@functools.cache
def _entries() -> dict[str, list[Built]]:
    """Return the libraries of each kernel, cached until ``refresh`` is called."""
    return _find_entries()


_LOADED: dict[str, Kernel | str] = {}
_NOT_BUILT = "it is not built"
_CHANGED = "its library has changed since it was built; run: qtensor kernels build"


def refresh() -> None:
    """Search the cache again at the next ``load``; kernels that are already loaded stay loaded."""
    _entries.cache_clear()
    for name in [name for name, kernel in _LOADED.items() if isinstance(kernel, str)]:
        del _LOADED[name]
    tuning.changed()


def load(spec: KernelSpec) -> Kernel | str:
    """Return the kernel if the cache has it, otherwise the reason why it cannot be used.

    If ``QTENSOR_JIT=1``, a missing kernel is compiled.
    """
    loaded = _LOADED.get(spec.name)
    if loaded is None:
        loaded = _LOADED[spec.name] = _load(spec)
    return loaded


def _load(spec: KernelSpec) -> Kernel | str:
    entries = _entries().get(spec.name, [])
    path = next((entry.path for entry in reversed(entries) if cache.is_intact(entry)), None)
    if path is None and may_compile():
        try:
            path = build(spec)
        except QTensorError as error:
            return str(error)
    if path is None:
        return _CHANGED if entries else _NOT_BUILT
    try:
        return Kernel(str(path), spec.name)
    except OSError as error:
        return f"its library cannot be loaded ({error})"


def may_compile() -> bool:
    """Return True if ``QTENSOR_JIT=1``: a missing kernel is compiled at its first use."""
    return os.environ.get("QTENSOR_JIT") == "1"


def first_loadable(specs: Sequence[KernelSpec]) -> tuple[Kernel, KernelSpec] | str:
    """Return the first kernel of ``specs`` that can be used, or the reason why none can.

    If ``QTENSOR_JIT=1``, missing kernels are compiled, so the first of ``specs`` is tried first.
    """
    reasons = []
    for spec in specs:
        kernel = load(spec)
        if isinstance(kernel, Kernel):
            return kernel, spec
        reasons.append(kernel)
    broken = next((reason for reason in reasons if reason != _NOT_BUILT), None)
    return broken or "none of its kernels is built"


@functools.cache
def warn_missing(arch: str, recipe_name: str, instead: str) -> None:
    """Warn once that kernels are missing, and how to build them."""
    warnings.warn(
        f"qtensor: no CUTLASS kernel for {recipe_name} on {arch} can be used; "
        f"{instead} multiplies. "
        f"Run: qtensor kernels build --arch {arch} --recipe {recipe_name} "
        "(or set QTENSOR_JIT=1 to compile at first use, about a minute for each kernel)",
        RuntimeWarning,
        stacklevel=2,
    )
