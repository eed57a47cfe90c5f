"""The C++ sources compile without warnings, have no long lines and are in the README."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from qtensor.build.compilers import find_cxx
from qtensor.kernels.cpu import sources

pytestmark = pytest.mark.project


LINE = 110
SOURCES = sorted(p for p in sources.FOLDER.rglob("*.*") if p.suffix != ".md")
BEST = sources.usable_isas()[0]
WIDE = pytest.mark.nightly(reason="compiles the same sources once more")


@pytest.mark.parametrize(
    "isa", [isa if isa == BEST else pytest.param(isa, marks=WIDE) for isa in sources.ISAS]
)
def test_no_warnings(isa: str) -> None:
    """Compile with the users' flags but generate no code, which optimizer warnings need."""
    for unit in (*sources.units(isa), *sources.ops_build_spec().units):
        if unit.name.endswith(("Float32", "Float16")) and not unit.source.stem.endswith("float16"):
            continue  # the same lines as for Bfloat16
        assert {"-Wall", "-Wextra"} <= set(unit.flags)
        command = [*find_cxx().command, *unit.flags, "-fsyntax-only", "-Werror", str(unit.source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{unit.name}: {done.stderr[-3000:]}"


def test_a_warning_is_seen(tmp_path: Path) -> None:
    source = tmp_path / "unused.cpp"
    source.write_text("int unused(int parameter) { return 1; }\n")
    flags = (*sources.units("baseline")[0].flags, "-fsyntax-only", "-Werror")
    command = [*find_cxx().command, *flags, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "unused" in done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_long_lines(path: Path) -> None:
    numbered = enumerate(path.read_text().splitlines(), 1)
    assert [number for number, line in numbered if len(line) > LINE] == []


def test_every_source_has_a_line_in_the_readme() -> None:
    readme = (sources.FOLDER / "README.md").read_text()
    names = [str(path.relative_to(sources.FOLDER)) for path in SOURCES]
    assert [name for name in names if f"`{name}`" not in readme] == []
