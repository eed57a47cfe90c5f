"""`make test` holds every test and every value of every axis; the wide tier holds the rest."""

from collections import Counter
from pathlib import PurePosixPath
from types import SimpleNamespace

import nightly
import pytest
import torch
from native_cases import ISAS

from qtensor.kernels.cpu import sources
from tests.conftest import CELLS

pytestmark = pytest.mark.project


def rows_of(*marks):
    """Return the arguments of the cells of stacked ``parametrize`` marks: (names, rows) each."""
    cells = [{}]
    for names, rows in marks:
        cells = [cell | dict(zip(names, row, strict=True)) for cell in cells for row in rows]
    return cells


def values(cells):
    """Return {(argument, value)} of the cells of one test; a value counts by its repr."""
    found = [getattr(cell, "callspec", None) for cell in cells]
    return {(name, repr(value)) for spec in found if spec for name, value in spec.params.items()}


def is_explicit(cell):
    """Return whether a mark at the test, not the sampling, puts the cell into the wide tier."""
    mark = cell.get_closest_marker("nightly")
    return mark is not None and mark.kwargs.get("reason") != nightly.SAMPLED


def gaps(cells, shared=()):
    """Return what the default tier misses of one test: its reason-less marks, cells and values.

    The values of ``shared`` arguments do not count.
    """
    marks = [cell.get_closest_marker("nightly") for cell in cells]
    if any(mark and not mark.kwargs.get("reason") for mark in marks):
        return {"a reason: @pytest.mark.nightly(reason=...)"}
    kept = [cell for cell, mark in zip(cells, marks, strict=True) if mark is None]
    promised = [cell for cell in cells if not is_explicit(cell)]
    missing = values(promised) - values(kept)
    return {"a cell"} if promised and not kept else {v for v in missing if v[0] not in shared}


def item(params=None, reason=None):
    """Return a stand-in for a collected cell."""
    mark = None if reason is None else pytest.mark.nightly(reason=reason).mark
    spec = {} if params is None else {"callspec": SimpleNamespace(params=params)}
    return SimpleNamespace(get_closest_marker=lambda name: mark, **spec)


def path_of(test):
    return PurePosixPath(test.partition("::")[0])


def test_the_default_tier_holds_every_test_and_every_value(request):
    missing = {
        name: gaps(cells, nightly.shared(path_of(name)))
        for name, cells in nightly.by_test(request.config.stash[CELLS]).items()
    }
    assert {name: what for name, what in missing.items() if what} == {}


def test_the_files_that_share_values_hold_each(request):
    """A value that only one test of such a file has counts as well.

    The files of ``THIRDS`` hold each format and recipe together.
    """
    files = {}
    for name, cells in nightly.by_test(request.config.stash[CELLS]).items():
        if nightly.shared(path_of(name)):
            files.setdefault(path_of(name).name, []).extend(cells)
    for file, cells in files.items():
        shared = nightly.OF_THIRDS if file in nightly.THIRDS else ()
        assert gaps(cells, shared) == set(), file
    if files.keys() >= set(nightly.THIRDS):  # not where a part of the tests is collected
        assert gaps([cell for file in nightly.THIRDS for cell in files[file]]) == set()


@pytest.mark.parametrize(
    ("cells", "missing"),
    [
        ([item({"a": 1}), item({"a": 2}, nightly.SAMPLED)], {("a", "2")}),
        ([item({"a": 1}, nightly.SAMPLED), item({"a": 2}, nightly.SAMPLED)], {"a cell"}),
        ([item(reason="")], {"a reason: @pytest.mark.nightly(reason=...)"}),
        ([item({"a": 1}), item({"a": 2}, "takes minutes")], set()),
        ([item({"a": 1}, "takes minutes")], set()),
        ([item()], set()),
    ],
    ids=["value", "cell", "reason", "explicit_cell", "explicit_test", "no_parameters"],
)
def test_the_check_sees_what_is_missing(cells, missing):
    assert gaps(cells) == missing


def kept(*marks):
    """Return the parameters of the cells that the default tier takes, in order of collection."""
    cells = rows_of(*marks)
    values = nightly.axes(cells, [names for names, _ in marks])
    return [cells[index] for index in sorted(nightly.cover(values))]


LETTERS = (("letter",), [("a",), ("b",), ("c",)])
DIGITS = (("digit",), [(0,), (1,)])


def test_the_cover_is_as_small_as_the_longest_axis_and_mixes_the_others():
    cells = kept(LETTERS, DIGITS, (("flag",), [(False,), (True,)]))
    assert len(cells) == 3
    assert {cell["letter"] for cell in cells} == {"a", "b", "c"}
    assert {cell["digit"] for cell in cells} == {0, 1}
    assert {cell["flag"] for cell in cells} == {False, True}


