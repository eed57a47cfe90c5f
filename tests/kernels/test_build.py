"""The cache of compiled kernels: built once, found by contents, whole or not there at all."""

import ctypes
import dataclasses
import os
import signal
import stat
import threading
import time

import pytest
from compiler_scripts import (
    SECONDS,
    answer,
    entries,
    finish,
    is_running,
    recipe,
    runs,
    script,
    start,
    wait_for,
    waiting,
    write_source,
)

from qtensor.build import cache as module
from qtensor.build.cache import (
    BuildSpec,
    Unit,
    build,
    is_built,
    library_path,
    list_built,
    rebuild,
)
from qtensor.build.compilers import Compiler, find_cxx
from qtensor.core.errors import BuildError, CompilerNotFound, QTensorError
from qtensor.kernels.cpu import sources

wide = pytest.mark.nightly(reason="processes and compilers; the default tier has a few of them")


pytestmark = pytest.mark.usefixtures("libraries")


# ------------------------------------------------------------------------------------ once


def test_a_library_is_built_once_and_loads(tmp_path, libraries):
    asked, told = recipe(write_source(tmp_path), script(tmp_path)), []
    assert not is_built(asked)
    expected = library_path(asked)

    path = build(asked, notice=told.append)

    assert (path, is_built(asked), library_path(asked)) == (expected, True, expected)
    assert answer(path) == 42
    assert len(runs(tmp_path)) == 2, "one unit and one link"
    assert build(asked, notice=told.append) == path
    assert len(runs(tmp_path)) == 2
    assert told == [f"qtensor: compiling its native code (once, cached in {libraries})"]
    assert entries(libraries) == [path.parent.name]
    assert sorted(p.name for p in path.parent.iterdir()) == ["answer.so", "manifest.json"]


@wide
def test_the_notice_goes_to_stderr_with_the_time_it_takes(tmp_path, libraries, capsys, monkeypatch):
    monkeypatch.setattr(module, "parallel_jobs", lambda runs: 2)
    build(recipe(write_source(tmp_path), find_cxx(), title="CPU kernels", effort=7.0))
    printed = capsys.readouterr()
    text = f"qtensor: compiling its CPU kernels (once, 4 to 8 s; cached in {libraries})\n"
    assert (printed.out, printed.err) == ("", text)


@wide
def test_one_source_with_several_flags(tmp_path):
    source = write_source(tmp_path, 'extern "C" int NAME() { return VALUE; }')
    values = {"answer": 1, "other": 2}
    units = tuple(Unit(source, (f"-DNAME={n}", f"-DVALUE={v}"), n) for n, v in values.items())
    library = ctypes.CDLL(str(build(BuildSpec("several", units, find_cxx()))))
    assert (library.answer(), library.other()) == (1, 2)


@wide
def test_the_library_is_open_to_other_users_of_the_cache(tmp_path):
    umask = os.umask(0o022)
    try:
        path = build(recipe(write_source(tmp_path), find_cxx()))
    finally:
        os.umask(umask)
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (path.parent, path)]
    assert modes == [0o755, 0o755]


# ------------------------------------------------------------------------------------ the key


def with_header(tmp_path):
    header = tmp_path / "answer.h"
    header.write_text("#define ANSWER 42\n")
    source = write_source(tmp_path, '#include "answer.h"\nextern "C" int answer() {return ANSWER;}')
    return recipe(source, find_cxx(), "-O1", headers=(header,))


def changed_compiler(asked, **change):
    return dataclasses.replace(asked, compiler=dataclasses.replace(asked.compiler, **change))


def changed_unit(asked, **change):
    return dataclasses.replace(asked, units=(dataclasses.replace(asked.units[0], **change),))


CHANGES = {
    "flag": lambda asked: changed_unit(asked, flags=("-O2",)),
    "unit name": lambda asked: changed_unit(asked, name="same"),
    "another unit": lambda asked: dataclasses.replace(
        asked, units=(*asked.units, Unit(asked.units[0].source, ("-Danswer=b",), "b"))
    ),
    "link flag": lambda asked: dataclasses.replace(asked, link_flags=("-lm",)),
    "no header": lambda asked: dataclasses.replace(asked, headers=()),
    "name": lambda asked: dataclasses.replace(asked, name="other"),
}


@wide
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_another_library(tmp_path, change):
    asked = with_header(tmp_path)
    build(asked)
    assert library_path(change(asked)) != library_path(asked)
    assert not is_built(change(asked))


