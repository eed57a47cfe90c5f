"""The log of ``qtensor.debug.record``: lines, columns, table; and the errors of a recording."""

from __future__ import annotations

import json

import pytest
import torch
from debug_cases import inputs, plain_model
from torch import nn

import qtensor
from qtensor.debug.log import COLUMNS

# ---- outputs


def test_lines_columns_and_table(tmp_path):
    path = tmp_path / "log.jsonl"
    model = plain_model(2)
    with qtensor.debug.record(model, format="mxfp8", jsonl=path) as log:
        model(inputs())
        model(inputs())
        # The first step is on the disk already.
        assert len(path.read_text().splitlines()) == 6
        assert len(log.records) == 12
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [tuple(row) for row in rows] == [COLUMNS] * 12
    assert [(r["step"], r["layer"], r["role"]) for r in rows] == [
        (r.step, r.layer, r.role) for r in log.records
    ]
    assert rows[0]["sqnr_db"] == log.records[0].sqnr_db
    assert rows[2]["sqnr_db"] is None
    columns = log.to_dict()
    assert list(columns) == list(COLUMNS)
    assert columns["amax"] == [r.amax for r in log.records]
    shown = log.table(2, sort="amax").splitlines()
    assert len(shown) == 4
    assert shown[0].split()[:3] == ["layer", "role", "quantizer"]
    assert shown[-1] == "... and 4 more tensors"
    page = log._repr_html_()
    assert page.startswith("<pre>12 records of 2 layers in 2 steps")
    rows = page.count("<tr>")
    assert rows == 1 + len(log.table().splitlines()[1:]) == 7
    assert page.count("<td>") == 6 * 13
    lowest = min((r for r in log.records if r.quantizer), key=lambda r: r.sqnr_db)
    assert str(log).splitlines()[2].split()[:3] == [lowest.layer, lowest.role, "mxfp8"]


def test_memory_is_bounded(tmp_path):
    model = plain_model(1)
    path = tmp_path / "log.jsonl"
    with qtensor.debug.record(model, keep=4, jsonl=path) as log:
        for _ in range(5):
            model(inputs())
    assert [r.step for r in log.records] == [3, 4, 4, 4]
    assert log.dropped == 11
    assert "11 older records were removed" in str(log)
    assert len(path.read_text().splitlines()) == 15


# ---- what is refused


def record_with(**options):
    return qtensor.debug.record(plain_model(2), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "nothing.*"}, r"each pattern .* got 'nothing\.\*'\. The layers are: 0, 1\."),
        ({"layers": ["0", "x"]}, "each pattern of layers must match a name; got 'x'"),
        ({"roles": ["inputs"]}, "a role is one of input, weight, .*; got 'inputs'"),
        ({"format": {"in": "fp8"}}, "a role is one of input, weight, .*; got 'in'"),
        ({"format": "fp9"}, "fp9"),
        ({"format": "fp8_delayed"}, 'no factor from earlier steps; .* Try "fp8"'),
        ({"every": 0}, "every must be a positive integer; got 0"),
        ({"keep": True}, "keep must be a positive integer; got True"),
        ({"count": "calls"}, 'count must be "forward" or "manual"; got \'calls\''),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(qtensor.QTensorError, match=message):
        record_with(**options)


def test_models_that_cannot_be_recorded():
    with pytest.raises(qtensor.ArgumentTypeError, match=r"must be a torch\.nn\.Module; got dict"):
        qtensor.debug.record({})
    with pytest.raises(qtensor.QTensorError, match="must have a linear layer"):
        qtensor.debug.record(nn.Sequential(nn.ReLU()))


def test_a_reference_without_the_weight():
    model = plain_model(1)
    model[0].weight = nn.Parameter(qtensor.quantize(model[0].weight.detach(), "mxfp8"))
    recording = qtensor.debug.record(model, reference={"other": torch.ones(2)})
    with pytest.raises(qtensor.QTensorError, match=r"must hold 0\.weight .*no such tensor"):
        recording.__enter__()
    assert "forward" not in model[0].__dict__


def test_a_closed_recording():
    recording = record_with(count="manual")
    with recording as log:
        log.step()
    rule = "inside `with qtensor.debug.record"
    with pytest.raises(qtensor.QTensorError, match=rule):
        log.step()
    with pytest.raises(qtensor.QTensorError, match="a recording is entered once"):
        recording.__enter__()
    with record_with() as log:
        with pytest.raises(qtensor.QTensorError, match='Pass count="manual"'):
            log.step()
        with pytest.raises(qtensor.QTensorError, match="sort must be one of sqnr_db"):
            log.table(sort="size")
        with pytest.raises(qtensor.QTensorError, match="a role is one of"):
            log.table(role="x")