@pytest.mark.parametrize("letter", ["a", "b"])
@pytest.mark.parametrize(("digit", "square"), [(2, 4), (3, 9)])
def test_the_marks_of_a_cell(request, letter, digit, square):
    """Two stacked marks are two axes: two of these four cells are in the default tier."""
    assert nightly.marks_of(request.node, request.node.callspec.params) == [
        ["digit", "square"],
        ["letter"],
    ]
    cells = nightly.by_test(request.config.stash[CELLS])[request.node.nodeid.partition("[")[0]]
    assert len([cell for cell in cells if cell.get_closest_marker("nightly") is None]) == 2


@pytest.mark.parametrize(
    ("path", "backend", "waits"),
    [
        ("library/test_norm.py", "inductor", True),
        ("library/test_norm.py", "aot_eager", False),
        ("ranks/test_dtensor.py", "inductor", True),
        ("ranks/test_dtensor.py", "aot_eager", True),
        ("ranks/test_dtensor.py", "eager", False),
        *((f"compile/{file}", "inductor", False) for file in nightly.INDUCTOR),
        *((f"ranks/{file}", "aot_eager", False) for file in nightly.ON_RANKS),
    ],
)
def test_compiled_cells_are_in_the_wide_tier_but_for_some_files(path, backend, waits):
    params = {"x": torch.zeros(2), "backend": backend}
    assert nightly.waits(PurePosixPath("tests", path), params) == waits


@pytest.mark.parametrize(
    ("word", "files"), [("inductor", nightly.INDUCTOR), ("aot_eager", nightly.ON_RANKS)]
)
def test_the_default_tier_has_compiled_cells(request, word, files):
    """Files that leave them to the wide tier rely on these."""
    cells = request.config.stash[CELLS]
    collected = {path_of(cell.nodeid).name for cell in cells}
    found = {
        path_of(cell.nodeid).name
        for cell in cells
        if word in cell.nodeid and cell.get_closest_marker("nightly") is None
    }
    assert found & set(files) == collected & set(files)


def test_of_equal_cells_one_compiles_once():
    backends = (("backend",), [("inductor",), ("eager",), ("aot_eager",)])
    taken = Counter(cell["backend"] for cell in kept(backends, (("n",), [(n,) for n in range(9)])))
    assert taken == {"eager": 7, "aot_eager": 1, "inductor": 1}


def test_values_that_are_equal_but_not_the_same_count_each():
    assert len(kept((("x",), [(0.0,), (-0.0,), (0,), (False,)]))) == 4


def test_each_row_of_a_list_of_cases_is_a_value():
    rows = [(True, True), (True, False), (False, True)]
    assert len(kept((("rowwise", "columnwise"), rows), DIGITS)) == 3


def test_a_product_in_one_mark_is_covered_by_its_arguments():
    product = [(letter, digit) for letter in "abcd" for digit in range(4)]
    assert len(kept((("letter", "digit"), product))) == 4


def test_a_product_with_holes_is_covered():
    rows = [
        (letter, digit)
        for letter in "abcde"
        for digit in range(5)
        if digit <= "abcde".index(letter)
    ]
    cells = kept((("letter", "digit"), rows))
    assert {cell["letter"] for cell in cells} == set("abcde")
    assert {cell["digit"] for cell in cells} == set(range(5))
    assert len(cells) < len(rows)


def test_each_cell_of_the_wide_tier_is_in_one_part():
    parts = [nightly.part(f"tests/test_x.py::test_y[{i}]", 8) for i in range(800)]
    assert set(parts) == set(range(8))
    assert max(parts.count(part) for part in range(8)) < 150
    # Pinned: a commit's part holds the same cells on every machine.
    assert parts[:4] == [3, 7, 1, 2]


def test_cells_that_share_a_library_are_in_one_part(request):
    """Each part would compile it otherwise. The id decides the part of other cells."""
    best, *others = sources.usable_isas()
    marks = {row.values[0]: row.marks for row in ISAS if not isinstance(row, str)}
    assert marks[best] == ()
    for isa in others:
        cell = SimpleNamespace(nodeid="x", get_closest_marker=lambda name, isa=isa: marks[isa][0])
        assert nightly.key(cell) == isa
    assert nightly.key(request.node) is None
    alone = pytest.mark.nightly(reason="slow").mark
    assert nightly.key(SimpleNamespace(nodeid="x", get_closest_marker=lambda name: alone)) == "x"


@pytest.mark.parametrize("text", ["8/8", "1", "a/8", "-1/8", "1/", ""])
def test_bad_parts(text):
    with pytest.raises(pytest.UsageError, match="INDEX/PARTS"):
        nightly.read_part(text)
