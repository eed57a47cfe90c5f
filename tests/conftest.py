"""Fixtures of every test."""

from __future__ import annotations

import gc
import os
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nightly
import numpy as np
import pytest
import torch
from ranks import Ranks
from torch_process import collect_rarely

from qtensor.kernels.cpu import native
from qtensor.library.native_ops import left_to_python

# Tests, and the processes that they start, wait for the whole library of kernels. Only the tests of
# its pieces let a process compile it in the background.
os.environ["QTENSOR_BACKGROUND"] = "0"
# Products have the bytes that they have on every CPU. Tests of AMX ask for it.
os.environ.setdefault("QTENSOR_AMX", "0")

FILE_MARKS = re.compile(r"^pytestmark = (\[\n(    .*\n)*\]|.*$)", re.MULTILINE)
CELLS = pytest.StashKey[list[pytest.Item]]()
"""All collected cells, with the marks of their tiers."""
SAMPLING = pytest.StashKey[nightly.Sampling]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--wide-part``."""
    parser.addoption(
        "--wide-part",
        metavar="INDEX/PARTS",
        type=nightly.read_part,
        help="run this part of the wide tier alone, such as 3/16 (a hash of the test's id decides)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Sample the tests; if the default tier alone runs, the other cells are never built."""
    config.stash[SAMPLING] = nightly.Sampling(
        drops=config.option.markexpr.startswith("not nightly")
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that the default tier would import and then deselect as a whole."""
    if not config.stash[SAMPLING].drops or collection_path.suffix != ".py":
        return None
    excluded = [word[4:] for word in config.option.markexpr.split(" and ") if word[:4] == "not "]
    text = collection_path.read_text(encoding="utf-8")
    own = FILE_MARKS.search(text)
    marks = own is not None and [mark for mark in excluded if f"pytest.mark.{mark}" in own[0]]
    return True if marks else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Sample the cells of a test once all parameters are known."""
    yield
    metafunc.config.stash[SAMPLING].sample(metafunc)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select a part of the wide tier if one is asked for."""
    config.stash[CELLS] = list(items)
    if (wanted := config.getoption("--wide-part")) is not None:
        index, parts = wanted
        keys = [(item, nightly.key(item)) for item in items]
        chosen = [item for item, key in keys if key and nightly.part(key, parts) == index]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector away from the cells, which live until the end, and let it run less
    often: it takes an eighth of the time of tests that compile.
    """
    gc.disable()
    result = yield
    collect_rarely()
    gc.enable()
    return result


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
