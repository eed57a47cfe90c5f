"""Define the version, and a fingerprint of the code for caches that outlive a process."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

__version__ = "0.1.0"


@functools.cache
def fingerprint() -> str:
    """Return the version and a digest of the package's sources.

    A compiled graph contains the results of the dispatch tables, so a cache on disk must not serve
    it to another version of the code.
    """
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:16]}"
