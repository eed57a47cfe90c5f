"""CPU kernels that came with the package: they serve without a compiler, as long as they are those
of these sources.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import qtensor
from qtensor.build.compilers import find_cxx
from qtensor.core.errors import BuildError
from qtensor.kernels.cpu import native, prebuilt, sources

ROOT = Path(__file__).parents[2]
BEST = sources.usable_isas()[0]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel holds, from the user's cache."""
    folder = tmp_path_factory.mktemp("package") / "prebuilt"
    names = (f"cpu_{BEST}.so", f"attention_{BEST}.so", "ops.so")
    assert prebuilt.write(folder, [BEST]) == [folder / name for name in names]
    return folder


@pytest.fixture
def package(
    compiled: Path, tmp_path: Path, libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A package with kernels, an empty cache and no compiler."""
    folder = tmp_path / "prebuilt"
    shutil.copytree(compiled, folder)
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    monkeypatch.setenv("QTENSOR_CXX", str(tmp_path / "none"))
    monkeypatch.delenv("QTENSOR_CPU_ISA", raising=False)
    return folder


def is_refused() -> bool:
    with pytest.raises(BuildError, match="QTENSOR_CXX"):
        prebuilt.provide(BEST)
    return prebuilt.find(sources.build_spec(BEST)) is None


def test_they_serve_without_a_compiler(package: Path, libraries: Path) -> None:
    path = prebuilt.provide(BEST)
    assert path.parent == package
    assert native.Library(str(path)).handle
    assert qtensor.kernels.build() == path
    assert prebuilt.find_compiled(sources.ops_build_spec()) == package / "ops.so"
    assert not libraries.exists()


def test_other_sources_are_compiled(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = package.parent / "element_codes.h"
    header.write_text("// mended\n")
    monkeypatch.setattr(sources, "headers", lambda: (header,))
    assert is_refused()


def test_other_instruction_sets_are_compiled(package: Path) -> None:
    """Each instruction set has its own fingerprint, so that a library under another one's name does
    not serve.
    """
    others = [isa for isa in sources.ISAS if isa != BEST]
    for isa in others:
        specs = sources.build_spec(isa), sources.build_spec(BEST)
        assert prebuilt.fingerprint(specs[0]) != prebuilt.fingerprint(specs[1])
        assert prebuilt.find(sources.build_spec(isa)) is None


@pytest.mark.parametrize("text", ["", "[]", "null", '{"avx512": 1, "avx2": 1, "baseline": 1}'])
def test_a_damaged_manifest(package: Path, text: str) -> None:
    (package / "manifest.json").write_text(text)
    assert is_refused()


def test_a_library_that_is_not_there(package: Path) -> None:
    assert f"cpu_{BEST}" in json.loads((package / "manifest.json").read_text())
    (package / f"cpu_{BEST}.so").unlink()
    assert is_refused()


def test_sources_that_cannot_be_read(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "headers", lambda: (package / "gone.h",))
    assert prebuilt.find(sources.build_spec(BEST)) is None
    with pytest.raises(BuildError, match="sources and headers must be readable"):
        prebuilt.provide(BEST)


def test_a_library_that_does_not_load_here(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache replaces it."""
    path = prebuilt.provide(BEST)
    with pytest.raises(BuildError, match="QTENSOR_CXX"):
        prebuilt.replace(BEST, path)
    replacement = package / "other.so"
    monkeypatch.setattr(prebuilt, "build", lambda spec: replacement)
    assert prebuilt.replace(BEST, path) == replacement


# ---- the wheel ---------------------------------------------------------------------------------


def script() -> Any:
    spec = importlib.util.spec_from_file_location(
        "build_wheel", ROOT / "scripts" / "build_wheel.py"
    )
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules["build_wheel"] = module  # Its dataclass looks for it.
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ("GLIBC_2.2.5 GLIBC_2.14 GLIBCXX_3.4 CXXABI_1.3.11", "manylinux_2_28_x86_64"),
        ("GLIBC_2.14 GLIBC_2.34 GLIBCXX_3.4.19", "manylinux_2_34_x86_64"),
        ("GLIBC_2.14 GLIBCXX_3.4.30", "linux_x86_64"),
        ("GLIBC_2.14 GLIBCXX_3.4.19 CXXABI_1.3.13", "linux_x86_64"),
        ("", "linux_x86_64"),
    ],
)
def test_the_tag_says_what_the_kernels_ask_for(tmp_path: Path, needs: str, expected: str) -> None:
    for i, name in enumerate(needs.split()):
        (tmp_path / f"{i}.so").write_bytes(b"\0" + name.encode() + b"\0")
    assert script().platform_tag(list(tmp_path.glob("*.so")), "x86_64") == expected


def test_the_folder_is_packed() -> None:
    """Where the script writes is what a wheel takes, and nothing lies there in a checkout."""
    assert prebuilt.FOLDER.relative_to(ROOT).as_posix() == "qtensor/kernels/cpu/prebuilt"
    assert '"kernels/cpu/prebuilt/*"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.nightly(reason="it compiles a source of the C++ ops")
def test_no_handler_where_errors_of_torch_pass(tmp_path: Path) -> None:
    """A wheel may hold another C++ runtime than torch, and its handlers crash on torch's errors.

    With such a handler in the kernels, ops that zig had compiled ended the process.
    """
    (unit,) = sources.ops_build_spec().units
    source = unit.source.with_name("register.cpp")
    assembly = tmp_path / "register.s"
    command = [*find_cxx().command, *unit.flags, "-fPIC", "-S", str(source)]
    subprocess.run([*command, "-o", str(assembly)], check=True)
    functions = re.split(r"^\t\.type\t(\S+), @function$", assembly.read_text(), flags=re.MULTILINE)
    with_handler = {
        name: ".cfi_lsda" in body
        for name, body in zip(functions[1::2], functions[2::2], strict=True)
    }
    kernels = [name for name in with_handler if "kernel_" in name]
    assert len(kernels) >= 12
    assert not any(with_handler[name] for name in kernels)
    assert any(with_handler[name] for name in with_handler if "serve" in name)
