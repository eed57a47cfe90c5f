"""CPU kernels that came compiled with the package: a wheel for one platform may hold them.

They lie beside their sources, each in the name of its instruction set, and serve as long as these sources are those that they were
compiled from. Where there are none the compiler of the machine makes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from qtensor.build import build
from qtensor.errors import BuildError
from qtensor.kernels.cpu import sources

FOLDER = Path(__file__).parent / "prebuilt"
_MANIFEST = "manifest.json"


def fingerprint(isa: str) -> str:
    """The digest of what a library of that instruction set is made from, whatever compiles it.

    Raises:
        OSError: a source cannot be read.
    """
    units, headers = sources.units(isa), sources.headers()
    facts = [sys.platform, platform.machine(), [[unit.name, *unit.flags] for unit in units]]
    digest = hashlib.sha256(json.dumps(facts).encode())
    for path in sorted({unit.source for unit in units} | set(headers)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def find(isa: str) -> Path | None:
    """The library that came with the package, or None where there is none of these sources."""
    try:
        made_from = json.loads((FOLDER / _MANIFEST).read_text())
        path = FOLDER / f"cpu_{isa}.so"
        current = path.is_file() and made_from.get(isa) == fingerprint(isa)
    except (OSError, ValueError, AttributeError):
        return None
    return path if current else None


def provide(isa: str) -> Path:
    """The library: the one that came with the package, else that of the cache, built if it is not there.

    Raises:
        BuildError: as ``qtensor.build.build``.
    """
    packaged = find(isa)
    if packaged is not None:
        return packaged
    library = build(sources.recipe(isa))
    with contextlib.suppress(BuildError):
        # The C++ that answers small calls: never built later, in the middle of a call.
        build(sources.calls_recipe())
    return library


def write(folder: Path, isas: Iterable[str]) -> list[Path]:
    """Compile the kernels into ``folder`` as ``find`` expects them in a package.

    Raises:
        BuildError: as ``qtensor.build.build``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = {isa: folder / f"cpu_{isa}.so" for isa in isas}
    for isa, path in made.items():
        shutil.copyfile(build(sources.recipe(isa)), path)
    manifest = json.dumps({isa: fingerprint(isa) for isa in made}, indent=1)
    (folder / _MANIFEST).write_text(manifest + "\n")
    return list(made.values())
