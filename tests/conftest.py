"""Fixtures of every test."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from nightly import is_left_out, is_nightly

from qtensor.kernels.cpu import native


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cells that ``make test`` leaves out."""
    places: dict[tuple[str, str], int] = {}
    for item in items:
        spec = getattr(item, "callspec", None)
        if spec is None:
            continue
        name, file = item.originalname, item.path.name  # type: ignore[attr-defined]
        place = places[file, name] = places.get((file, name), -1) + 1
        if is_nightly(f"{file}::{name}", spec.params) or is_left_out(file, place):
            item.add_marker(pytest.mark.nightly)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test starts from the same random state."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """A test that compiles starts without cached graphs and leaves none."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the libraries of a compiler cache of its own lie, so that no test writes to the user's."""
    monkeypatch.setenv("QTENSOR_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "cache" / "libraries"


@pytest.fixture(scope="module")
def native_kernels() -> None:
    """The CPU kernels are loaded from the user's cache, before a test gets one of its own and would compile them."""
    native.library()
