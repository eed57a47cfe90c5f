"""benchmarks/rounding.py and examples/small_gpt.py at tiny sizes, and the tables in the docs."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks import outliers, rounding
from examples import small_gpt
from qtensor.weights.rounding import ROUNDINGS

pytestmark = pytest.mark.project


ROOT = Path(__file__).parents[2]
TINY = small_gpt.Config(
    width=128, heads=2, layers=1, hidden=128, context=16, batch=4, steps=3, learning_rate=1e-2
)


# ---- the model
# -------------------------------------------------------------------------------------------------


def test_training_and_files(text, tmp_path, capsys):
    """The seed decides the weights; training lowers the perplexity; a file keeps both."""
    untrained = small_gpt.GPT(TINY).eval()
    config = small_gpt.Config(**{**vars(TINY), "steps": 40})
    model = small_gpt.train(text, config)
    assert not model.training
    before, after = (small_gpt.perplexity(m, text, 16, 8) for m in (untrained, model))
    assert after < 0.7 * before
    again = small_gpt.train(text, config)
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    small_gpt.save(model, config, tmp_path / "gpt.pt")
    loaded, sizes = small_gpt.load(tmp_path / "gpt.pt")
    assert sizes == config
    assert all(map(torch.equal, model.parameters(), loaded.parameters()))
    assert "0 5." in capsys.readouterr().out.splitlines()[0]


def test_perplexity(text):
    """The perplexity is exp of the mean cross-entropy over the second half of each window."""
    guess = nn.Module()
    guess.forward = lambda tokens: torch.zeros(*tokens.shape, 256)
    assert small_gpt.perplexity(guess, text, 16, 5) == pytest.approx(256)

    class Knows(nn.Module):
        """Knows the next byte in the first half of a window alone."""

        def forward(self, tokens):
            logits = 50.0 * functional.one_hot((tokens - 64) % 16 + 65, 256)
            logits[:, 8:] = 0
            return logits

    assert small_gpt.perplexity(Knows(), text, 16, 5) == pytest.approx(256)
    assert small_gpt.perplexity(Knows(), text, 32, 5) == pytest.approx(256)
    rows = small_gpt.windows(text, 3, 7, seed=1)
    assert rows.shape == (3, 7)
    assert torch.equal(rows, small_gpt.windows(text, 3, 7, seed=1))
    assert not torch.equal(rows, small_gpt.windows(text, 3, 7, seed=2))


@pytest.mark.nightly(reason="reads the sources of the standard library")
def test_the_corpus():
    train, held_out = small_gpt.corpus()
    assert train.dtype == held_out.dtype == torch.uint8
    assert len(train) > 4 * len(held_out) > 0
    assert b"def " in bytes(held_out[:100_000].tolist())


# ---- the benchmark
# -------------------------------------------------------------------------------------------------


def run(folder, *arguments):
    """Run the benchmark on a tiny model, and return the report as data and as text."""
    path = folder / "gpt.pt"
    if not path.exists():
        small_gpt.save(small_gpt.GPT(TINY).eval(), TINY, path)
    common = ("--quick", "--threads", str(torch.get_num_threads()), "--output", str(folder))
    rounding.main([*common, "--model", str(path), "--rows", str(folder / "rows"), *arguments])
    (data,) = folder.glob("rounding*.json")
    return json.loads(data.read_text()), data.with_suffix(".md").read_text()


def test_rows(text, tmp_path, monkeypatch, capsys):
    """Every rounding has a score; rows that are missing are listed; a second run measures none."""
    monkeypatch.setattr(rounding, "FORMATS", ("mxfp4", "mxfp8"))
    monkeypatch.setattr(rounding, "BUDGETS", (6.0,))
    data, document = run(tmp_path, "--parts", "gpt")
    assert [row["case"] for row in data["rows"]] == ["mxfp4", "mxfp8"]
    for row in data["rows"]:
        assert all(math.isfinite(row[name]) for name in ROUNDINGS)
    first, second = data["rows"]
    assert first["bits"] == pytest.approx(4.25)
    assert second["bits"] == pytest.approx(8.25)
    assert data["absent"] == [
        "Perplexity of the GPT: `search, 6.0 bits`: not measured in this run",
        "Mean cosine of MiniLM: `mxfp4`, `mxfp8`, `search, 6.0 bits`: not measured in this run",
    ]
    assert "| `mxfp4` | 4.25 |" in document
    measured = (tmp_path / "rows").read_text()
    capsys.readouterr()
    assert run(tmp_path, "--parts", "gpt")[0]["rows"] == data["rows"]
    assert (tmp_path / "rows").read_text() == measured
    assert "case" not in capsys.readouterr().out


def test_outliers(text, tmp_path, monkeypatch, capsys):
    """Each preparation has a score for each rounding, with inputs in both precisions."""
    path = tmp_path / "gpt.pt"
    small_gpt.save(small_gpt.GPT(TINY).eval(), TINY, path)
    arguments = ("--quick", "--threads", str(torch.get_num_threads()), "--output", str(tmp_path))
    arguments += ("--model", str(path), "--rows", str(tmp_path / "rows"), "--parts", "gpt")
    outliers.main(arguments)
    (found,) = tmp_path.glob("outliers*.json")
    rows = json.loads(found.read_text())["rows"]
    kinds = [(row["inputs"], row["kind"]) for row in rows]
    inputs = ("float32", "mxfp4")
    assert kinds == [(each, kind) for each in inputs for kind in outliers.PREPARATIONS]
    assert all(math.isfinite(row[name]) for row in rows for name in outliers.ROUNDINGS)
    measured = (tmp_path / "rows").read_text()
    outliers.main(arguments)
    assert (tmp_path / "rows").read_text() == measured


@pytest.mark.nightly(reason="a search, and sixty measurements of a model")
def test_searches(text, tmp_path, monkeypatch):
    monkeypatch.setattr(rounding, "FORMATS", ("nvfp4",))
    monkeypatch.setattr(rounding, "BUDGETS", (4.6, 6.4))
    data, _ = run(tmp_path, "--parts", "gpt-search", "gpt")
    rows = {row["case"]: row for row in data["rows"]}
    assert list(rows) == ["nvfp4", "search, 4.6 bits", "search, 6.4 bits"]
    assert rows["search, 4.6 bits"]["bits"] <= 4.6
    assert 4.6 < rows["search, 6.4 bits"]["bits"] <= 6.4


@pytest.mark.nightly(reason="perplexity of the whole model")
def test_a_missing_model_is_trained(text, tmp_path, monkeypatch):
    """Thirty steps if the run is quick; the file has the sizes of the model."""
    monkeypatch.setattr(rounding, "FORMATS", ())
    monkeypatch.setattr(small_gpt, "train", lambda data, config: small_gpt.GPT(config).eval())
    path = tmp_path / "new.pt"
    run(tmp_path, "--model", str(path), "--parts", "gpt")
    assert small_gpt.load(path)[1] == small_gpt.Config(steps=30)


@pytest.mark.nightly(reason="a real model in two formats")
def test_the_sentence_model():
    model, calibration, score = rounding.sentence_model(32, 8)
    assert score(model) == pytest.approx(1.0, abs=1e-5)
    assert len(calibration) == 1
    assert set(calibration[0]) == {"input_ids", "attention_mask"}
    assert len(set(rounding.docstrings(40))) == 40


# ---- the documents
# -------------------------------------------------------------------------------------------------


def test_the_documents_have_the_measured_rows():
    """docs/format_search.md repeats rows of the results, and states shares of the loss."""
    results = ROOT / "benchmarks/results/rounding_cpu"
    document = (ROOT / "docs/format_search.md").read_text()
    rows = re.findall(r"^\| `.*", results.with_suffix(".md").read_text(), re.MULTILINE)
    gained = document.partition("## What rounding gains")[2].partition("\n## ")[0]
    repeated = re.findall(r"^\| `.*", gained, re.MULTILINE)
    assert len(repeated) == 6
    assert set(repeated) <= set(rows)
    data = json.loads(results.with_suffix(".json").read_text())
    assert len(rows) == len(data["rows"]) > 10
    plain = float(re.search(r"float32 gives (\d+\.\d+)", data["text"])[1])
    shares = {name: [] for name in ROUNDINGS}
    for row in data["rows"]:
        if row["case"] in ("mxfp4", "nvfp4"):
            best = plain if row["model"].startswith("Perplexity") else 1.0
            for name in ROUNDINGS:
                gained = (row["nearest"] - row[name]) / (row["nearest"] - best)
                shares[name].append(100 * gained)
    scales = shares["mse"] + shares["weighted_mse"]
    text = " ".join(document.split())
    assert f"`gptq_mse` removes {spread(shares['gptq_mse'])}% of the loss" in text
    assert f"scales by error alone remove {spread(scales)}%" in text
    assert f"`gptq` without them removes {spread(shares['gptq'])}%" in text


def spread(values):
    """The range of percentages; below ten with one digit after the point."""
    low, high = min(values), max(values)
    return f"{low:.1f} to {high:.0f}" if low < 10 else f"{low:.0f} to {high:.0f}"
