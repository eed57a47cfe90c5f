"""The reference gives the same bytes, with one warning, if native kernels cannot be built."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler_scripts import SECONDS, runs, script, wait_for, waiting
from filelock import FileLock, Timeout
from native_cases import by_reference
from torch_process import TorchProcess

import qtensor
from qtensor.build.cache import build, seconds
from qtensor.build.compilers import find_cxx
from qtensor.kernels.cpu import sources, structs

wide = pytest.mark.nightly(reason="processes and compilers; the default tier has two of them")


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills and locks as Linux has them")

FORMATS = ("fp8", "mxfp8", "nvfp4")
PROGRAM = f"""
import json, sys, warnings
import torch, qtensor
from qtensor.kernels.cpu import native

x = torch.linspace(-3, 3, 512).reshape(8, 64)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    tensors = [qtensor.quantize(x, name) for name in {FORMATS}]
    values = [q.dequantize().tolist() for q in tensors]
json.dump(
    {{
        "bytes": [[b.view(torch.uint8).flatten().tolist() for b in q.buffers()] for q in tensors],
        "values": values,
        "warnings": [[w.category.__name__, str(w.message)] for w in caught],
        "native": not isinstance(native.library(), str),
    }},
    sys.stdout,
)
"""


@functools.cache
def wanted() -> dict[str, Any]:
    """What every process has to compute."""
    x = torch.linspace(-3, 3, 512).reshape(8, 64)
    made = []
    for name in FORMATS:
        codec = qtensor.quantizer(name)
        buffers = by_reference(codec, x)
        named = dict(zip([s.name for s in codec.slots], buffers, strict=True))
        made.append((buffers, codec.decode(named, (8, 64))))
    return {
        "bytes": [[b.view(torch.uint8).flatten().tolist() for b in buffers] for buffers, _ in made],
        "values": [values.tolist() for _, values in made],
    }


def start(folder: Path, **environment: str) -> TorchProcess:
    """The program in a process of its own, with a cache and temporary files of its own."""
    (folder / "temporary").mkdir(exist_ok=True)
    names = ("QTENSOR_NATIVE", "QTENSOR_CPU_ISA", "QTENSOR_CXX", "CXX")
    given = {k: v for k, v in os.environ.items() if k not in names}
    given |= {"QTENSOR_CACHE_DIR": str(folder / "cache"), "TMPDIR": str(folder / "temporary")}
    return TorchProcess(PROGRAM, environment=given | environment)


def finish(process: TorchProcess) -> dict[str, Any]:
    """What the program said; its bytes and values are right, whoever computed them."""
    done = process.finish()
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {name: told.pop(name) for name in ("bytes", "values")} == wanted()
    return told | {"stderr": done.stderr}


def falls_back(folder: Path, *reasons: str, **environment: str) -> None:
    """One RuntimeWarning, with these texts, and the bytes of the reference."""
    told = finish(start(folder, **environment))
    assert not told["native"]
    (category, text), *more = told["warnings"]
    assert not more
    assert category == "RuntimeWarning"
    assert text.startswith("qtensor runs without its native CPU kernels (same bytes, many times")
    for reason in reasons:
        assert reason in text


@pytest.fixture(scope="session")
def real_library() -> Path:
    """Return the library of this CPU's kernels, which the fake compilers copy to save time."""
    return build(sources.build_spec(sources.choose_isa()))


def copier(folder: Path, library: Path, before: str = "") -> Path:
    """A compiler whose objects are empty and whose library is that one."""
    body = (
        'for word; do [ "$previous" = -o ] && out=$word; previous=$word; done\n'
        f"{before}\n"
        f'case "$*" in *-shared*) cp {shlex.quote(str(library))} "$out";; *) echo >"$out";; esac\n'
        "exit"
    )
    return script(folder, body)


def test_one_notice_has_the_time_of_all_that_a_call_compiles(
    tmp_path: Path, real_library: Path
) -> None:
    """The call waits for the kernels and the C++ ops."""
    compiler = copier(tmp_path, real_library)
    told = finish(start(tmp_path, QTENSOR_CXX=str(compiler), QTENSOR_BACKGROUND="0"))
    kernels, ops = sources.build_spec(sources.choose_isa()), sources.ops_build_spec()
    assert len(runs(tmp_path)) == len(kernels.units) + len(ops.units) + 2
    (notice,) = told["stderr"].splitlines()
    assert f"its native CPU kernels (once, {seconds(kernels)};" in notice
    assert (kernels.effort, ops.effort) == (65.0, 0.0)


