"""CPU kernels and C++ ops that came compiled with the package, in a wheel for one platform.

The folder ``prebuilt`` has two libraries of kernels for each instruction set, the second one for
attention, and one of C++ ops. A library is used as long as the installed sources are those that it
was compiled from. Otherwise the cache or the compiler of the machine provides the library.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from qtensor.build.cache import BuildSpec, build, is_built, only_process, rebuild, remove
from qtensor.core.errors import BuildError
from qtensor.kernels.cpu import sources

FOLDER = Path(__file__).parent / "prebuilt"
_MANIFEST = "manifest.json"


def fingerprint(spec: BuildSpec) -> str:
    """Return a digest of a library's name and sources.

    The tag of a wheel names the machine, and flags differ between the compilers of machines, so
    neither is part of it.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256(spec.name.encode())
    for path in sorted({*(unit.source for unit in spec.units), *spec.headers}):
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def find(spec: BuildSpec) -> Path | None:
    """Return a library of the package, or None if it has none for the installed sources."""
    try:
        keys = json.loads((FOLDER / _MANIFEST).read_text())
        path = FOLDER / f"{spec.name}.so"
        current = path.is_file() and keys.get(spec.name) == fingerprint(spec)
    except (OSError, ValueError, AttributeError):
        return None
    return path if current else None


def find_compiled(spec: BuildSpec) -> Path | None:
    """Return a library, or None if neither the package nor the cache has it; compile nothing.

    Raises:
        BuildError: the sources cannot be read.
    """
    return find(spec) or (build(spec) if is_built(spec) else None)


def provide_one(spec: BuildSpec) -> Path:
    """Return a library of the package, else that of the cache; build it if neither exists.

    Raises:
        BuildError: as `qtensor.build.cache.build`.
    """
    return find(spec) or build(spec)


def provide(isa: str) -> Path:
    """Return the kernels of the package, else those of the cache; build them if neither exists.

    The C++ ops, which call the kernels, are built too. If that fails, Python serves the ops. The
    pieces of the kernels, which served while they were built, are removed.

    Raises:
        BuildError: as `qtensor.build.cache.build`.
    """
    kernels = sources.build_spec(isa)
    library = provide_one(kernels)
    provide_ops()
    remove(sources.piece_name(isa))
    return library


def provide_ops() -> None:
    """Build the C++ ops if neither the package nor the cache has them; no matter if that fails."""
    with contextlib.suppress(BuildError):
        spec = sources.ops_build_spec()
        # The notice of the kernels counts the time of the ops.
        find(spec) or build(spec, notice=lambda _: None)


def provide_once(isa: str) -> None:
    """Do what `provide` does, unless another process is doing so.

    The C++ ops come first: processes take both libraries when the kernels are there.

    Raises:
        BuildError: as `qtensor.build.cache.build`.
    """
    with only_process("background") as is_only:
        if is_only:
            provide_ops()
            provide(isa)


def replace(isa: str, path: Path) -> Path | None:
    """Return another library in place of one that the system cannot load, or None.

    The cache replaces a library of the package. A library of the cache is compiled again if another
    compiler built it.

    Args:
        isa: instruction set.
        path: the library that does not load.

    Raises:
        BuildError: as `qtensor.build.cache.build`.
    """
    spec = sources.build_spec(isa)
    return build(spec) if path.parent == FOLDER else rebuild(spec)


def write(
    folder: Path, isas: Iterable[str], make: Callable[[BuildSpec], Path] = build
) -> list[Path]:
    """Compile the kernels into `folder`, in the form in which `find` expects them in a package.

    Args:
        folder: is made if it does not exist.
        isas: the instruction sets.
        make: compiles a library; by default for this machine, by way of the cache.

    Returns:
        Two libraries for each instruction set, the second one for attention, and that of the C++
        ops.

    Raises:
        BuildError: as `qtensor.build.cache.build`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kernels = [spec for isa in isas for spec in sources.kernel_build_specs(isa)]
    specs = [*kernels, sources.ops_build_spec()]
    libraries = [folder / f"{spec.name}.so" for spec in specs]
    for spec, path in zip(specs, libraries, strict=True):
        shutil.copyfile(make(spec), path)
    manifest = json.dumps({spec.name: fingerprint(spec) for spec in specs}, indent=1)
    (folder / _MANIFEST).write_text(manifest + "\n")
    return libraries
