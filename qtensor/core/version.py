"""Define the version, the name on the package index, and a fingerprint for caches on disk."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

__version__ = "0.1.0"
DISTRIBUTION = "torch-qtensor"
"""The name on the package index, where ``qtensor`` is another project."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


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
