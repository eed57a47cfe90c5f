"""CPU kernels that came compiled with the package: a wheel for one platform may hold them.

They lie beside their sources, one library for each instruction set. They serve as long as the
installed sources are those that they were compiled from; otherwise the cache or the compiler of the
machine provides the kernels.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from qtensor.build.cache import build, rebuild, source_key
from qtensor.core.errors import BuildError
from qtensor.kernels.cpu import sources

FOLDER = Path(__file__).parent / "prebuilt"
_MANIFEST = "manifest.json"


def fingerprint(isa: str) -> str:
    """Return the digest of the sources and flags of an instruction set's kernels.

    Raises:
        BuildError: a source cannot be read.
    """
    return source_key(sources.build_spec(isa))


def find(isa: str) -> Path | None:
    """Return the library of the package, or None if it has none for the installed sources."""
    try:
        fingerprints = json.loads((FOLDER / _MANIFEST).read_text())
        path = FOLDER / f"cpu_{isa}.so"
        current = path.is_file() and fingerprints.get(isa) == fingerprint(isa)
    except (OSError, ValueError, AttributeError, BuildError):
        return None
    return path if current else None


def provide(isa: str) -> Path:
    """Return the library of the package, else that of the cache; build it if neither exists.

    Raises:
        BuildError: as `qtensor.build.cache.build`.
    """
    packaged = find(isa)
    if packaged is not None:
        return packaged
    library = build(sources.build_spec(isa))
    with contextlib.suppress(BuildError):
        # The C++ kernels of the ops: never built later, in the middle of a call.
        build(sources.ops_build_spec())
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
        One library for each instruction set.

    Raises:
        BuildError: as `qtensor.build.cache.build`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    libraries = {isa: folder / f"cpu_{isa}.so" for isa in isas}
    for isa, path in libraries.items():
        shutil.copyfile(build(sources.build_spec(isa)), path)
    manifest = json.dumps({isa: fingerprint(isa) for isa in libraries}, indent=1)
    (folder / _MANIFEST).write_text(manifest + "\n")
    return list(libraries.values())
