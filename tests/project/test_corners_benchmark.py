"""benchmarks.corners: what is compared, and which cells are the worst. No time is asserted."""

import json

import pytest
import torch

import qtensor
from benchmarks import corners
from benchmarks.corners import Problem

pytestmark = pytest.mark.project


@pytest.mark.parametrize("kind", corners.KINDS)
def test_both_sides_multiply_the_same_matrices(kind):
    """A sum of K = 64 products of normal values has an error of a tenth at most, in mxfp8."""
    problem, quantizer = Problem(kind, (48, 64), 3, 1), qtensor.quantizer("mxfp8")
    ours, theirs = (
        corners.bind(problem, q, corners.operands(kind, problem.shape, q))()
        for q in (quantizer, None)
    )
    assert ours.shape == theirs.shape
    assert (ours - theirs).float().norm() < 0.1 * theirs.float().norm()


def test_large_weights_have_copies():
    quantizer = qtensor.quantizer("fp8")
    assert len(corners.operands("linear", (64, 64), quantizer, 8 << 20)) == 1
    assert len(corners.operands("linear", (1024, 1024), quantizer, 8 << 20)) == 8
    assert len(corners.operands("linear", (1024, 1024), None, 8 << 20)) == 4


def test_a_format_without_such_a_product_is_named(monkeypatch):
    problem, quantizer = Problem("both", (128, 64), 2, 1), qtensor.quantizer("fp8")
    assert corners.refused(problem, quantizer) is None

    def refuse(*_):
        raise qtensor.UnsupportedError("no such product")

    monkeypatch.setattr(corners, "_multiply", lambda *_: refuse)
    assert corners.refused(problem, quantizer) == "UnsupportedError: no such product"


def test_the_worst_cells():
    def cell(where, kind_of_rows, ratio):
        names = {"kind": "linear", "case": "fp8", "where": where, "range": kind_of_rows}
        return names | {"us": ratio, "bf16_us": 1.0, "ratio": ratio}

    found = [cell("a", "few", 1.5), cell("b", "few", 2.0), cell("c", "many", 0.5)]
    (row,) = corners.summary(found)
    assert (row["few"], row["few_where"], row["many"], row["some"]) == (2.0, "b", 0.5, None)
    assert row["median"] == 1.5
    assert row["cells"] == [["a", 1.5, 1.0], ["b", 2.0, 1.0], ["c", 0.5, 1.0]]


@pytest.mark.parametrize(
    ("rows", "shape", "name"),
    [
        (16, (1024, 1024), "few"),
        (17, (1024, 1024), "some"),
        (16, (512, 1024), "some"),
        (65, (1024, 1024), "many"),
    ],
)
def test_the_range_of_a_cell(rows, shape, name):
    assert Problem("linear", shape, rows, 1).range == name


def test_a_quick_run(tmp_path, monkeypatch):
    monkeypatch.setitem(corners.SIZES, True, ((64, 64),))
    monkeypatch.setattr(corners, "quantizers", lambda quick: [qtensor.quantizer("nvfp4")])
    words = ["--quick", "--output", str(tmp_path), "--threads", str(torch.get_num_threads())]
    assert corners.main([*words, "--kinds", ",".join(corners.KINDS)]) == 0
    written = json.loads((tmp_path / "corners_cpu_quick.json").read_text())
    assert {row["kind"] for row in written["rows"]} == set(corners.KINDS)
    assert all(row["case"] == "nvfp4" and row["many"] > 0 for row in written["rows"])
    text = (tmp_path / "corners_cpu_quick.md").read_text()
    assert "## x @ w columnwise" in text
