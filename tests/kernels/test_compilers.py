"""Which compiler is found, how many run at once, and what happens when one fails or hangs."""

import shutil

import pytest
from compiler_scripts import (
    entries,
    is_running,
    recipe,
    runs,
    script,
    wait_for,
    waiting,
    write_source,
)

from qtensor.build import compilers
from qtensor.build.cache import BuildSpec, Unit, build
from qtensor.build.compilers import Compiler, find_cxx, parallel_jobs
from qtensor.core.errors import BuildError, CompilerNotFound, QTensorError

GIB = 1 << 30


pytestmark = pytest.mark.usefixtures("libraries")


def write_program(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


# ------------------------------------------------------------------------------------ which one


def test_the_found_compiler_tells_its_version():
    found = find_cxx()
    assert shutil.which(found.path) == found.path
    assert any(c.isdigit() for c in found.version)


def test_the_librarys_own_variable_comes_first(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(script(tmp_path, name="general")))
    assert find_cxx() == Compiler(str(tmp_path / "general"), "script 1.0")
    monkeypatch.setenv("QTENSOR_CXX", str(script(tmp_path, name="own")))
    assert find_cxx() == Compiler(str(tmp_path / "own"), "script 1.0")


def test_an_empty_variable_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(script(tmp_path)))
    monkeypatch.setenv("QTENSOR_CXX", " ")
    assert find_cxx().path == str(tmp_path / "cxx")


def test_a_variable_may_hold_arguments(tmp_path, monkeypatch):
    write_program(tmp_path / "launcher", 'exec "$@"')
    inner = script(tmp_path, name="with space")
    monkeypatch.setenv("CXX", f"{tmp_path / 'launcher'} '{inner}'")
    found = find_cxx()
    assert found == Compiler(str(tmp_path / "launcher"), "script 1.0", (str(inner),))
    assert build(recipe(write_source(tmp_path), found)).exists()


def test_a_path_with_spaces_is_one_word(tmp_path, monkeypatch):
    monkeypatch.setenv("QTENSOR_CXX", str(script(tmp_path, name="with space")))
    assert find_cxx().path == str(tmp_path / "with space")