# ---- no compiler -------------------------------------------------------------------------------


def test_no_compiler(tmp_path: Path) -> None:
    falls_back(
        tmp_path,
        "a compiler must be on PATH or in QTENSOR_CXX",
        "QTENSOR_CXX='/nonexistent': no program of that name",
        "apt install g++",
        QTENSOR_CXX="/nonexistent",
    )


@wide
def test_a_compiler_that_fails(tmp_path: Path) -> None:
    """Its own words reach the user, and the second call does not run it again."""
    broken = script(tmp_path, 'echo "fatal error: no such thing" >&2; exit 3')
    falls_back(
        tmp_path,
        "must compile; got exit status 3",
        "fatal error: no such thing",
        QTENSOR_CXX=str(broken),
    )
    assert 1 <= len(runs(tmp_path)) <= len(sources.build_spec("baseline").units)


@wide
def test_a_library_that_does_not_load(tmp_path: Path) -> None:
    """Undefined symbols are found by the loader, not by the compiler."""
    source = tmp_path / "half.cpp"
    source.write_text('extern "C" int missing(); extern "C" int qt_abi() { return missing(); }\n')
    falls_back(tmp_path, "undefined symbol", QTENSOR_CXX=str(stub(tmp_path, source, "-Wl,-z,now")))


@wide
@pytest.mark.parametrize("text", ["int nothing;", 'extern "C" int qt_abi() { return ABI; }'])
def test_a_library_without_symbols(tmp_path: Path, text: str) -> None:
    """A foreign file has the right name: loading the library looks every function up."""
    source = tmp_path / "foreign.cpp"
    abi = structs.ABI * 1000 + ctypes.sizeof(structs.CQuantizer)
    source.write_text(text.replace("ABI", str(abi)) + "\n")
    compiler = stub(tmp_path, source)
    falls_back(tmp_path, "is not a library of CPU kernels", QTENSOR_CXX=str(compiler))


@wide
def test_a_library_that_only_another_compiler_can_make(tmp_path: Path, real_library: Path) -> None:
    """What a machine with another C++ runtime has left in a shared home is replaced, once."""
    source = tmp_path / "newer.cpp"
    source.write_text('extern "C" int missing(); extern "C" int qt_abi() { return missing(); }\n')
    (tmp_path / "other").mkdir()
    falls_back(tmp_path, QTENSOR_CXX=str(stub(tmp_path, source, "-Wl,-z,now")))
    (manifest,) = (tmp_path / "cache").rglob("cpu_*/manifest.json")
    facts = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(facts | {"compiler": "newer 99.0"}))
    falls_back(tmp_path, "undefined symbol", "cannot be compiled again", QTENSOR_CXX="/nonexistent")
    compiler = copier(tmp_path / "other", real_library)
    for _ in range(2):
        told = finish(start(tmp_path, QTENSOR_CXX=str(compiler)))
        assert (told["native"], told["warnings"]) == (True, [])
    assert sum("-shared" in run for run in runs(tmp_path / "other")) == 1


@wide
def test_a_library_of_another_interface(tmp_path: Path) -> None:
    source = tmp_path / "old.cpp"
    source.write_text('extern "C" int qt_abi() { return 7; }\n')
    expected = (
        f"has interface 7, this qtensor {structs.ABI * 1000 + ctypes.sizeof(structs.CQuantizer)}"
    )
    falls_back(tmp_path, expected, QTENSOR_CXX=str(stub(tmp_path, source)))


def stub(folder: Path, source: Path, *flags: str) -> Path:
    """A compiler that makes its library from that source, whatever it is given."""
    library = folder / "stub.so"
    cxx = [*find_cxx().command, "-shared", "-fPIC", *flags, str(source), "-o", str(library)]
    subprocess.run(cxx, check=True, timeout=SECONDS)
    return copier(folder, library)


# ---- switches ----------------------------------------------------------------------------------


