"""``qtensor kernels build | list | clean`` and ``qtensor.kernels``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch_process
from compiler_scripts import runs, script

pytest.importorskip("typer", reason="the extra 'cli' is not installed")

from typer.testing import CliRunner

import qtensor
from qtensor import cli
from qtensor.build import cache as cache
from qtensor.core.errors import BuildError
from qtensor.kernels.cpu import sources

COPY = (
    'for word; do [ "$previous" = -o ] && out=$word; previous=$word; done\n'
    'case "$*" in *-shared*) printf \'\\177ELF\' >"$out";; *) echo >"$out";; esac\n'
    "exit"
)
"""Lines of a compiler that makes nothing of use, at once."""

pytestmark = pytest.mark.usefixtures("libraries")

BUILT = 3
"""Libraries that a build makes: kernels, those of attention, and ops."""


@pytest.fixture(autouse=True)
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = script(tmp_path, COPY)
    monkeypatch.setenv("QTENSOR_CXX", str(path))
    monkeypatch.delenv("QTENSOR_CPU_ISA", raising=False)
    return path


def invoke(*args: str) -> Any:
    return CliRunner().invoke(cli.app, ["kernels", *args])


def fails(*args: str, status: int = 1) -> str:
    """What a mistake gives: a message on stderr, without a traceback."""
    done = invoke(*args)
    assert done.exit_code == status
    assert "Traceback" not in done.output
    assert "error: " in done.stderr
    return done.stderr


def test_build_says_where(libraries: Path) -> None:
    done = invoke("build")
    assert done.exit_code == 0, done.output
    best = sources.usable_isas()[0]
    (library,) = libraries.glob("cpu_*/*.so")
    assert library.name == f"cpu_{best}.so"
    assert done.stdout.startswith(f"{library} (")
    assert "compiling its native CPU kernels" in done.stderr


def test_build_again_compiles_nothing(tmp_path: Path) -> None:
    assert invoke("build", "--cpu").exit_code == 0
    count = len(runs(tmp_path))
    assert invoke("build").exit_code == 0
    assert len(runs(tmp_path)) == count


@pytest.mark.parametrize("isa", sources.ISAS)
def test_build_for_each_instruction_set(isa: str, libraries: Path) -> None:
    """One that this CPU lacks too: the cache may be another machine's."""
    assert invoke("build", "--isa", isa).exit_code == 0
    assert [p.name for p in libraries.glob("cpu_*/*.so")] == [f"cpu_{isa}.so"]


def test_build_for_an_unknown_instruction_set() -> None:
    text = fails("build", "--isa", "sse", status=2)
    assert "isa must be one of avx512, avx2, baseline; got 'sse'" in text


def test_build_with_a_wrong_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QTENSOR_CPU_ISA", "sse")
    assert "QTENSOR_CPU_ISA: it must name an instruction set of this CPU" in fails(
        "build", status=2
    )


def test_build_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QTENSOR_CXX", "/nonexistent")
    assert "a compiler must be on PATH or in QTENSOR_CXX" in fails("build")


def test_build_with_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = script(tmp_path, 'echo "error: no" >&2; exit 1', name="broken")
    monkeypatch.setenv("QTENSOR_CXX", str(broken))
    assert "must compile; got exit status 1" in fails("build")


def test_list_of_nothing() -> None:
    done = invoke("list")
    assert done.exit_code == 0
    assert "No kernels are built. Run: qtensor kernels build" in done.stdout


def test_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that are in use, current for another CPU, or built from other sources."""
    best = sources.usable_isas()[0]
    other = next(isa for isa in sources.ISAS if isa != best)
    for isa in (best, other):
        invoke("build", "--isa", isa)
    lines = [line.strip() for line in invoke("list").stdout.splitlines()]
    states = {
        line.split()[0]: line for line in lines if line.startswith(("cpu_", "attention_", "ops "))
    }
    assert "in use" in states["ops"]
    for name in ("cpu", "attention"):
        assert "in use" in states[f"{name}_{best}"]
        assert "current" in states[f"{name}_{other}"]
    assert any(line == f"cache: {tmp_path / 'cache'}" for line in lines)
    assert any(line == f"this CPU has: {', '.join(sources.usable_isas())}" for line in lines)
    monkeypatch.setattr(cache, "BUILD_ABI", -1)
    assert invoke("list").stdout.count("out of date") == 2 + BUILT


def test_list_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is built needs none."""
    invoke("build")
    monkeypatch.setenv("QTENSOR_CXX", "/nonexistent")
    done = invoke("list")
    assert done.exit_code == 0
    assert done.stdout.count("in use") == BUILT


def test_list_with_a_wrong_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """It still lists, and says what it cannot tell."""
    invoke("build")
    monkeypatch.setenv("QTENSOR_CPU_ISA", "sse")
    done = invoke("list")
    assert done.exit_code == 0
    assert "unknown" in done.stdout
    assert "QTENSOR_CPU_ISA: it must name an instruction set" in done.stdout


def test_clean(tmp_path: Path, libraries: Path) -> None:
    invoke("build")
    done = invoke("clean")
    assert done.exit_code == 0
    assert done.stdout == f"removed {BUILT} libraries, 0.0 MB, from {tmp_path / 'cache'}\n"
    assert not list(libraries.glob("*/*.so"))
    assert invoke("clean").stdout.startswith("removed 0 libraries")


def test_help() -> None:
    assert "Compile kernels now" in invoke("build", "--help").stdout
    done = invoke("--help")
    for command in ("build", "list", "clean"):
        assert command in done.stdout


# ---- from Python -------------------------------------------------------------------------------


def test_build_from_python(libraries: Path) -> None:
    path = qtensor.kernels.build("baseline")
    assert path.parent.parent == libraries
    assert path.name == "cpu_baseline.so"
    assert qtensor.kernels.build("baseline") == path


def test_build_from_python_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QTENSOR_CXX", "/nonexistent")
    with pytest.raises(BuildError, match="a compiler must be on PATH"):
        qtensor.kernels.build()


def test_build_from_python_of_what_there_is_not() -> None:
    with pytest.raises(qtensor.QTensorError, match=r"kernels.build: isa must be one of .*'sse'"):
        qtensor.kernels.build("sse")


def test_explain() -> None:
    """The process's own kernels answer, whatever the cache of this test."""
    mxfp8 = qtensor.quantizer("mxfp8")
    assert "(no kernels for meta)" in qtensor.kernels.explain(mxfp8, torch.float32, "meta")
    assert "(torch.float64 has no native kernel)" in qtensor.kernels.explain(mxfp8, torch.float64)


def test_importing_the_module_imports_no_compiler() -> None:
    code = (
        "import sys, qtensor.kernels; print({'qtensor.build.cache', 'qtensor.build.compilers'} & "
        "set(sys.modules))"
    )
    assert torch_process.run(code).stdout.strip() == "set()"