@wide
@pytest.mark.parametrize(
    "change", [{"version": "other 2.0"}, {"path": "/other/c++"}, {"arguments": ("-m64",)}], ids=str
)
def test_another_compiler_finds_the_same_library(tmp_path, change):
    asked = with_header(tmp_path)
    path = build(asked)
    assert build(changed_compiler(asked, **change)) == path


@wide
def test_a_built_library_needs_no_compiler(tmp_path):
    def no_compiler():
        raise CompilerNotFound("C++ compiler: there is none")

    asked = with_header(tmp_path)
    without = dataclasses.replace(asked, compiler=no_compiler)
    with pytest.raises(CompilerNotFound):
        build(without)
    path = build(dataclasses.replace(asked, compiler=find_cxx))
    assert is_built(without)
    assert build(without) == library_path(without) == path


@wide
def test_rebuild_replaces_the_library_of_another_compiler(tmp_path):
    compiler = script(tmp_path)
    asked = recipe(write_source(tmp_path), compiler)
    path = build(asked)
    count = len(runs(tmp_path))
    assert rebuild(asked) is None, "the same compiler makes the same library"
    assert len(runs(tmp_path)) == count
    assert rebuild(changed_compiler(asked, version="script 2.0")) == path
    assert len(runs(tmp_path)) == 2 * count
    assert answer(path) == 42


@pytest.mark.parametrize("file", ["answer.cpp", "answer.h"])
def test_a_changed_file_is_built_anew_and_the_old_stays(tmp_path, file):
    asked = with_header(tmp_path)
    old = build(asked)
    text = (tmp_path / file).read_text()
    (tmp_path / file).write_text(text.replace("ANSWER 42", "ANSWER 43") + "// changed\n")
    assert not is_built(asked)
    assert build(asked) != old
    assert old.exists()
    assert answer(build(asked)) == (43 if file == "answer.h" else 42)


@wide
@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [(module, "BUILD_ABI", -1), (module.platform, "machine", lambda: "riscv64")],
    ids=["abi", "machine"],
)
def test_what_is_not_in_the_recipe_counts_too(tmp_path, monkeypatch, owner, name, value):
    asked = with_header(tmp_path)
    before = library_path(asked)
    monkeypatch.setattr(owner, name, value)
    assert library_path(asked) != before


@wide
def test_equal_contents_elsewhere_are_the_same_library(tmp_path):
    first = with_header(tmp_path)
    (tmp_path / "copy").mkdir()
    second = with_header(tmp_path / "copy")
    told = dataclasses.replace(second, title="other words", effort=3.0)
    assert library_path(first) == library_path(second) == library_path(told)


@wide
def test_a_source_that_is_not_there(tmp_path):
    asked = recipe(tmp_path / "gone.cpp", find_cxx())
    with pytest.raises(BuildError, match=r"sources and headers must be readable; got .*gone\.cpp"):
        build(asked)


def test_a_file_of_the_package_that_is_not_there(tmp_path):
    """Only an installation of qtensor brings back a file of its own, in whatever folder it is."""
    gone = sources.FOLDER / "gone.h"
    asked = recipe(write_source(tmp_path), script(tmp_path), headers=(gone,))
    with pytest.raises(BuildError, match=r"got .*gone\.h.*Install qtensor again"):
        module.source_key(asked)


@wide
def test_a_source_that_changes_while_it_compiles(tmp_path, libraries):
    compiler = script(tmp_path, 'echo "// changed" >>"$here/answer.cpp"')
    with pytest.raises(BuildError, match="sources must not change while they compile"):
        build(recipe(write_source(tmp_path), compiler))
    assert entries(libraries) == []


@pytest.mark.parametrize(
    ("name", "units", "rule"),
    [
        ("answer", [], "at least one unit"),
        ("answer", ["a", "a"], "each unit has its own name"),
        ("../answer", ["a"], "names are letters"),
        ("answer", ["a/b"], "names are letters"),
        ("answer", ["-o"], "names are letters"),
        ("answer", [""], "names are letters"),
    ],
)
def test_a_bad_recipe(tmp_path, name, units, rule):
    listed = tuple(Unit(tmp_path / "answer.cpp", (), unit) for unit in units)
    with pytest.raises(QTensorError, match=rule):
        BuildSpec(name, listed, Compiler("/usr/bin/c++", "1.0"))


# ------------------------------------------------------------------------------------ at once


