"""Docstrings, comments, messages and pages use modern English: archaic phrases cannot come back."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.project


ROOT = Path(__file__).parents[2]
ARCHAIC = {
    r"\bmend(s|ed|ing)?\b": "fix",
    r", say\b(?!ing)": "for example",
    r"\b(is|are) no (tensor|module|name|list|class|quantizer|matrix|number)s?\b": "is not a",
    r"\bwhoever\b": "the caller",
    r"\bnothing but\b": "only",
    r"\b(therein|thereof|whereof|whereby)\b": "the thing's name",
    r"\bwhat it is that\b": "the thing's name",
    r"\bput off\b": "delayed",
    r"\b(made|make|makes) anew\b": "created again",
}
"""Pattern -> what to write instead."""
SUBJECT_MISSING = re.compile(r"(Of|As|Those|That|Whose|Likewise)\b")
"""A docstring that begins so, for example "Of the output.", means nothing in a tooltip."""
FOLDERS = ("qtensor", "docs", "examples", "scripts", "benchmarks")
SUFFIXES = {".py", ".cpp", ".h", ".md", ".sh"}


def files() -> list[Path]:
    paths = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES]
    paths += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return sorted(paths)


@pytest.mark.parametrize("phrase", ARCHAIC)
def test_archaic_phrases(phrase: str) -> None:
    pattern = re.compile(phrase, re.IGNORECASE)
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not lines, f"write {ARCHAIC[phrase]!r} instead:\n" + "\n".join(lines)


def test_docstrings_make_sense_alone() -> None:
    lines = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value.value[:60]}"
        for path in files()
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and SUBJECT_MISSING.match(node.value.value.lstrip())
    ]
    assert not lines, "name the subject in the first line:\n" + "\n".join(lines)
