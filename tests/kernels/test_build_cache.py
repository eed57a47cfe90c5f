"""The cache of compiled kernels: its folder, its substitute, and listing and removing kernels."""

import ctypes
import grp
import json
import os
import pwd
import stat
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from compiler_scripts import answer, recipe, runs, script, write_source

from qtensor.build import folders
from qtensor.build.cache import build, cache_dir, clean, is_built, library_path, list_built
from qtensor.build.compilers import find_cxx
from qtensor.build.folders import untrusted
from qtensor.core.errors import BuildError

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
    monkeypatch.setattr(Path, "home", no_home)
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
    "link": (lambda p: p.symlink_to(p.parent), "which is not a folder"),
    "file": (lambda p: p.touch(), "which is not a folder"),
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


# ------------------------------------------------------------------------------------ trust


def not_trusted(tmp_path, asked, why):
    """Nothing in the cache is loaded or listed; a build warns and goes to the private folder."""
    assert not is_built(asked)
    assert list_built() == ()
    private = tmp_path / "temporary" / f"qtensor-{os.geteuid()}"
    told = f"does not trust its cache .*{why}.* go to {private}, .*other users cannot"
    with pytest.warns(RuntimeWarning, match=told):
        path = build(asked)
    assert path.is_relative_to(private)


@pytest.mark.parametrize("variable", ["QTENSOR_CACHE_DIR", "XDG_CACHE_HOME"])
@pytest.mark.parametrize("part", ["libraries", "cache", "above"])
def test_a_cache_that_others_can_write(tmp_path, monkeypatch, variable, part):
    above = tmp_path / "above"
    monkeypatch.delenv("QTENSOR_CACHE_DIR")
    monkeypatch.setenv(variable, str(above / "cache"))
    asked = recipe(write_source(tmp_path), find_cxx())
    libraries = build(asked).parent.parent
    folder = {"libraries": libraries, "cache": libraries.parent, "above": above}[part]
    folder.chmod(0o777)
    not_trusted(tmp_path, asked, f"{folder} has mode 777: other users can write to it")


@pytest.mark.parametrize("part", ["entry", "library", "manifest"])
def test_a_library_that_others_can_write_is_built_again(tmp_path, libraries, part):
    """The folder around it is this user's, who may replace it there."""
    asked = recipe(write_source(tmp_path), find_cxx())
    path = build(asked)
    {"entry": path.parent, "library": path, "manifest": path.with_name("manifest.json")}[
        part
    ].chmod(0o777)
    assert not is_built(asked)
    assert list_built() == ()
    assert build(asked) == path
    assert is_built(asked)


def test_a_cache_of_another_user(tmp_path, monkeypatch):
    """For this process, the user that built the library is another one."""
    asked = recipe(write_source(tmp_path), find_cxx())
    path = build(asked)
    builder = path.stat().st_uid
    monkeypatch.setattr(folders, "_ROOT", -1)  # the tests may run as root
    monkeypatch.setattr(os, "geteuid", lambda: builder + 1)
    assert not is_built(asked)
    assert list_built() == ()
    assert f"belongs to user {builder}" in untrusted(path)


def test_the_private_folder_serves_only_in_place_of_the_cache(tmp_path):
    """A library that another cache has left there does not hide that this one is empty."""
    asked = recipe(write_source(tmp_path), find_cxx())
    (tmp_path / "cache").touch()
    with pytest.warns(RuntimeWarning, match="cannot write its cache"):
        private = build(asked)
    assert library_path(asked) == private
    (tmp_path / "cache").unlink()
    assert not is_built(asked)
    assert library_path(asked).is_relative_to(tmp_path / "cache")
    assert list_built() == ()


def test_a_cache_of_root():
    """An image that root has filled serves every user."""
    assert untrusted(Path("/usr/bin/env")) is None


@pytest.mark.parametrize(("mode", "trusted"), [(0o1777, True), (0o777, False), (0o755, True)])
def test_the_sticky_bit_above_the_cache(tmp_path, monkeypatch, mode, trusted):
    """In a folder such as /tmp nobody can rename the folders of others."""
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("QTENSOR_CACHE_DIR", str(shared / "cache"))
    asked = recipe(write_source(tmp_path), find_cxx())
    build(asked)
    shared.chmod(mode)
    assert is_built(asked) == trusted


def test_the_sticky_bit_of_the_cache_itself(tmp_path, libraries):
    """Others could place a library there that is not built yet."""
    asked = recipe(write_source(tmp_path), find_cxx())
    build(asked)
    libraries.chmod(0o1777)
    assert not is_built(asked)


def test_a_link_that_others_could_exchange(tmp_path, monkeypatch):
    asked = recipe(write_source(tmp_path), find_cxx())
    build(asked)
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "link").symlink_to(tmp_path / "cache")
    monkeypatch.setenv("QTENSOR_CACHE_DIR", str(shared / "link"))
    assert is_built(asked)
    shared.chmod(0o777)
    assert not is_built(asked)


@pytest.mark.parametrize(
    ("names", "members", "trusted"),
    [
        (("me", "me"), [], True),
        (("me", "me"), ["me"], True),
        (("me", "me"), ["me", "you"], False),
        (("staff", "me"), [], False),
    ],
)
def test_a_group_that_can_write(tmp_path, libraries, monkeypatch, names, members, trusted):
    """A group for each user, with a umask of 002, is the default of some systems."""
    asked = recipe(write_source(tmp_path), find_cxx())
    build(asked)
    libraries.chmod(0o775)
    group, user = names
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name=group, gr_mem=members))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name=user))
    assert is_built(asked) == trusted
    monkeypatch.setattr(os, "getegid", lambda: libraries.stat().st_gid + 1)
    assert not is_built(asked), "the group of another user"


def test_a_umask_that_lets_others_write(tmp_path):
    """It is not for this library: no process would load it."""
    asked = recipe(write_source(tmp_path), find_cxx())
    umask = os.umask(0)
    try:
        build(asked)
    finally:
        os.umask(umask)
    assert is_built(asked)


def test_changed_contents_of_the_same_size(tmp_path):
    """A library that a crash of the machine or another program has changed is built again."""
    asked = recipe(write_source(tmp_path), find_cxx())
    path = build(asked)
    path.write_bytes(bytes(path.stat().st_size))
    assert not is_built(asked)
    assert answer(build(asked)) == 42


def test_a_manifest_without_a_digest(tmp_path):
    asked = recipe(write_source(tmp_path), find_cxx())
    manifest = build(asked).with_name("manifest.json")
    facts = json.loads(manifest.read_text())
    del facts["sha256"]
    manifest.write_text(json.dumps(facts))
    assert not is_built(asked)


# ------------------------------------------------------------------------------------ list and
# clean


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
