"""``model_report``: numbers, matching, errors, and that names in a page are only text."""

from __future__ import annotations

import importlib
import json
import math
from html.parser import HTMLParser

import pytest
import torch
from checkpoint_cases import EXAMPLES
from formats import FormatCase, formats
from torch import nn

import qtensor
from qtensor import checkpoints
from qtensor.weights.search_result import CurvePoint, GroupChoice, SearchResult

EVIL = "a.0.<script>alert(1)</script>\"'&.weight"


@formats
def test_numbers_agree_with_the_error_report(case: FormatCase) -> None:
    """For all rows at once and in parts of 128 rows."""
    x = torch.randn(300, 96)
    x[290, 7] = 50.0
    q = case.quantize(x)
    found = qtensor.model_report({"w": q}, against={"w": x}).tensors[0]
    expected = qtensor.error_report(x, q)
    assert found.statistics is not None
    assert found.kind == expected.quantizer
    assert found.bits == pytest.approx(expected.bits_per_value, rel=1e-12)
    # Sums of the same float64 terms in another order.
    assert found.sqnr_db == pytest.approx(expected.sqnr_db, rel=1e-12)
    assert found.statistics.errors.max_abs == expected.max_abs_error
    assert found.statistics.share(found.statistics.errors.flushed) == expected.flushed_to_zero
    decoded = q.dequantize(torch.float64)
    cosine = torch.nn.functional.cosine_similarity(x.double().flatten(), decoded.flatten(), dim=0)
    assert found.cosine == pytest.approx(cosine.item(), rel=1e-9)
    assert found.codes is not None
    assert torch.equal(
        found.codes.counts,
        torch.bincount(q.codes().flatten().int(), minlength=found.codes.counts.numel()),
    )


def test_parts_give_the_numbers_of_the_whole(monkeypatch):
    x = torch.randn(1000, 64)
    q = qtensor.quantize(x, "nvfp4")
    whole = qtensor.model_report({"w": q}, against={"w": x})
    monkeypatch.setattr("qtensor.checkpoints.conversion.rows.PART", 64 * 128)
    parts = qtensor.model_report({"w": q}, against={"w": x})
    one, other = whole.tensors[0], parts.tensors[0]
    assert one.codes.factors == other.codes.factors
    assert torch.equal(one.codes.counts, other.codes.counts)
    assert one.sqnr_db == pytest.approx(other.sqnr_db, rel=1e-12)
    assert whole.worst[0].view == parts.worst[0].view
    block = qtensor.error_report(x, q).worst_blocks[0]
    assert parts.worst[0].view.rows.start == block.row
    assert parts.worst[0].badness == pytest.approx(-block.sqnr_db, rel=1e-5)
    assert (
        parts.worst[0].view.originals
        == x[block.row : block.row + 2][:, block.col : block.col + 16].tolist()
    )


def test_without_originals():
    w = torch.full((32, 32), 0.01)
    w[3, 5] = 6.0
    report = qtensor.model_report({"w": qtensor.quantize(w, "mxfp4"), "b": torch.ones(3)})
    assert math.isnan(report.tensors[0].sqnr_db)
    # One value of 32: peak over root mean square is sqrt(32).
    assert report.worst[0].badness == pytest.approx(10 * math.log10(32), abs=0.01)
    assert report.worst[0].view.rows.start == 3
    assert "errors are unknown" in report.html()
    assert qtensor.model_report({"b": torch.ones(3)}).notes == (
        "No tensor of this model is quantized.",
    )


def test_a_checkpoint(tmp_path):
    folder = EXAMPLES / "ct_nvfp4"
    checkpoints.dequantize(folder, tmp_path / "dense")
    report = qtensor.model_report(folder, against=tmp_path / "dense")
    assert report.layout == "compressed-tensors"
    assert [t.kind for t in report.quantized] == ["nvfp4", "nvfp4"]
    assert report.nbytes == checkpoints.inspect(folder).nbytes


class _Tags(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]


def test_names_are_text():
    w = torch.randn(32, 32)
    q = qtensor.quantize(w, "mxfp8")
    records = recorded_run([EVIL.removesuffix(".weight")])
    page = qtensor.model_report({EVIL: q}, against={EVIL: w}, log=records).html()
    found = _Tags(page)
    assert found.tags.count("script") == 1
    assert not {"onload", "onclick", "src", "href"} & set(found.attributes) - {"href"}
    assert "<script>alert" not in page
    assert "http" not in page.replace("http-equiv", "")


