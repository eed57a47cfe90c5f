"""Options, tiers, and the fixtures of every test, which are in `shared_fixtures`."""

from __future__ import annotations

import gc
import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import nightly
import pytest
from torch_process import collect_rarely

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
    # The process of pytest-xdist that hands out the tests starts without torch: three seconds.
    if config.getoption("dist", "no") == "no" or config.option.collectonly:
        config.pluginmanager.register(importlib.import_module("shared_fixtures"))


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
