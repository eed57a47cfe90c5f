"""Choose the cells of parametrized tests that `make test` runs.

The default tier (`make test`) takes from each test a few cells that together hold every value of
every axis. The wide tier holds the other cells, and the tests marked ``nightly(reason=...)``.
`make test-all` runs both tiers. An axis is one `parametrize` mark; each of its rows is a value.
A mark with more rows than its arguments have values is a product: there, each argument is an axis.
In the folders and files of ``SHARED`` the formats or recipes are an axis of the file: some test
holds each. Cells under inductor, and compiled cells on two ranks, are in the wide tier, except in
the files of ``INDUCTOR`` and ``ON_RANKS``.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import pytest

Value = tuple[str, ...]
"""The test whose axis it is (empty for an axis of a file), an argument, and a value as text."""

SAMPLED = "sampled: other cells hold each of its values"
"""The reason of a cell that the sampling, and no mark at the test, leaves to the wide tier."""

COMPILED = "takes seconds; nightly.INDUCTOR and nightly.ON_RANKS name files with such a cell by day"
"""The reason of a compiled cell that the wide tier has, without a mark at the test."""

SLOW = {"aot_eager": 1, "compiled": 1, "gptq": 1, "inductor": 4}
"""Words in the values of cells that compile or round with compensation -> about how long that
takes, in half seconds.
"""

_BYTES = "milliseconds a cell, and each states bytes, values or sizes that users store"
EVERY_CELL = dict.fromkeys(
    ("test_dequantize.py", "test_gemm.py", "test_golden.py", "test_swizzle.py", "test_usage.py"),
    _BYTES,
)
"""``file`` or ``file::test`` -> why the default tier runs all of its cells."""

FORMATS = ("case", "recipe", "fmt")
"""Arguments that are formats or recipes in every file."""
SHARED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("layers", "operations"), FORMATS),
    **dict.fromkeys(("compile", "ranks"), (*FORMATS, "name", "options", "bound", "backend")),
    **dict.fromkeys(
        (
            "test_added_to_main_grad.py",
            "test_compiled_autograd_modules.py",
            "test_compiled_linear.py",
            "test_debug_record.py",
            "test_export.py",
            "test_modules_compile.py",
            "test_ops_compile.py",
        ),
        (*FORMATS, "name", "options", "forward"),
    ),
    **dict.fromkeys(
        (
            "test_convert_llama.py",
            "test_multihead_attention.py",
            "test_proto.py",
            "test_transformers_caches.py",
            "test_transformers_clients.py",
            "test_transformers_models.py",
            "test_triton_compiles.py",
            "test_weight_workspace.py",
        ),
        (*FORMATS, "name", "options", "bound", "backend"),
    ),
}
"""Folder or file (which counts first) -> arguments whose values the tests of a file share: in the
default tier some test of the file holds each value. Cells there build and train modules, compile,
or run on two ranks.
"""

INDUCTOR = (
    "test_compile_bytes.py",
    "test_compile_dynamic.py",
    "test_compile_ops.py",
    "test_modules_compile.py",
    "test_ops_compile.py",
)
"""Files with cells under inductor in the default tier. Such a cell compiles C++ for three seconds;
elsewhere, the wide tier has them, and aot_eager traces the same graphs.
"""
ON_RANKS = ("test_collectives.py", "test_dtensor_layers.py", "test_parallel_styles.py")
"""Files of tests/ranks with cells under aot_eager in the default tier. Two processes compile each
for three to ten seconds; the eager cells of the other files call the same layers and collectives.
"""

THIRDS = (
    "test_compile_autograd.py",
    "test_compile_boundary.py",
    "test_compile_bytes.py",
    "test_compile_dynamic.py",
    "test_compile_ops.py",
    "test_compiled_autograd_modules.py",
    "test_compiled_linear.py",
    "test_export.py",
    "test_modules_compile.py",
    "test_ops_compile.py",
)
"""Files of ``SHARED`` whose cells all compile: each holds a third of the formats and recipes."""
OF_THIRDS = ("case", "recipe")
"""Arguments that are formats and recipes there."""


def shared(path: PurePath) -> tuple[str, ...]:
    """Return the arguments whose values the tests of a file share."""
    return SHARED.get(path.name, SHARED.get(path.parent.name, ()))


def waits(path: PurePath, params: Mapping[str, Any]) -> bool:
    """Return whether a cell is compiled, in a file that leaves these to the wide tier."""
    texts = {value for value in params.values() if isinstance(value, str)}
    if path.parent.name == "ranks" and path.name not in ON_RANKS and "aot_eager" in texts:
        return True
    return "inductor" in texts and path.name not in INDUCTOR


def axes(
    rows: Sequence[dict[str, Any]],
    marks: Sequence[Sequence[str]],
    test: str = "",
    shared: Collection[str] = (),
) -> list[list[Value]]:
    """Return the axis values of each cell of one test.

    Arguments:
        rows: the arguments of each cell.
        marks: the arguments of each ``parametrize`` mark, and of each fixture with parameters.
        test: the name of the test, so that other tests of its file do not hold its values.
        shared: arguments whose values any test of the file may hold.
    """
    columns: list[list[Value]] = []
    # The cells share their arguments, and the text of a format or tensor takes long to write.
    objects = {id(value): value for row in rows for value in row.values()}
    of_object = {key: repr(value) for key, value in objects.items()}
    texts = [{name: of_object[id(value)] for name, value in row.items()} for row in rows]

    def add(names: Sequence[str]) -> None:
        of = "" if set(names) <= set(shared) else test
        columns.append([(of, *names, *(row[name] for name in names)) for row in texts])

    for names in marks:
        arguments = [{row[name] for row in texts} for name in names]
        together = {tuple(row[name] for name in names) for row in texts}
        if len(names) > 1 and len(together) > sum(map(len, arguments)):
            for name in names:
                add([name])
        else:
            add(names)
    return [list(cell) for cell in zip(*columns, strict=True)]


def marks_of(test: pytest.Function, params: Collection[str]) -> list[list[str]]:
    """Return the arguments of each ``parametrize`` mark of a test, then each parameter of a
    fixture.

    From the marks, because ``callspec.indices`` counts the cells of some tests, not the rows of
    their marks.

    Arguments:
        test: the definition of the test, or one of its cells.
        params: the names of all arguments that have parameters.
    """
    marks = []
    for mark in test.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",") if name.strip()]
        marks.append(list(names))
    seen = {name for names in marks for name in names}
    return [*marks, *([name] for name in sorted(set(params) - seen))]


def slowness(text: str) -> int:
    """Return how long the value of an argument keeps a cell busy, as ``SLOW`` says."""
    return sum(time for word, time in SLOW.items() if word in text)


def cover(cells: Sequence[Iterable[Value]], held: Collection[Value] = ()) -> list[int]:
    """Return the indices of a few cells that together hold every value of all cells.

    Values in ``held`` need no cell: another test holds them.

    Each step takes the cell with the most new values; among equals, the quickest one by ``SLOW``,
    then the one whose values have been taken least often, then the first. So the choice depends on
    the cells alone.
    """
    taken: Counter[Value] = Counter()
    kept: list[int] = []
    values = [set(cell) for cell in cells]
    missing = set().union(*values).difference(held)
    slow = {value: sum(map(slowness, value)) for value in set().union(*values)}
    compiling = [sum(slow[value] for value in cell) for cell in values]

    def rank(i: int) -> tuple[int, int, int, int]:
        return -len(values[i] & missing), compiling[i], sum(map(taken.__getitem__, values[i])), i

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


def of_other_files(file: str, cells: Iterable[Iterable[Value]]) -> set[Value]:
    """Return the formats or recipes of a test that other files of ``THIRDS`` hold."""
    if file not in THIRDS:
        return set()
    found = sorted({v for cell in cells for v in cell if not v[0] and v[1] in OF_THIRDS})
    return set(found).difference(found[THIRDS.index(file) % 3 :: 3])


class Sampling:
    """Choose the cells of the default tier, test by test, before pytest builds them.

    Attributes:
        drops: leave out the other cells; otherwise they are marked ``nightly``.
    """

    def __init__(self, drops: bool) -> None:
        self.drops = drops
        self._held: dict[str, set[Value]] = {}
        """Values that the tests of a file of ``SHARED`` have held so far."""

    def sample(self, metafunc: pytest.Metafunc) -> None:
        """Sample the cells that ``metafunc`` has been given."""
        # pytest offers no hook between the parameters of a test and its cells.
        calls = metafunc._calls
        file, test = metafunc.definition.path.name, metafunc.function.__name__
        if metafunc.definition.get_closest_marker("nightly") or not any(c.params for c in calls):
            return
        if file in EVERY_CELL or f"{file}::{test}" in EVERY_CELL:
            return
        path = metafunc.definition.path
        asked = [call for call in calls if not any(m.name == "nightly" for m in call.marks)]
        if not asked:
            return
        by_day = [call for call in asked if not waits(path, call.params)] or asked
        rows = [call.params for call in by_day]
        marks = marks_of(metafunc.definition, rows[0])
        values = axes(rows, marks, test, shared(path))
        held = self._held.setdefault(file, set())
        kept = cover([[(test,), *own] for own in values], held | of_other_files(file, values))
        held.update(value for index in kept for value in values[index] if not value[0])
        chosen = {id(by_day[index]) for index in kept}
        if self.drops:
            calls[:] = [call for call in calls if id(call) in chosen]
            return
        candidates = set(map(id, by_day))
        for call in asked:
            if id(call) not in chosen:
                reason = SAMPLED if id(call) in candidates else COMPILED
                call.marks.append(pytest.mark.nightly(reason=reason).mark)


def by_test(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Group cells by test: ``path::Class::test`` -> its cells, in the order of collection."""
    result: dict[str, list[pytest.Item]] = {}
    for item in items:
        result.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return result


def part(key: str, parts: int) -> int:
    """Return which part of the wide tier a key is in, from 0 to ``parts - 1``."""
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % parts


def key(item: pytest.Item) -> str | None:
    """Return the text that decides the part of a cell, or None in the default tier.

    It is the id of the cell, or ``together`` of its mark: cells of the same set-up are in one part.
    """
    mark = item.get_closest_marker("nightly")
    return None if mark is None else mark.kwargs.get("together", item.nodeid)


def read_part(text: str) -> tuple[int, int]:
    """Return (index, parts) of a ``--wide-part`` such as ``3/8``."""
    index, slash, parts = text.partition("/")
    if not (slash and index.isdecimal() and parts.isdecimal() and int(index) < int(parts)):
        rule = "must be INDEX/PARTS with INDEX from 0 to PARTS - 1"
        raise pytest.UsageError(f"--wide-part: {rule}; got {text!r}. Try --wide-part=3/8.")
    return int(index), int(parts)
