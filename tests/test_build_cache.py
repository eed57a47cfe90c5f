"""Where compiled kernels are kept: which folder, what stands in for it, what is listed and
removed.
"""

import ctypes
import json
import os
import stat
import time
import warnings

import pytest
from compiler_scripts import answer, recipe, runs, script, write_source

from qtensor import build as module
from qtensor.build import build, cache_dir, clean, is_built, library_path, list_built
from qtensor.compilers import find_cxx
from qtensor.errors import BuildError

pytestmark = pytest.mark.usefixtures("libraries")


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.setenv("QTENSOR_CACHE_DIR", "~/mine")
    assert cache_dir() == tmp_path / "mine"
    monkeypatch.setenv("QTENSOR_CACHE_DIR", "")
    assert cache_dir() == tmp_path / "xdg" / "qtensor"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "qtensor"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == tmp_path / ".cache" / "qtensor"


def test_a_relative_cache_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QTENSOR_CACHE_DIR", "here")
    assert answer(build(recipe(write_source(tmp_path), find_cxx()))) == 42
    assert cache_dir() == tmp_path / "here"


def test_a_user_without_a_home(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("QTENSOR_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(module.Path, "home", no_home)
    with pytest.raises(BuildError, match="Set QTENSOR_CACHE_DIR"):
        cache_dir()


def builds_in_the_private_folder(tmp_path, asked):
    private = tmp_path / "temporary" / f"qtensor-{os.geteuid()}"
    with pytest.warns(
        RuntimeWarning, match=f"cannot write its cache .*go to {private}, .*Set QTEN"
    ):
        path = build(asked)
    assert path.is_relative_to(private)
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert answer(path) == 42
    with warnings.catch_warnings(action="error"):
        assert build(asked) == library_path(asked) == path
    assert [entry.path for entry in list_built()] == [path]


def test_a_file_in_place_of_the_cache(tmp_path):
    (tmp_path / "cache").touch()
    builds_in_the_private_folder(tmp_path, recipe(write_source(tmp_path), script(tmp_path)))
    assert len(runs(tmp_path)) == 2


def make_read_only(folder):
    folder.chmod(0o500)
    if os.access(folder, os.W_OK):
        pytest.skip(reason="this user, root perhaps, may write to read-only folders")


def test_a_read_only_cache(tmp_path, libraries):
    libraries.mkdir(parents=True)
    make_read_only(libraries)
    builds_in_the_private_folder(tmp_path, recipe(write_source(tmp_path), find_cxx()))


def test_a_read_only_cache_that_holds_the_library(tmp_path, libraries):
    asked = recipe(write_source(tmp_path), find_cxx())
    path = build(asked)
    make_read_only(libraries)
    assert build(asked) == path


PRIVATE = {
    "link": (lambda p: p.symlink_to(p.parent), "which is no folder"),
    "file": (lambda p: p.touch(), "which is no folder"),
    "open": (lambda p: (p.mkdir(), p.chmod(0o777)), "with mode 777, open to other users"),
}


@pytest.mark.parametrize(("make", "why"), PRIVATE.values(), ids=PRIVATE)
def test_a_private_folder_that_others_may_have_made(tmp_path, make, why):
    (tmp_path / "cache").touch()
    make(tmp_path / "temporary" / f"qtensor-{os.geteuid()}")
    with pytest.raises(
        BuildError, match=f"must be yours alone; got .*{why}. Set QTENSOR_CACHE_DIR"
    ):
        build(recipe(write_source(tmp_path), find_cxx()))


def test_a_private_folder_of_another_user(tmp_path, monkeypatch):
    """Nothing in it is loaded, and nothing is built in it."""
    (tmp_path / "cache").touch()
    asked = recipe(write_source(tmp_path), find_cxx())
    with pytest.warns(RuntimeWarning, match="cannot write its cache"):
        build(asked)
    mine = os.geteuid()
    own = tmp_path / "temporary" / f"qtensor-{mine}"
    own.rename(tmp_path / "temporary" / f"qtensor-{mine + 1}")
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert not is_built(asked)
    with pytest.raises(BuildError, match=f"which belongs to user {mine}"):
        build(asked)


# ----------------------------------------------------------------------------------- list and clean


def test_the_list(tmp_path, libraries):
    before = time.time()
    assert list_built() == ()
    path = build(recipe(write_source(tmp_path), find_cxx()))
    (entry,) = list_built()
    assert (entry.name, entry.path, entry.size) == ("answer", path, path.stat().st_size)
    assert path.parent.name == f"answer-{entry.key}"
    assert before <= entry.time <= time.time()
    manifest = json.loads((path.parent / "manifest.json").read_text())
    assert manifest["compiler"] == find_cxx().version


def test_clean_removes_what_was_built_and_nothing_else(tmp_path, libraries):
    asked = recipe(write_source(tmp_path), find_cxx())
    path = build(asked)
    loaded = ctypes.CDLL(str(path))
    for name in (".making-by-another", "notes"):
        (libraries / name).mkdir()
    (removed,) = clean()
    assert removed.path == path
    assert sorted(p.name for p in libraries.iterdir()) == [".making-by-another", "notes"]
    assert list_built() == clean() == ()
    assert loaded.answer() == 42
    assert answer(build(asked)) == 42
