"""Choose the cells of parametrized tests that `make test` runs.

The default tier (`make test`) takes from each test a few cells that together hold every value of
every axis. The wide tier holds the other cells, and the tests marked ``nightly(reason=...)``.
`make test-all` runs both tiers. An axis is one `parametrize` mark; each of its rows is a value.
A mark with more rows than its arguments have values is a product: there, each argument is an axis.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest

Value = tuple[str, Hashable]
"""An argument of a test, and one of its values."""

SAMPLED = "sampled: other cells hold each of its values"
"""The reason of a cell that the sampling, and no mark at the test, leaves to the wide tier."""

_BYTES = "milliseconds a cell, and each states bytes, values or sizes that users store"
EVERY_CELL = dict.fromkeys(
    ("test_dequantize.py", "test_gemm.py", "test_golden.py", "test_swizzle.py", "test_usage.py"),
    _BYTES,
)
"""``file`` or ``file::test`` -> why the default tier runs all of its cells."""


def axes(specs: Sequence[Any]) -> list[list[Value]]:
    """Return the axis values of each cell of one test, given pytest's call specs of the cells."""
    marks: dict[tuple[int, ...], list[str]] = {}
    for name in specs[0].indices:
        marks.setdefault(tuple(spec.indices[name] for spec in specs), []).append(name)
    columns: list[list[Value]] = []
    for rows, names in marks.items():
        columns.append([(names[0], row) for row in rows])
        if len(names) > 1:
            arguments = [[(name, repr(spec.params[name])) for spec in specs] for name in names]
            if len(set(rows)) > sum(len(set(argument)) for argument in arguments):
                columns[-1:] = arguments
    return [list(cell) for cell in zip(*columns, strict=True)]


def cover(cells: Sequence[Iterable[Value]]) -> list[int]:
    """Return the indices of a few cells that together hold every value of all cells.

    Each step takes the cell with the most new values; among equals, the one whose values have been
    taken least often, then the first. So the choice depends on the cells alone.
    """
    taken: Counter[Value] = Counter()
    kept: list[int] = []
    values = [set(cell) for cell in cells]
    missing = set().union(*values)

    def rank(i: int) -> tuple[int, int, int]:
        return -len(values[i] & missing), sum(taken[v] for v in values[i]), i

    # A cell's rank never falls, so that the first of the heap is the best if its rank is current.
    heap = [rank(i) for i in range(len(cells))]
    heapq.heapify(heap)
    while missing:
        best = heap[0][-1]
        if (current := rank(best)) != heap[0]:
            heapq.heapreplace(heap, current)
            continue
        heapq.heappop(heap)
        kept.append(best)
        taken.update(values[best])
        missing -= values[best]
    return kept


def tests(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Group cells by test: ``path::Class::test`` -> its cells, in the order of collection."""
    result: dict[str, list[pytest.Item]] = {}
    for item in items:
        result.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return result


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark as ``nightly`` each cell that the default tier leaves to the wide tier."""
    for test, cells in tests(items).items():
        name = test.rpartition("/")[2]
        cells = [cell for cell in cells if cell.get_closest_marker("nightly") is None]
        if len(cells) < 2 or name in EVERY_CELL or name.partition("::")[0] in EVERY_CELL:
            continue
        kept = set(cover(axes([cell.callspec for cell in cells])))  # type: ignore[attr-defined]
        for index, cell in enumerate(cells):
            if index not in kept:
                cell.add_marker(pytest.mark.nightly(reason=SAMPLED))


def part(nodeid: str, parts: int) -> int:
    """Return which part of the wide tier a cell is in, from 0 to ``parts - 1``."""
    return int(hashlib.sha256(nodeid.encode()).hexdigest(), 16) % parts


def read_part(text: str) -> tuple[int, int]:
    """Return (index, parts) of a ``--wide-part`` such as ``3/8``."""
    index, slash, parts = text.partition("/")
    if not (slash and index.isdecimal() and parts.isdecimal() and int(index) < int(parts)):
        rule = "must be INDEX/PARTS with INDEX from 0 to PARTS - 1"
        raise pytest.UsageError(f"--wide-part: {rule}; got {text!r}. Try --wide-part=3/8.")
    return int(index), int(parts)
