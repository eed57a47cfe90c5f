"""The fingerprint of the code, by which caches on disk tell versions apart."""

from __future__ import annotations

from pathlib import Path

import pytest

import qtensor
from qtensor.core import version


def test_the_fingerprint_covers_all_sources(monkeypatch: pytest.MonkeyPatch):
    """A change in any package makes another fingerprint, not only one beside ``version.py``."""
    read: set[Path] = set()
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.add(path) or b"")
    version.fingerprint.__wrapped__()
    assert read == set(Path(qtensor.__file__).parent.rglob("*.py"))
