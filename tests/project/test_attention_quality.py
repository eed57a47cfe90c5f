"""benchmarks.attention_quality at tiny sizes, and the table in the docs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from benchmarks import attention_quality as quality
from examples import small_gpt

pytestmark = [
    pytest.mark.project,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

ROOT = Path(__file__).parents[2]
TINY = small_gpt.Config(width=128, heads=2, layers=1, hidden=128, context=16, batch=4, steps=2)


@pytest.fixture
def tiny(text, monkeypatch):
    """Tiny models, and few formats."""
    monkeypatch.setattr(quality, "GPT", TINY)
    monkeypatch.setattr(quality, "LLAMA", TINY)
    monkeypatch.setattr(quality, "FORMATS", (("bfloat16", "bfloat16"), ("fp8_rowwise", "mxfp4")))
    return text


def test_rows(tiny, tmp_path, capsys):
    """Every case has all values; models are trained once."""
    paths = {name: tmp_path / f"{name}.pt" for name in ("gpt", "llama")}
    arguments = [text for name, path in paths.items() for text in (f"--{name}", str(path))]
    arguments += ["--quick", "--threads", str(torch.get_num_threads()), "--output", str(tmp_path)]
    assert quality.main(arguments) == 0
    (path,) = tmp_path.glob("attention_quality*.json")
    data = json.loads(path.read_text())
    rows = {(row["case"], row["option"]): row for row in data["rows"]}
    mixed = "fp8_rowwise, mxfp4"
    assert list(rows) == [("bfloat16", "none"), *((mixed, each) for each in quality.OPTIONS)]
    keys = {column.key for column in quality.COLUMNS}
    assert all(row.keys() == keys for row in rows.values())
    assert rows["bfloat16", "none"]["bits"] == pytest.approx(16, abs=0.01)
    assert rows[mixed, "none"]["bits"] == pytest.approx((8.25 + 4.25) / 2, abs=0.01)
    for name in ("gpt_db", "llama_db", "outliers_db", "rope_db"):
        assert rows["bfloat16", "none"][name] > 40 > rows[mixed, "none"][name] > 10
    exact = [
        float(value) for value in re.findall(r"quantization: (\S+) and (\S+)\. ", data["text"])[0]
    ]
    for value, name in zip(exact, ("gpt_perplexity", "llama_perplexity"), strict=True):
        assert rows["bfloat16", "none"][name] == pytest.approx(value, rel=1e-3)
        assert rows[mixed, "none"][name] != rows["bfloat16", "none"][name]
    saved = {name: path.read_bytes() for name, path in paths.items()}
    assert quality.main(arguments) == 0
    assert saved == {name: path.read_bytes() for name, path in paths.items()}
    assert json.loads(path.read_text())["rows"] == data["rows"]


def test_the_models_use_the_attention_that_is_measured(text):
    """Each layer of both models calls it; without a cache's error, logits are the model's own."""
    tokens = text[:34].view(2, 17).long()[:, :16]
    for model in (small_gpt.GPT(TINY), quality.llama(TINY)):
        seen = quality.seen_by(model.eval(), tokens)
        assert [q.shape[0] for q, _, _ in seen] == [2] * TINY.layers
        with torch.no_grad():
            want = model(tokens)
            with quality.AttentionBy(quality.plain):
                assert torch.equal(model(tokens), want)
            with quality.AttentionBy(lambda q, k, v: torch.zeros_like(q)):
                assert not torch.equal(model(tokens), want)


def test_the_mean_is_that_of_the_first_half(text):
    """A cache in float32 has the attention of the operands, with every option."""
    q, k, v = quality.outliers(40, rotary=True, heads=2)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for option in quality.OPTIONS[:2]:
        case = quality.Case("float32", "float32", option)
        assert (case.attend(q, k, v) - want).abs().max() < 1e-4
        assert quality.decibels(case, [(q, k, v)]) > 80
    none, mean, residual = (
        quality.decibels(
            quality.Case("mxfp4", "bfloat16", option), [quality.outliers(64, rotary=False)]
        )
        for option in quality.OPTIONS
    )
    assert min(mean, residual) > none + 2


def test_the_document_has_the_measured_values():
    """docs/attention.md repeats columns of the results; the options of a format in a cell."""
    data = json.loads((ROOT / "benchmarks/results/attention_quality_cpu.json").read_text())
    document = (ROOT / "docs/attention.md").read_text()
    digits = {"llama_db": 1, "rope_db": 1, "gpt_perplexity": 3, "llama_perplexity": 3}
    cases: dict[str, list[Any]] = {}
    for row in data["rows"]:
        cases.setdefault(row["case"], []).append(row)
    assert list(cases) == list(dict.fromkeys(case.name for case in quality.cases()))
    del cases["bfloat16"]
    for case, rows in cases.items():
        cells = ["/".join(f"{row[key]:.{n}f}" for row in rows) for key, n in digits.items()]
        line = f"| {case} | {rows[0]['bits']:.2f} | {' | '.join(cells)} |"
        assert line in document, line
    found = re.findall(r"quantization: (\S+) and (\S+)\. ", data["text"])[0]
    text = " and ".join(f"{float(value):.3f}" for value in found)
    assert f"without quantization {text}" in document, text
