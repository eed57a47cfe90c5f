"""What a release refuses, and that its files name each other."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from qtensor.core.version import DISTRIBUTION, install_command

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.project
CHANGELOG = "# Changelog\n\n## 1.2.0 (2030-01-31)\n\n### New\n\n## 1.1.0 (2029-01-31)\n"


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import release  # noqa: PLC0415 - scripts/ is no package

    yield release
    for name in ("release", "build_wheel"):
        sys.modules.pop(name)


def test_a_version_that_is_ready(release: Any) -> None:
    assert release.objections("1.2.0", "1.2.0", CHANGELOG, "") == []


@pytest.mark.parametrize(
    ("version", "package", "changelog", "changes", "told"),
    [
        ("1.2.0", "1.1.0", CHANGELOG, "", "version.py says 1.1.0, not 1.2.0"),
        ("1.1.0", "1.1.0", CHANGELOG, "", "is '1.2.0 (2030-01-31)', not '1.1.0"),
        ("1.2.0", "1.2.0", CHANGELOG.replace("2030-01-31", "unreleased"), "", "(unreleased)"),
        ("1.2.0", "1.2.0", "", "", "is 'nothing'"),
        ("1.2.0", "1.2.0", CHANGELOG, " M README.md\n", "M README.md"),
    ],
)
def test_a_version_that_is_not(
    release: Any, version: str, package: str, changelog: str, changes: str, told: str
) -> None:
    (objection,) = release.objections(version, package, changelog, changes)
    assert told in objection


def test_nothing_is_built_for_another_version(release: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["release.py", "99.0"])
    monkeypatch.setattr(release, "build", lambda *_: pytest.fail("it builds"))
    assert release.main() == 1
    assert "not 99.0" in capsys.readouterr().err


def test_the_workflow_names_what_exists(release: Any) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    jobs = workflow["jobs"]
    assert all(job in jobs for name in jobs for job in [jobs[name].get("needs", "build")])
    steps = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    commands = "\n".join(steps)
    files = [word for word in commands.split() if word.startswith("scripts/")]
    assert {"scripts/build_wheel.py", "scripts/wheel_smoke.py"} == set(files)
    assert all((ROOT / file).exists() for file in files)
    assert f"torch=={release.TORCHES[0]}" in jobs["linux"]["strategy"]["matrix"]["torch"]
    others = [name for name in release.TARGETS if name.startswith(("macos", "windows"))]
    assert all(name in commands for name in others)


TEXTS = ("", ".md", ".py", ".sh", ".toml", ".yml")
INSTALLED = re.compile(
    r"(?:[\w-]*\b)?qtensor(?=\[[a-z-])|(?<=pip install )['\"]?[\w-]*qtensor\b(?!-\*|/)"
)
"""A name before an extra, or the name that pip installs."""


def test_every_text_installs_the_distribution() -> None:
    """On the package index, qtensor alone is another project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    assert {extra for extra in project["optional-dependencies"]} >= {"cli", "demo", "origins"}
    assert install_command("cli") == f"pip install '{DISTRIBUTION}[cli]'"
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    wrong = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path == Path(__file__) or path.suffix not in TEXTS:
            continue
        for line in path.read_text(errors="replace").splitlines():
            names = {match[0].strip("'\"") for match in INSTALLED.finditer(line)}
            wrong += [f"{name}: {line.strip()}" for found in names - {DISTRIBUTION}]
    assert wrong == []
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert f"--only-binary={DISTRIBUTION} --find-links wheels {DISTRIBUTION}" in workflow
    assert (
        f"pip install {DISTRIBUTION.replace('-', '_')}-*.whl"
        in (ROOT / "docs" / "installing.md").read_text()
    )
