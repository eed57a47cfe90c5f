"""Features of torch's engine, cell by cell: the bytes of one process, or an error on every rank."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from distributed_cells import table
from ranks import Ranks

CELLS = [
    (feature.name, mode, column)
    for feature in table.TESTED
    for mode in feature.modes
    for column in feature.columns
]
WIDE = pytest.mark.nightly(reason="all cells; the default tier has one of each feature")
ERRORS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: ("a reduction needs values", table.FORMATS) for name in table.collectives.REDUCTIONS},
    "3 dims, `full_tensor`: S(1)": (
        "needs factors that do not run along it",
        tuple(f for f in table.FORMATS if f not in ("fp8", "fp8_delayed")),
    ),
    "parameters on the meta device, `quantized_params`": (
        "are set before the layer is sharded",
        tuple(table.RECIPES),
    ),
    "qtensor's `PrepareModuleInput`, three layers": (
        "share a quantizer of their input",
        ("DelayedScaling",),
    ),
}
"""Feature -> the rule of its error, and the columns that raise it."""


def is_error(feature: str, column: str) -> str | None:
    """Return the pattern of the error that a cell raises, None for no error."""
    if feature.endswith("quantized all-gather") and column == "DelayedScaling":
        return "from their shards"
    pattern, columns = ERRORS.get(feature, ("", ()))
    return pattern if column in columns else None


def sample() -> Iterator[tuple[str, str, str]]:
    """Yield a cell of every feature, of changing columns, in eager mode."""
    for number, feature in enumerate(table.TESTED):
        yield feature.name, "eager", feature.columns[number % len(feature.columns)]


QUICK = set(sample())


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, id="-".join(c), marks=() if c in QUICK else WIDE) for c in CELLS],
)
def test_features(ranks: Ranks, cell: tuple[str, str, str]) -> None:
    feature, _, column = cell
    pattern = is_error(feature, column)
    for rank, (kind, text) in enumerate(ranks.run(table.run_cell, *cell)):
        assert kind == ("pass" if pattern is None else "error"), f"rank {rank}: {text or kind}"
        assert re.search(pattern or "", text), text
