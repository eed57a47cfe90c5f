"""examples/distill.py and benchmarks/qat.py at tiny sizes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

import qtensor
from benchmarks import qat
from examples import distill, small_gpt

pytestmark = pytest.mark.project
TINY = small_gpt.Config(
    width=64, heads=2, layers=1, hidden=64, context=16, batch=4, steps=3, learning_rate=1e-2
)


def test_distillation_brings_a_model_nearer(text, tmp_path, monkeypatch, capsys):
    """The program prints lower perplexities, equal bits, and writes the quantized weights."""
    path, output = tmp_path / "gpt.pt", tmp_path / "out"
    config = small_gpt.Config(**{**vars(TINY), "steps": 60})
    small_gpt.save(small_gpt.train(text, config), config, path)
    capsys.readouterr()
    arguments = ["--model", str(path), "--format", "mxfp4", "--steps", "60", "--windows", "8"]
    monkeypatch.setattr("sys.argv", ["distill", *arguments, "--output", str(output)])
    distill.main()
    printed = capsys.readouterr().out
    first = printed.split("perplexity: ")[1].split()
    plain, rounded = float(first[0]), float(first[2])
    after = float(printed.split("perplexity: ")[2].split()[0])
    assert "equal bits: True" in printed
    assert after - plain < 0.7 * (rounded - plain)
    stored = qtensor.checkpoints.load_state_dict(str(output))
    assert stored["blocks.0.q_proj.weight"].quantizer.format == "mxfp4"


def test_the_table(text, tmp_path, monkeypatch, capsys):
    """A row for each format and kind; an interrupted run goes on."""
    monkeypatch.setattr(qat, "FORMATS", ("mxfp4",))
    path = tmp_path / "gpt.pt"
    small_gpt.save(small_gpt.GPT(TINY).eval(), TINY, path)
    threads = str(torch.get_num_threads())
    common = ["--quick", "--threads", threads, "--output", str(tmp_path), "--model", str(path)]
    qat.main([*common, "--rows", str(tmp_path / "rows")])
    (file,) = tmp_path.glob("qat*.json")
    rows = json.loads(file.read_text())["rows"]
    assert [row["case"] for row in rows] == ["mxfp4, W4A16", "mxfp4, W4A4"]
    for row in rows:
        assert all(math.isfinite(row[name]) for name in ("nearest", "gptq_mse", "qat", "left"))
    assert "| `mxfp4, W4A4` |" in file.with_suffix(".md").read_text()
    capsys.readouterr()
    qat.main([*common, "--rows", str(tmp_path / "rows")])
    assert "case" not in capsys.readouterr().out


def test_the_document_has_the_measured_rows():
    root = Path(__file__).parents[2]
    results = (root / "benchmarks/results/qat_cpu.md").read_text()
    rows = re.findall(r"^\| `.*", results, re.MULTILINE)
    assert len(rows) == 4
    document = (root / "docs/training.md").read_text()
    assert all(row in document for row in rows)