@wide
def test_processes_at_the_same_time_build_once(tmp_path, libraries):
    source, compiler = write_source(tmp_path), script(tmp_path, waiting("go"))
    told = [tmp_path / f"told{i}" for i in range(3)]
    processes = [start(source, compiler, t) for t in told]
    # The compiler waits until one process compiles and the others wait for it.
    wait_for(lambda: all(t.exists() and t.read_text() for t in told))
    (tmp_path / "go").touch()

    assert {finish(p) for p in processes} == {library_path(recipe(source, compiler))}
    assert len(runs(tmp_path)) == 2
    texts = sorted(t.read_text() for t in told)
    assert texts[0].startswith("qtensor: compiling its native code (once")
    assert texts[1:] == ["qtensor: waiting for another process that compiles its native code\n"] * 2


@wide
def test_threads_at_the_same_time_build_once(tmp_path):
    source = write_source(tmp_path)
    asked = recipe(source, script(tmp_path, waiting("go")))
    told, paths = [], []
    threads = [
        threading.Thread(target=lambda: paths.append(build(asked, notice=told.append)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(told) == 3)
    (tmp_path / "go").touch()
    for thread in threads:
        thread.join(SECONDS)
    assert paths == [library_path(asked)] * 3
    assert len(runs(tmp_path)) == 2


@wide
def test_a_killed_build_leaves_no_library(tmp_path, libraries):
    source, compiler = write_source(tmp_path), script(tmp_path, waiting("go"))
    process = start(source, compiler, tmp_path / "told")
    wait_for(lambda: runs(tmp_path))
    process.kill()
    process.finish()

    asked = recipe(source, compiler)
    assert not is_built(asked)
    assert list_built() == ()
    (tmp_path / "go").touch()
    assert answer(build(asked)) == 42


SLOW_START = """
import subprocess, time
start = subprocess.Popen.__init__
subprocess.Popen.__init__ = lambda *a, **k: (start(*a, **k), time.sleep(1))[0]
"""


@wide
@pytest.mark.parametrize("before", ["", SLOW_START], ids=["running", "starting"])
def test_an_interrupted_build_leaves_nothing(tmp_path, libraries, before):
    body = f'echo $$ >"$here/pid"\n{waiting("go")}'
    process = start(write_source(tmp_path), script(tmp_path, body), tmp_path / "told", before)
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    os.kill(process.pid, signal.SIGINT)

    assert "KeyboardInterrupt" in process.finish().stderr
    assert entries(libraries) == []
    wait_for(lambda: not is_running(int((tmp_path / "pid").read_text())))


@wide
def test_a_library_that_another_process_put_there_first(tmp_path, monkeypatch):
    """Without a lock that works (some network drives) two may build; the first one in place
    stays.
    """
    asked = recipe(write_source(tmp_path), find_cxx())
    entry = library_path(asked).parent
    compile_, first = module._compile, []

    def compile_late(*args):
        compile_(*args)
        with monkeypatch.context() as patch:
            patch.setattr(module, "_compile", compile_)
            key = entry.name.removeprefix("answer-")
            module._make(asked, key, entry, find_cxx(), first.append)
        first.append(library_path(asked).stat().st_ino)

    monkeypatch.setattr(module, "_compile", compile_late)
    assert build(asked).stat().st_ino == first[-1]
    assert len(list_built()) == 1


@wide
def test_a_library_that_was_cut_short_is_built_again(tmp_path):
    asked = recipe(write_source(tmp_path), find_cxx())
    path = build(asked)
    path.write_bytes(path.read_bytes()[:100])
    assert not is_built(asked)
    assert answer(build(asked)) == 42


@pytest.mark.parametrize("text", ["", "[1]", "{}", "\xff"])
def test_a_manifest_that_says_nothing(tmp_path, text):
    asked = recipe(write_source(tmp_path), find_cxx())
    path = build(asked)
    (path.parent / "manifest.json").write_text(text, encoding="latin1")
    assert not is_built(asked)
    assert build(asked) == path
    assert is_built(asked)


@wide
def test_old_temporary_folders_are_removed(tmp_path, libraries):
    for name, age in {".making-old": 25, ".making-young": 23, "other": 99}.items():
        (libraries / name).mkdir(parents=True)
        (libraries / name / "file").touch()
        then = time.time() - age * 3600
        os.utime(libraries / name, (then, then))
    path = build(recipe(write_source(tmp_path), find_cxx()))
    assert entries(libraries) == sorted([".making-young", "other", path.parent.name])
