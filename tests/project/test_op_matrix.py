"""The script behind docs/op_matrix.md covers every op and sees lies; `make docs-check` runs it."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

import qtensor
from qtensor.storage.ops.dispatch import classify

pytestmark = pytest.mark.project


ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    module = importlib.import_module("generate_op_matrix")
    yield module
    for name in ("generate_op_matrix", "op_matrix_samples"):
        sys.modules.pop(name, None)


@pytest.fixture
def operands(script):
    return script.operands(qtensor.quantizer("mxfp8"))


def test_every_op_of_a_table_has_a_sample(script):
    script.check_samples()


@pytest.mark.parametrize("part", range(5))
def test_a_missing_sample_is_named(script, monkeypatch, part):
    chosen = script.CLASSES[part]
    left = dict(chosen.samples)
    name = sorted(left)[0]
    left.pop(name)
    if chosen.name == "raises":
        left["add"] = lambda o: None  # in a table, so not an op that raises
        name = "add"
    changed = script.OpClass(chosen.name, chosen.title, chosen.meaning, chosen.table, left)
    parts = (*script.CLASSES[:part], changed, *script.CLASSES[part + 1 :])
    monkeypatch.setattr(script, "CLASSES", parts)
    with pytest.raises(script.ProbeError, match=f"'{name}'"):
        script.check_samples()


def test_the_tables_and_classify_agree(script):
    """An op's overloads have the class of the table that names it."""
    for part in script.CLASSES[:4]:
        for name in part.table:
            packet = getattr(torch.ops.aten, name)
            assert {classify(getattr(packet, o)) for o in packet.overloads()} == {part.name}, name
    for name in script.CLASSES[4].table:
        packet = getattr(torch.ops.aten, name)
        assert {classify(getattr(packet, o)) for o in packet.overloads()} == {"raises"}, name


def test_no_op_is_in_two_tables(script):
    names = [name for part in script.CLASSES for name in part.table]
    assert len(names) == len(set(names))


def _off_by_one_code(o):
    if not isinstance(o.matrix, qtensor.QuantizedTensor):
        return o.matrix
    result = o.matrix.clone()
    result._rowwise_data[3, 5] ^= 1
    return result


def _written_nowhere(o):
    """What a naive fallback does to an in-place op: the result is lost."""
    quantized = isinstance(o.matrix, qtensor.QuantizedTensor)
    return o.matrix.clone() if quantized else o.matrix.clone().mul_(2)


def _raises(error):
    def sample(o):
        if isinstance(o.matrix, qtensor.QuantizedTensor):
            raise error
        return o.matrix

    return sample


@pytest.mark.parametrize(
    ("kind", "sample", "message"),
    [
        ("exact", _off_by_one_code, "other values"),
        ("exact", lambda o: o.matrix + 0, "the result is Tensor, but the op is exact"),
        (
            "exact",
            lambda o: o.matrix[:32] if isinstance(o.matrix, qtensor.QuantizedTensor) else o.matrix,
            "torch gives",
        ),
        ("exact", _raises(RuntimeError("boom")), "raised RuntimeError, not a QTensorError: boom"),
        (
            "exact",
            lambda o: [o.matrix] * (1 + isinstance(o.matrix, qtensor.QuantizedTensor)),
            "2 results, torch gives 1",
        ),
        (
            "dequantizes",
            lambda o: o.matrix.clone(),
            "the result is MXFP8Tensor, but the op is dequantizes",
        ),
        (
            "dequantizes",
            _raises(qtensor.QTensorError("no")),
            "dequantizes by its table, but it raised no",
        ),
        (
            "dequantizes",
            lambda o: (o.matrix * 1.0).add_(isinstance(o.matrix, qtensor.QuantizedTensor)),
            "other values",
        ),
        (
            "computes",
            lambda o: torch.mm(
                o.matrix, o.square + isinstance(o.matrix, qtensor.QuantizedTensor) * 1e-3
            ),
            "other values",
        ),
        ("in place", _written_nowhere, "other values"),
        ("raises", lambda o: o.matrix.clone(), "in no table, but it returned MXFP8Tensor"),
    ],
)
def test_a_cell_that_lies_is_found(script, operands, kind, sample, message):
    with pytest.raises(script.ProbeError, match=message):
        script.probe(kind, "made_up", sample, operands)


def test_honest_cells_pass(script, operands):
    assert script.probe("exact", "clone", lambda o: o.matrix.clone(), operands) == "exact"
    assert script.probe("exact", "slice", lambda o: o.matrix[:, 3:7], operands) == "raises"
    assert (
        script.probe("in place", "mul_", lambda o: o.matrix.clone().mul_(2), operands) == "in place"
    )


@pytest.mark.parametrize(("text", "status"), [("fresh", 0), ("stale", 1), (None, 1)])
def test_check_compares_and_writes_nothing(script, monkeypatch, tmp_path, capsys, text, status):
    path = tmp_path / "op_matrix.md"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(script, "DOCUMENT", path)
    monkeypatch.setattr(script, "document", lambda: "fresh")
    monkeypatch.setattr(sys, "argv", ["generate_op_matrix.py", "--check"])
    assert script.main() == status
    assert (
        "is out of date. Run: python docs/generate_op_matrix.py" in capsys.readouterr().err
    ) == bool(status)
    assert (path.read_text() if path.exists() else None) == text


def test_without_check_it_writes(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "DOCUMENT", tmp_path / "op_matrix.md")
    monkeypatch.setattr(script, "document", lambda: "fresh")
    monkeypatch.setattr(sys, "argv", ["generate_op_matrix.py"])
    assert script.main() == 0
    assert (tmp_path / "op_matrix.md").read_text() == "fresh"
