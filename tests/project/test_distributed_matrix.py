"""The script behind docs/distributed_matrix.md runs cells on two ranks and sees lies; the tables of
docs/distributed_planning.md are counted, and agree with their formulas.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cells import table, traffic
from ranks import Ranks

import qtensor

DOCS = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCS))  # the ranks read it when they start

import generate_distributed_matrix as script  # noqa: E402
import generate_distributed_planning as planning  # noqa: E402

pytestmark = pytest.mark.project


WRITTEN = json.loads((DOCS / "distributed_matrix.json").read_text())
QUICK_COMPILED = 4


def sample() -> Iterator[tuple[str, str, str]]:
    """Yield a cell in eager mode of every feature, and a few compiled ones, of changing columns."""
    for number, feature in enumerate(table.features().values()):
        yield feature.name, "eager", feature.columns[number % len(feature.columns)]
    compiled = [f for f in table.features().values() if "aot_eager" in f.modes]
    for number, feature in enumerate(compiled[:: len(compiled) // QUICK_COMPILED]):
        yield feature.name, "aot_eager", feature.columns[3 * number % len(feature.columns)]


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """Ranks that wait no longer for each other than those of the script."""
    with tempfile.TemporaryDirectory() as folder:
        group = Ranks(Path(folder), table.SIZE, script.PATIENCE)
        yield group
        group.stop(kill=True)


def word_of(feature: str, mode: str, column: str) -> str:
    """Return ``pass``, or the kind and the reason, as the document has it."""
    return WRITTEN[feature][mode][column]


def check(pair: Ranks, feature: str, mode: str, column: str) -> None:
    """Compare the kind of a cell with that of the document."""
    kind, text = script.run_cell(pair, feature, mode, column)
    wanted = word_of(feature, mode, column)
    assert kind == wanted.partition(":")[0], f"{text or kind}; the document says {wanted}"


QUICK = list(sample())
WIDE = pytest.mark.nightly(reason="all cells; the default tier has one of each feature")
REST = [cell for cell in table.cells() if cell not in set(QUICK)]


def is_beyond_torch(feature: str, mode: str) -> bool:
    """Dynamo 2.11 cannot trace a subclass that is made inside of a DTensor."""
    return (
        torch.__version__.startswith("2.11.")
        and mode == "aot_eager"
        and feature == "`ColwiseParallel`, `RowwiseParallel`"
    )


@pytest.mark.parametrize(
    "cell",
    [
        *(pytest.param(c, id="-".join(c)) for c in QUICK),
        *(pytest.param(c, id="-".join(c), marks=WIDE) for c in REST),
    ],
)
def test_cells(pair: Ranks, cell: tuple[str, str, str]) -> None:
    if is_beyond_torch(*cell[:2]):
        pytest.skip(reason="torch 2.11 does not compile a layer of torch with a DTensor of codes")
    check(pair, *cell)


def test_every_cell_is_in_the_document() -> None:
    """The sample holds every feature and every column."""
    written = {(f, m, c) for f, modes in WRITTEN.items() for m, row in modes.items() for c in row}
    assert set(table.cells()) == written
    assert {cell[0] for cell in QUICK} == set(table.features())
    assert {cell[2] for cell in QUICK} == {*table.FORMATS, *table.RECIPES}


def test_no_cell_fails() -> None:
    assert [cell for cell in table.cells() if word_of(*cell).startswith("fail")] == []


# ---- lies ----------------------------------------------------------------------------------------


def run_liar(kind: str) -> tuple[str, str]:
    cell = table.Cell("mxfp8", "eager")
    try:
        if kind == "one byte":
            changed = cell.weight()
            changed.buffers()[0][3, 5] ^= 1
            table.same(changed, cell.weight())
        elif kind == "dequantized":
            table.same(cell.weight().dequantize(), cell.weight())
        elif kind == "one rank" and dist.get_rank() == 0:
            raise qtensor.QTensorError("no")
        elif kind == "other":
            raise RuntimeError("boom")
        elif kind == "caused":
            try:
                raise qtensor.QTensorError("a rule; got mxfp8. Do this.")
            except qtensor.QTensorError as error:
                raise RuntimeError("torch's") from error
        elif kind == "waits" and dist.get_rank() == 0:
            dist.recv(torch.zeros(1), 1)
    except Exception as error:  # noqa: BLE001 - as run_cell does
        return table.verdict(error)
    return "pass", ""


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("honest", ("pass", "")),
        ("one byte", ("fail", "1 of 65536 differ")),
        ("dequantized", ("fail", "Tensor instead of MXFP8Tensor")),
        ("one rank", ("fail", "rank 0: error no; rank 1: pass")),
        ("other", ("fail", "RuntimeError: boom")),
        ("caused", ("error", "a rule")),
    ],
)
def test_lies_are_seen(pair: Ranks, monkeypatch: Any, kind: str, wanted: tuple[str, str]) -> None:
    monkeypatch.setattr(table, "run_cell", run_liar)
    monkeypatch.setattr(pair, "run", lambda f, *_: type(pair).run(pair, run_liar, kind))
    found = script.run_cell(pair, "", "", "")
    assert found[0] == wanted[0]
    assert wanted[1] in found[1]


def test_a_rank_that_waits_in_vain_is_a_failure(tmp_path: Path, monkeypatch: Any) -> None:
    group = Ranks(tmp_path, 2, patience=2)
    monkeypatch.setattr(group, "run", lambda f, *_: type(group).run(group, run_liar, "waits"))
    kind, text = script.run_cell(group, "", "", "")
    group.stop(kill=True)
    assert kind == "fail"
    # On a busy machine the time limit of the group of both ranks may end first.
    assert "rank 1: pass" in text or "only ranks [1] answered" in text


def test_the_sections_are_rendered(monkeypatch: Any) -> None:
    names = ("`call`", "`same`", "`none`")
    features = [table.Feature(name, lambda cell: None, ("a", "b")) for name in names]
    monkeypatch.setattr(table, "SECTIONS", {"Part": features})
    passed = {"a": ("pass", ""), "b": ("pass", "")}
    outcomes: Any = {
        "`call`": {
            "eager": {"a": ("pass", ""), "b": ("error", "no `x`")},
            "aot_eager": {"a": ("fail", "boom"), "b": ("error", "no `x`")},
        },
        "`same`": {"eager": passed, "aot_eager": passed},
        "`none`": {m: dict.fromkeys("ab", ("error", "no `x`")) for m in ("eager", "aot_eager")},
    }
    text = script.render(outcomes)
    assert (
        "| `call` | eager | pass | error 1 |\n| `call` | aot_eager | **fail** 2 | error 1 |" in text
    )
    assert "Pass in mode eager and aot_eager with a, b:\n\n- `same`\n" in text
    assert "Error in mode eager and aot_eager with a, b:\n\n- `none`: error 1\n" in text
    assert "1. `no 'x'`\n2. `boom`" in text
    assert "| Part | 5 | 6 | 1 |" in text
    assert json.loads(script.as_json(outcomes))["`call`"]["eager"]["b"] == "error: no `x`"


@pytest.fixture
def files(monkeypatch: Any, tmp_path: Path) -> Path:
    """Let the script write into a folder of the test, about a table with one cell."""
    feature = table.Feature("`call`", lambda cell: None, ("a", "b"), ("eager",))
    monkeypatch.setattr(table, "SECTIONS", {"Part": [feature]})
    monkeypatch.setattr(table, "features", lambda: {feature.name: feature})
    monkeypatch.setattr(
        script, "run", lambda cells, echo: {f: {m: {c: ("pass", "")}} for f, m, c in cells}
    )
    for name in ("DOCUMENT", "RESULTS"):
        monkeypatch.setattr(script, name, tmp_path / name)
    return tmp_path


def run_main(monkeypatch: Any, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["generate_distributed_matrix.py", *arguments])
    return script.main()


def test_some_cells_are_run_again(monkeypatch: Any, files: Path) -> None:
    words = {"`call`": {"eager": {"a": "fail: boom: x", "b": "error: no"}}}
    (files / "RESULTS").write_text(json.dumps(words))
    assert run_main(monkeypatch, "--only", "eager a") == 0
    written = json.loads((files / "RESULTS").read_text())
    assert written == {"`call`": {"eager": {"a": "pass", "b": "error: no"}}}
    assert "| pass | error 1 |" in (files / "DOCUMENT").read_text()


def test_check_compares_and_writes_nothing(monkeypatch: Any, files: Path, capsys: Any) -> None:
    monkeypatch.setattr(
        table, "cells", lambda: [("`call`", "eager", "a"), ("`call`", "eager", "b")]
    )
    monkeypatch.setattr(
        script, "run", lambda cells, echo: {"`call`": {"eager": dict.fromkeys("ab", ("pass", ""))}}
    )
    assert run_main(monkeypatch) == 0
    assert run_main(monkeypatch, "--check") == 0
    (files / "RESULTS").write_text("{}")
    assert run_main(monkeypatch, "--check") == 1
    assert "docs/RESULTS: out of date" in capsys.readouterr().err
    assert (files / "RESULTS").read_text() == "{}"


# ---- docs/distributed_planning.md


@pytest.mark.parametrize("name", ["bfloat16", "`mxfp8`, 2-D blocks"])
def test_gathers_of_two_ranks_are_in_the_page(ranks: Ranks, name: str) -> None:
    counts = ranks.run(traffic.gather_of_weights, name)
    assert counts[0] == counts[1]
    bits = 16 if name == "bfloat16" else traffic.WEIGHTS[name][2]
    page = planning.DOCUMENT.read_text()
    assert f"| {name} | {bits:.4g} | {counts[0]:,} |" in page


def test_computed_tables_are_in_the_page() -> None:
    page, shards = planning.DOCUMENT.read_text(), planning.shards()
    assert planning.fill(page, {"computed": planning.computed(), "shards": shards}) == page


@pytest.mark.nightly(reason="counts on two, three and four ranks, half a minute")
def test_every_count_is_in_the_page() -> None:
    page = planning.DOCUMENT.read_text()
    assert planning.fill(page, planning.tables()) == page


@pytest.mark.parametrize(("count", "slack"), [(99, 0), (101, 0), (111, 10)])
def test_a_count_that_differs_from_its_formula_is_an_error(count: int, slack: int) -> None:
    with pytest.raises(
        planning.CountError, match=f"on 2 ranks: {count} bytes, the formula gives 100"
    ):
        planning.row_of("x", 8, 200, [count, 67, 50], slack)


def test_a_page_without_a_marker_is_an_error() -> None:
    with pytest.raises(planning.CountError, match="no marker for weights"):
        planning.fill("text", {"weights": []})
