"""CPU kernels and C++ ops that came compiled with the package, in a wheel for one platform.

The folder ``prebuilt`` has a library of kernels for each instruction set, and one of C++ ops. A
library is used as long as the installed sources are those that it was compiled from. Otherwise the
cache or the compiler of the machine provides the library.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from qtensor.build.cache import BuildSpec, build, is_built, rebuild, source_key
from qtensor.core.errors import BuildError
from qtensor.kernels.cpu import sources

FOLDER = Path(__file__).parent / "prebuilt"
_MANIFEST = "manifest.json"


def find(spec: BuildSpec) -> Path | None:
    """Return a library of the package, or None if it has none for the installed sources."""
    try:
        keys = json.loads((FOLDER / _MANIFEST).read_text())
        path = FOLDER / f"{spec.name}.so"
        current = path.is_file() and keys.get(spec.name) == source_key(spec)
    except (OSError, ValueError, AttributeError, BuildError):
        return None
    return path if current else None


def find_ops() -> Path | None:
    """Return the library of C++ ops, or None if neither the package nor the cache has it.

    This function compiles nothing, because it runs in the middle of a call.

    Raises:
        BuildError: the sources cannot be read.
    """
    spec = sources.ops_build_spec()
    return find(spec) or (build(spec) if is_built(spec) else None)


def provide_one(spec: BuildSpec) -> Path:
    """Return a library of the package, else that of the cache; build it if neither exists.

    Raises:
        BuildError: as `qtensor.build.cache.build`.
    """
    return find(spec) or build(spec)


def provide(isa: str) -> Path:
    """Return the kernels of the package, else those of the cache; build them if neither exists.

    The C++ ops, which call the kernels, are built too. If that fails, Python serves the ops.

    Raises:
        BuildError: as `qtensor.build.cache.build`.
    """
    kernels, ops = sources.build_spec(isa), sources.ops_build_spec()
    library = find(kernels) or build(kernels)
    if find(ops) is None:
        with contextlib.suppress(BuildError):
            build(ops)
    return library


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


def write(folder: Path, isas: Iterable[str]) -> list[Path]:
    """Compile the kernels into `folder`, in the form in which `find` expects them in a package.

    Returns:
        Two libraries for each instruction set, that of attention last, and that of the C++ ops.

    Raises:
        BuildError: as `qtensor.build.cache.build`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kinds = (sources.build_spec, sources.attention_build_spec)
    specs = [spec_of(isa) for isa in isas for spec_of in kinds] + [sources.ops_build_spec()]
    libraries = [folder / f"{spec.name}.so" for spec in specs]
    for spec, path in zip(specs, libraries, strict=True):
        shutil.copyfile(build(spec), path)
    manifest = json.dumps({spec.name: source_key(spec) for spec in specs}, indent=1)
    (folder / _MANIFEST).write_text(manifest + "\n")
    return libraries