@wide
def test_switched_off(tmp_path: Path) -> None:
    """Nothing is compiled, and nothing said: the user asked for it."""
    compiler = script(tmp_path)
    told = finish(start(tmp_path, QTENSOR_NATIVE="0", QTENSOR_CXX=str(compiler)))
    assert (told["native"], told["warnings"], told["stderr"]) == (False, [], "")
    assert runs(tmp_path) == []
    assert not (tmp_path / "cache").exists()


@wide
@pytest.mark.parametrize("isa", ["avx1024", "", "AVX2"])
def test_an_unknown_instruction_set(tmp_path: Path, isa: str) -> None:
    falls_back(
        tmp_path,
        "QTENSOR_CPU_ISA: it must name an instruction set of this CPU",
        "baseline",
        f"got {isa!r}",
        "Unset it to take the best",
        QTENSOR_CPU_ISA=isa,
        QTENSOR_CXX="/nonexistent",
    )


@wide
def test_the_instruction_set_that_is_asked_for(tmp_path: Path, real_library: Path) -> None:
    """Its flags reach the compiler and its name the cache."""
    told = finish(
        start(tmp_path, QTENSOR_CPU_ISA="baseline", QTENSOR_CXX=str(copier(tmp_path, real_library)))
    )
    assert told["native"]
    assert any("-DQT_ISA=0" in run for run in runs(tmp_path))
    assert not any("-mavx" in run for run in runs(tmp_path))
    built = sorted(p.name for p in (tmp_path / "cache").rglob("*.so"))
    assert built == ["cpu_baseline.so", "ops.so"]


# ---- the cache ---------------------------------------------------------------------------------


@wide
def test_a_cache_that_cannot_be_written(tmp_path: Path, real_library: Path) -> None:
    """A file in its place stops root, too. The kernels go to a private folder and serve."""
    (tmp_path / "cache").touch()
    told = finish(start(tmp_path, QTENSOR_CXX=str(copier(tmp_path, real_library))))
    assert told["native"]
    ((category, text),) = told["warnings"]
    assert category == "RuntimeWarning"
    assert f"cannot write its cache {tmp_path / 'cache'}" in text
    assert len(list((tmp_path / "temporary").rglob("cpu_*.so"))) == 1
    again = finish(start(tmp_path, QTENSOR_CXX=str(tmp_path / "cxx")))
    assert (again["native"], again["warnings"]) == (True, [])


