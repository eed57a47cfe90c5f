"""docs/attention.md names the models of transformers that tests run."""

import re
from pathlib import Path

import pytest
from transformers_caches import MODELS

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]


def test_the_table_of_models():
    """Each model of the tests is in one row, and no other."""
    document = (ROOT / "docs/attention.md").read_text()
    table = document.partition("| model | static cache")[2]
    rows = [line.split("|")[1] for line in table.splitlines()[2:] if line.startswith("|")]
    named = [
        re.sub(r"\(.*", "", name).strip()
        for row in rows
        for name in re.split(r", (?![^(]*\))", row)
    ]
    assert sorted(named) == sorted(MODELS)
