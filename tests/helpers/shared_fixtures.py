"""Fixtures of every test, in processes that run tests."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import Ranks

from qtensor.kernels.cpu import native
from qtensor.library.native_ops import left_to_python


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Start every test from the same random state."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Start a test that compiles without cached graphs, and drop those that it makes."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a test a compiler cache of its own, and return the folder of its libraries."""
    monkeypatch.setenv("QTENSOR_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "cache" / "libraries"


@pytest.fixture(scope="module")
def native_kernels() -> None:
    """Load the CPU kernels from the user's cache, before a test moves to an empty cache of its
    own.
    """
    native.library()


@pytest.fixture
def in_python() -> Iterator[None]:
    """Leave ops to their Python kernels, which ask the tables that a test replaces."""
    with left_to_python():
        yield


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two gloo processes, which start at the first call and serve all files of a worker."""
    group = Ranks(tmp_path_factory.mktemp("gloo"))
    yield group
    group.stop()


@pytest.fixture(scope="session")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Three gloo processes, for tests of the wide tier."""
    group = Ranks(tmp_path_factory.mktemp("gloo_three"), size=3)
    yield group
    group.stop()


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four gloo processes, for tests of the wide tier."""
    group = Ranks(tmp_path_factory.mktemp("gloo_four"), size=4)
    yield group
    group.stop()