def recorded_run(names, steps=1, roles=("input",)):
    """Records whose SQNR falls from step to step."""
    return [
        qtensor.debug.Record(
            s, n, role, "mxfp8", 1, (8, 8), 2.0, 30.0 - s, 0.1, 0.2, 1.0, 1.0, 0.0, 0, 0, 8,
            int(s == 1), 0,
        )
        for s in range(steps)
        for n in names
        for role in roles
    ]  # fmt: skip


def test_a_log_and_a_search(tmp_path):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with qtensor.debug.record(model, format="nvfp4", jsonl=tmp_path / "run.jsonl"):
        for _ in range(3):
            model(torch.randn(4, 32)).sum().backward()
    search = SearchResult(
        (GroupChoice(("0",), "nvfp4", 4.5, 0.1),),
        "kl",
        False,
        4.5,
        0.1,
        0.2,
        (CurvePoint(4.5, 0.1),),
    )
    search.save(tmp_path / "choice.json")
    report = qtensor.model_report(
        model, log=tmp_path / "run.jsonl", search=tmp_path / "choice.json"
    )
    assert {(r.layer, r.steps) for r in report.recorded} == {("0", 3), ("1", 3)}
    page = report.html()
    assert "Recorded run" in page
    assert "chosen: 4.50" in page
    worst = qtensor.model_report(model, log=recorded_run(["0"], 3)).recorded[0]
    assert (worst.step, worst.sqnr_db, worst.first_not_finite) == (2, 28.0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"against": {"other": torch.ones(32, 32)}}, "name and shape of a quantized one; got w"),
        ({"against": {"w": torch.ones(8, 8)}}, r"of shape \(8, 8\) in the originals"),
        ({"log": "missing.jsonl"}, "'missing.jsonl' .No such file"),
        ({"search": "missing.json"}, "'missing.json' .No such file"),
        ({"search": 3}, "search is a SearchResult"),
        ({"log": []}, "the log must have a record"),
        ({"log": recorded_run(["elsewhere"])}, "the log must have layers of this model.*elsewhere"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_bad_input(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    q = qtensor.quantize(torch.randn(32, 32), "mxfp8")
    with pytest.raises(qtensor.QTensorError, match=message):
        qtensor.model_report({"w": q}, **options)


def test_a_part_that_is_not_compared_is_noted():
    q = qtensor.quantize(torch.randn(32, 32), "mxfp8")
    report = qtensor.model_report({"a": q, "b": q}, against={"a": q.dequantize()})
    assert report.notes == ("Not compared: 1 of 2 quantized tensors are not in the originals: b.",)


def test_wrong_files(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"step": 0}) + "\n")
    with pytest.raises(qtensor.QTensorError, match=r"run.jsonl', line 1 \('layer'\)"):
        qtensor.model_report({"0.weight": torch.ones(2)}, log=path)
    with pytest.raises(qtensor.QTensorError, match=r"SearchResult\.save wrote"):
        qtensor.model_report({"0.weight": torch.ones(2)}, search=path)
    with pytest.raises(qtensor.ArgumentTypeError, match="a model is a path"):
        qtensor.model_report(3)
    report = qtensor.model_report({"w": torch.ones(2)})
    with pytest.raises(qtensor.QTensorError, match="which exists"):
        report.save(path)
    report.save(path, overwrite=True)
    assert path.read_text() == report.html()
    with pytest.raises(qtensor.QTensorError, match="No such file"):
        report.save(tmp_path / "absent" / "report.html")


def test_the_command(tmp_path):
    pytest.importorskip("typer", reason="the extra 'cli' is not installed")
    testing = importlib.import_module("typer.testing")
    cli = importlib.import_module("qtensor.cli")

    def invoke(*args):
        return testing.CliRunner().invoke(cli.app, ["report", *map(str, args)])

    out = tmp_path / "page.html"
    done = invoke(EXAMPLES / "ct_nvfp4", "-o", out)
    assert done.exit_code == 0, done.output
    assert "2 tensors, 6,656 values" in done.output
    assert out.read_text().startswith("<!doctype html>")
    done = invoke(EXAMPLES / "ct_nvfp4", "-o", out)
    assert done.exit_code == 2
    assert "pass --overwrite." in done.stderr
    assert invoke(EXAMPLES / "ct_nvfp4", "-o", out, "--overwrite").exit_code == 0
    assert invoke("absent").exit_code == 2
    done = invoke(
        EXAMPLES / "ct_nvfp4", "--against", EXAMPLES / "gptoss_mxfp4", "-o", tmp_path / "x"
    )
    assert done.exit_code == 2
    assert "name and shape of a quantized one" in done.stderr
