"""The documentation site builds without a warning, and a fault in a page or a docstring stops it.

`make docs` builds the site in every run of .ci/run, so these builds of changed copies are wide.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.project


ROOT = Path(__file__).parents[2]
FAULTS = {
    "a broken link": ("docs/ops.md", "# ", "[nowhere](nowhere.md)\n\n# ", "nowhere.md"),
    "a broken anchor": ("docs/ops.md", "# ", "[nowhere](numerics.md#nowhere)\n\n# ", "#nowhere"),
    "a missing docstring": (
        "qtensor/debug/error_report.py",
        '"""Return the differences',
        '0\n    """Return the',
        "error_report: a public name",
    ),
    "a property without a docstring": (
        "qtensor/debug/log.py",
        '"""Whether the tensor has no NaN and no infinity."""',
        "# without a docstring",
        "is_finite: a public name",
    ),
    "a module without a docstring": (
        "qtensor/recipes/__init__.py",
        '"""',
        '_ = """',
        "qtensor.recipes: a public module",
    ),
    "a docstring that cannot be read": (
        "qtensor/debug/error_report.py",
        "    Args:\n        x: the original",
        "    Args:\n        no pair\n        x: the original",
        "no pair",
    ),
    "a page without an entry": ("docs/new.md", "", "# New\n", "docs/new.md"),
}


@pytest.fixture
def copy(tmp_path):
    """A copy of what the site is made of."""
    for name in ("docs", "qtensor", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def build(folder):
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build"],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.nightly(reason="make docs builds the site in every run of .ci/run")
def test_site(copy):
    done = build(copy)
    assert done.returncode == 0, done.stderr
    site = copy / "site"
    assert "qtensor.quantize" in (site / "reference" / "qtensor.html").read_text()
    assert "Shape letters" in (site / "docs" / "concepts.html").read_text()
    assert "error_report" in (site / "search" / "search_index.json").read_text()


@pytest.mark.nightly(reason="each fault needs a build of its own")
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_stop_the_build(copy, fault):
    name, old, new, message = FAULTS[fault]
    path = copy / name
    text = path.read_text() if path.exists() else ""
    assert old in text
    path.write_text(text.replace(old, new, 1))
    done = build(copy)
    assert done.returncode != 0, done.stderr
    assert message in done.stderr