def test_names_on_the_path_are_tried_in_turn(tmp_path, monkeypatch):
    for variable in ("QTENSOR_CXX", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    write_program(tmp_path / "c++", "exit 1")
    write_program(tmp_path / "g++", "echo 'g++ 12.2'")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_cxx() == Compiler(str(tmp_path / "g++"), "g++ 12.2")


def test_no_compiler_at_all(tmp_path, monkeypatch):
    for variable in ("QTENSOR_CXX", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerNotFound, match=r"c\+\+: no program .*; clang\+\+: .*Install one"):
        find_cxx()


@pytest.mark.parametrize(
    ("body", "limit", "reason"),
    [
        ("exit 1", 60.0, "ended with status 1"),
        ("printf '\\377\\000\\033 garbage'", 60.0, "names no version"),
        ("exit 0", 60.0, "names no version"),
        ("exec sleep 600", 0.25, "gave no version within 0.25 s"),
    ],
    ids=["fails", "garbage", "silent", "hangs"],
)
def test_a_broken_compiler_in_a_variable_is_refused(tmp_path, monkeypatch, body, limit, reason):
    monkeypatch.setattr(compilers, "_VERSION_TIME_LIMIT", limit)
    monkeypatch.setenv("QTENSOR_CXX", str(write_program(tmp_path / "broken", body)))
    with pytest.raises(CompilerNotFound, match=f"QTENSOR_CXX='.*broken': .*{reason}"):
        find_cxx()


@pytest.mark.parametrize("value", ["/no/such/compiler", "'unclosed", "/", '""'])
def test_a_variable_that_names_no_program(monkeypatch, value):
    monkeypatch.setenv("QTENSOR_CXX", value)
    with pytest.raises(CompilerNotFound, match="no program of that name"):
        find_cxx()


def test_a_file_that_is_no_program(tmp_path, monkeypatch):
    (tmp_path / "text").write_bytes(b"\x00\x01")
    (tmp_path / "text").chmod(0o755)
    monkeypatch.setenv("QTENSOR_CXX", str(tmp_path / "text"))
    with pytest.raises(CompilerNotFound, match="does not start"):
        find_cxx()


def test_one_except_catches_every_failure():
    assert issubclass(CompilerNotFound, BuildError)
    assert issubclass(BuildError, QTensorError)


# ------------------------------------------------------------------------------------ how many


@pytest.mark.parametrize(
    ("units", "processors", "free", "jobs"),
    [
        (6, 4, 64 * GIB, 4),
        (3, 4, 64 * GIB, 3),
        (6, 4, 2 * GIB + 1, 2),
        (6, 4, 0, 1),
        (6, 4, -GIB, 1),
        (6, 4, None, 4),
    ],
)
def test_jobs(monkeypatch, units, processors, free, jobs):
    monkeypatch.setattr(compilers, "_processors", lambda: processors)
    monkeypatch.setattr(compilers, "_free_memory", lambda: free)
    assert parallel_jobs(units) == jobs


def test_the_machine_is_read():
    assert compilers._processors() >= 1
    free = compilers._free_memory()
    assert free is None or free > 0


# Each unit waits for the other's start: built one after the other, they would never end well.
TOGETHER = """
for last; do :; done
if [ "$1" != -shared ]; then
    touch "$last.started"; n=0
    while [ "$(ls *.started | wc -l)" -lt 2 ]; do
        sleep 0.02; n=$((n + 1)); [ $n -lt 3000 ] || exit 1
    done
fi
"""


def test_units_compile_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(compilers, "_processors", lambda: 2)
    monkeypatch.setattr(compilers, "_free_memory", lambda: None)
    compiler = Compiler(str(script(tmp_path, TOGETHER)), "1.0")
    source = write_source(tmp_path, 'extern "C" int NAME() { return 1; }')
    units = tuple(Unit(source, (f"-DNAME={name}",), name) for name in ("one", "two"))
    assert build(BuildSpec("both", units, compiler)).exists()


# ------------------------------------------------------------------------------------ failures


def test_a_compile_error(tmp_path, libraries):
    source = write_source(tmp_path, "int answer() {\n" + "    return unknown_name;\n" * 30 + "}")
    with pytest.raises(BuildError) as caught:
        build(recipe(source, find_cxx(), "-O1"))
    text = str(caught.value)
    rule, command, output, *lines = text.splitlines()
    assert rule.startswith("build[answer]: unit 'only' of answer.cpp must compile; got exit status")
    assert "set QTENSOR_CXX to another compiler." in rule
    assert command.startswith(f"  Command: {find_cxx().path} -fPIC -O1 -c {source} -o /")
    assert output == "  Output:"
    assert "answer.cpp:2" in lines[0]
    assert "error" in lines[0]
    assert "unknown_name" in lines[0]
    assert 1 < len(lines) <= 20
    assert entries(libraries) == []


def test_a_link_error(tmp_path, libraries):
    source = write_source(tmp_path, 'int missing(); extern "C" int answer() { return missing(); }')
    asked = recipe(source, find_cxx(), link_flags=("-Wl,-z,defs",))
    with pytest.raises(BuildError, match=r"the library must compile(.|\n)*missing"):
        build(asked)
    assert entries(libraries) == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("exit 3", "got exit status 3.*\n.*\n  Output: none"),
        ("printf '\\377\\033[31m x\\n'; exit 1", "\n    .\\?\\[31m x$"),
        ("head -c 3000000 /dev/zero | tr '\\0' x; exit 1", "\n    x{400}$"),
        ("exit 0", "got exit status 0 and no output file"),
        ("kill -9 $$", "got an end by signal 9"),
        (
            'while [ "$1" != -o ]; do shift; done; echo garbage >"$2"; exit',
            "must make a shared library; got a file that begins with b'garb'",
        ),
    ],
    ids=["fails", "garbage", "endless line", "does nothing", "killed", "writes garbage"],
)
def test_a_broken_compiler(tmp_path, libraries, body, message):
    with pytest.raises(BuildError, match=message):
        build(recipe(write_source(tmp_path), script(tmp_path, body)))
    assert entries(libraries) == []


def test_a_compiler_that_went_away(tmp_path, libraries):
    with pytest.raises(BuildError, match="got FileNotFoundError: "):
        build(recipe(write_source(tmp_path), tmp_path / "gone"))
    assert entries(libraries) == []


def test_a_compiler_that_hangs_is_stopped(tmp_path, libraries, monkeypatch):
    monkeypatch.setattr(compilers, "TIME_LIMIT", 1.0)
    # A driver that waits for the real compiler: both have to go.
    compiler = script(tmp_path, 'sleep 600 & echo $! >"$here/pid"; wait')
    with pytest.raises(BuildError, match="got no end within 1 s"):
        build(recipe(write_source(tmp_path), compiler))
    wait_for(lambda: not is_running(int((tmp_path / "pid").read_text())))
    assert entries(libraries) == []


def test_the_first_failure_stops_the_others(tmp_path, libraries, monkeypatch):
    monkeypatch.setattr(compilers, "_processors", lambda: 2)
    monkeypatch.setattr(compilers, "_free_memory", lambda: None)
    body = f"""
    case "$*" in
        *-DSLOW*) echo $$ >"$here/pid"; exec sleep 600 ;;
        *) {waiting("pid")}; exit 1 ;;
    esac"""
    compiler = Compiler(str(script(tmp_path, body)), "1.0")
    source = write_source(tmp_path)
    units = (Unit(source, ("-DSLOW",), "slow"), Unit(source, (), "bad"), Unit(source, (), "never"))
    with pytest.raises(BuildError, match="unit 'bad'"):
        build(BuildSpec("answer", units, compiler))
    wait_for(lambda: not is_running(int((tmp_path / "pid").read_text())))
    assert len(runs(tmp_path)) == 2, "the third unit never starts"
    assert entries(libraries) == []
