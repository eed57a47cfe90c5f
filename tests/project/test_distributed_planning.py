"""The tables of docs/distributed_planning.md are counted, and agree with their formulas."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from distributed_cells import traffic
from ranks import Ranks

DOCS = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCS))

import generate_distributed_planning as script  # noqa: E402 - see above

pytestmark = pytest.mark.project


@pytest.mark.parametrize("name", ["bfloat16", "`mxfp8`, 2-D blocks"])
def test_gathers_of_two_ranks_are_in_the_page(ranks: Ranks, name: str) -> None:
    counts = ranks.run(traffic.gather_of_weights, name)
    assert counts[0] == counts[1]
    bits = 16 if name == "bfloat16" else traffic.WEIGHTS[name][2]
    page = script.DOCUMENT.read_text()
    assert f"| {name} | {bits:.4g} | {counts[0]:,} |" in page


def test_computed_tables_are_in_the_page() -> None:
    page = script.DOCUMENT.read_text()
    assert script.fill(page, {"computed": script.computed(), "shards": script.shards()}) == page


@pytest.mark.nightly(reason="counts on two, three and four ranks, half a minute")
def test_every_count_is_in_the_page() -> None:
    page = script.DOCUMENT.read_text()
    assert script.fill(page, script.tables()) == page


@pytest.mark.parametrize(("count", "slack"), [(99, 0), (101, 0), (111, 10)])
def test_a_count_that_differs_from_its_formula_is_an_error(count: int, slack: int) -> None:
    with pytest.raises(
        script.CountError, match=f"on 2 ranks: {count} bytes, the formula gives 100"
    ):
        script.row_of("x", 8, 200, [count, 67, 50], slack)


def test_a_page_without_a_marker_is_an_error() -> None:
    with pytest.raises(script.CountError, match="no marker for weights"):
        script.fill("text", {"weights": []})