@wide
def test_a_read_only_folder(tmp_path: Path, real_library: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    if os.access(tmp_path / "cache", os.W_OK):
        pytest.skip(reason="this user, root perhaps, may write to read-only folders")
    told = finish(start(tmp_path, QTENSOR_CXX=str(copier(tmp_path, real_library))))
    assert told["native"]
    assert [w[0] for w in told["warnings"]] == ["RuntimeWarning"]


@wide
def test_neither_cache_nor_temporary_folder(tmp_path: Path, real_library: Path) -> None:
    (tmp_path / "cache").touch()
    (tmp_path / "temporary").mkdir()
    (tmp_path / "temporary" / f"qtensor-{os.geteuid()}").touch()
    falls_back(tmp_path, "Set QTENSOR_CACHE_DIR", QTENSOR_CXX=str(copier(tmp_path, real_library)))


@wide
def test_a_process_killed_while_it_builds(tmp_path: Path, real_library: Path) -> None:
    """The next one builds from the start, computes right and leaves one whole library."""
    compiler = copier(tmp_path, real_library, waiting("go"))
    killed = start(tmp_path, QTENSOR_CXX=str(compiler))
    try:
        wait_for(lambda: runs(tmp_path))
    finally:
        killed.kill()
        killed.finish()
    assert not list((tmp_path / "cache").rglob("cpu_*.so"))
    (tmp_path / "go").touch()
    told = finish(start(tmp_path, QTENSOR_CXX=str(compiler)))
    assert (told["native"], told["warnings"]) == (True, [])
    assert len(list((tmp_path / "cache" / "libraries").glob("cpu_*/cpu_*.so"))) == 1


@wide
def test_two_processes_build_once(tmp_path: Path, real_library: Path) -> None:
    """The second waits, says so and loads what the first made."""
    compiler = copier(tmp_path, real_library, waiting("go"))
    first = start(tmp_path, QTENSOR_CXX=str(compiler))
    wait_for(lambda: runs(tmp_path))
    second = start(tmp_path, QTENSOR_CXX=str(compiler))
    wait_for(lambda: "\n" in second.stderr())
    heard = second.stderr().splitlines()[0]
    assert heard == "qtensor: waiting for another process that compiles its native CPU kernels"
    (tmp_path / "go").touch()
    assert all(finish(process)["native"] for process in (first, second))
    specs = [sources.build_spec(sources.choose_isa()), sources.ops_build_spec()]
    assert len(runs(tmp_path)) == sum(len(spec.units) + 1 for spec in specs)


@pytest.mark.parametrize("variables", [{}, {"PATH": "/nonexistent"}], ids=["variable", "path"])
def test_a_built_cache_needs_no_compiler(
    tmp_path: Path, real_library: Path, variables: dict[str, str]
) -> None:
    """An image is built with a compiler, and runs without one or with a newer one."""
    assert finish(start(tmp_path, QTENSOR_CXX=str(copier(tmp_path, real_library))))["native"]
    without = variables or {"QTENSOR_CXX": "/nonexistent"}
    told = finish(start(tmp_path, **without))
    assert (told["native"], told["warnings"], told["stderr"]) == (True, [], "")


@wide
@pytest.mark.parametrize("damage", ["cut", "zeros"])
def test_a_damaged_library_is_built_again(tmp_path: Path, real_library: Path, damage: str) -> None:
    compiler = copier(tmp_path, real_library)
    assert finish(start(tmp_path, QTENSOR_CXX=str(compiler)))["native"]
    (built,) = (tmp_path / "cache").rglob("cpu_*.so")
    count = len(runs(tmp_path))
    if damage == "cut":
        with built.open("r+b") as file:
            file.truncate(100)
    else:
        built.write_bytes(bytes(built.stat().st_size))
    told = finish(start(tmp_path, QTENSOR_CXX=str(compiler)))
    assert (told["native"], told["warnings"]) == (True, [])
    units = sources.build_spec(sources.choose_isa()).units
    assert len(runs(tmp_path)) == count + len(units) + 1


# ---- in the background -------------------------------------------------------------------------

NOTICE = (
    "qtensor: compiling CPU kernels, some seconds in each new kind of call until all are compiled "
)
HOLD = (
    f'case "$*" in *QT_PIECE*|*piece_*) ;; *) echo $PPID >"$here/builder"; {waiting("go")};; esac'
)
"""Lines of a compiler that makes pieces at once, and the library when a file appears."""
SWITCHING = """
import time, torch, qtensor
from qtensor.kernels.cpu import native

x = torch.linspace(-3, 3, 512).reshape(8, 64)
first = qtensor.quantize(x, "mxfp8").buffers()
assert not isinstance(native.library(), (str, native.Library))
print("compiled", flush=True)
while not isinstance(native.library(), native.Library):
    time.sleep(0.02)
assert all(map(torch.equal, first, qtensor.quantize(x, "mxfp8").buffers()))
"""
"""Asserts that the library replaces the pieces in a process that runs."""


def library_is_built(folder: Path) -> bool:
    """Whether the process in the background has done all that it does."""
    libraries = folder / "cache" / "libraries"
    built = {f"cpu_{sources.choose_isa()}.so", "ops.so"}
    with contextlib.suppress(Timeout, FileNotFoundError):  # It may be removing the pieces.
        if {path.name for path in libraries.glob("*/*.so")} == built:
            with FileLock(libraries / "background.lock", timeout=0):
                return True
    return False


def test_the_first_call_compiles_a_piece(tmp_path: Path, real_library: Path) -> None:
    """One notice; the library follows, also when the process has ended, and replaces the pieces."""
    compiler = copier(tmp_path, real_library, HOLD)
    told = finish(start(tmp_path, QTENSOR_CXX=str(compiler), QTENSOR_BACKGROUND="1"))
    assert (told["native"], told["warnings"]) == (True, [])
    assert told["stderr"].startswith(NOTICE)
    assert told["stderr"].count("\n") == 1
    assert len(list((tmp_path / "cache").rglob("piece_*.so"))) == 2 * len(FORMATS)
    (tmp_path / "go").touch()
    wait_for(lambda: library_is_built(tmp_path))
    assert finish(start(tmp_path, QTENSOR_CXX="/nonexistent", QTENSOR_BACKGROUND="1")) == {
        "native": True,
        "warnings": [],
        "stderr": "",
    }


@wide
def test_the_library_replaces_the_pieces(tmp_path: Path, real_library: Path) -> None:
    compiler = copier(tmp_path, real_library, HOLD)
    given = {"QTENSOR_CACHE_DIR": str(tmp_path / "cache"), "QTENSOR_CXX": str(compiler)}
    process = TorchProcess(SWITCHING, environment=os.environ | given | {"QTENSOR_BACKGROUND": "1"})
    wait_for(lambda: process.stdout() == "compiled\n")
    (tmp_path / "go").touch()
    done = process.finish()
    assert done.returncode == 0, done.stderr
    wait_for(lambda: library_is_built(tmp_path))


@wide
@pytest.mark.parametrize("background", ["0", "1"])
def test_kernels_without_the_ops(tmp_path: Path, real_library: Path, background: str) -> None:
    """An older version left them in the cache, with ops of other sources: the ops are built."""
    variables = {"QTENSOR_CXX": str(copier(tmp_path, real_library))}
    assert finish(start(tmp_path, **variables))["native"]
    (ops,) = (tmp_path / "cache").rglob("ops.so")
    shutil.rmtree(ops.parent)
    told = finish(start(tmp_path, QTENSOR_BACKGROUND=background, **variables))
    assert (told["native"], told["warnings"]) == (True, [])
    wait_for(lambda: library_is_built(tmp_path))
    told = finish(start(tmp_path, QTENSOR_CXX="/nonexistent"))
    assert (told["native"], told["stderr"]) == (True, "")


@wide
def test_the_process_in_the_background_is_killed(tmp_path: Path, real_library: Path) -> None:
    """The pieces serve, nothing broken is left, and the next process compiles the library."""
    compiler = copier(tmp_path, real_library, HOLD)
    variables = {"QTENSOR_CXX": str(compiler), "QTENSOR_BACKGROUND": "1"}
    assert finish(start(tmp_path, **variables))["native"]
    wait_for(lambda: (tmp_path / "builder").exists())
    os.kill(int((tmp_path / "builder").read_text()), signal.SIGKILL)
    assert not list((tmp_path / "cache").rglob("cpu_*.so"))
    (tmp_path / "go").touch()
    assert finish(start(tmp_path, **variables))["native"]
    wait_for(lambda: library_is_built(tmp_path))


@wide
def test_processes_at_once_build_the_library_once(tmp_path: Path, real_library: Path) -> None:
    compiler = copier(tmp_path, real_library, HOLD)
    variables = {"QTENSOR_CXX": str(compiler), "QTENSOR_BACKGROUND": "1"}
    for process in [start(tmp_path, **variables) for _ in range(3)]:
        assert finish(process)["native"]
    wait_for(lambda: (tmp_path / "builder").exists())
    (tmp_path / "go").touch()
    wait_for(lambda: library_is_built(tmp_path))
    linked = [run for run in runs(tmp_path) if "-shared" in run]
    assert len(linked) == 2 * len(FORMATS) + 2


@wide
def test_a_piece_that_does_not_compile(tmp_path: Path) -> None:
    """As without a compiler: one warning, and the reference serves."""
    broken = script(tmp_path, 'echo "fatal error: no such thing" >&2; exit 3')
    falls_back(
        tmp_path,
        "must compile; got exit status 3",
        QTENSOR_CXX=str(broken),
        QTENSOR_BACKGROUND="1",
    )


@wide
@pytest.mark.parametrize("variables", [{"QTENSOR_CXX": "/nonexistent"}, {"QTENSOR_NATIVE": "0"}])
def test_nothing_in_the_background(tmp_path: Path, variables: dict[str, str]) -> None:
    told = finish(start(tmp_path, QTENSOR_BACKGROUND="1", **variables))
    assert not told["native"]
    assert not (tmp_path / "cache").exists()
