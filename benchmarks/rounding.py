"""Benchmark of the roundings of weights, and of the format search, by what models lose.

``python -m benchmarks.rounding --model small_gpt.pt [--quick] [--output DIR]`` measures the
perplexity of the language model of ``examples/small_gpt.py`` (trained here if the file is missing),
and the cosine similarity of the embeddings of the demo's sentence model (extra ``demo``).
"""

from __future__ import annotations

import copy
import inspect
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtensor
from benchmarks import machine, suite
from benchmarks.quality import Rows, parser
from benchmarks.report import Column, Report, Row
from benchmarks.settings import settings as settings_of
from examples import small_gpt
from qtensor.weights.rounding import ROUNDINGS

TITLE = "What models lose by rounding their weights"
TEXT = (
    "All linear layers are quantized by `qtensor.quantize_` with each `rounding`. *GPT*: "
    "perplexity of a byte for the model of `examples/small_gpt.py` ({size:.1f} million "
    "parameters, trained on the sources of Python's standard library), in {windows} windows of "
    "files that neither training nor calibration has seen; {batches} windows of the training "
    "files are the calibration; float32 gives {plain:.4f}. *MiniLM*: mean cosine similarity of "
    "the embeddings of all-MiniLM-L6-v2 to those in float32, over the demo's eight sentences "
    "and {unseen} docstrings of the standard library; {seen} other docstrings are the "
    "calibration. *search*: the formats that `qtensor.search` finds for at most that many bits "
    "a value, from two batches of the calibration, with the metric KL (GPT) or 1 - cosine. One "
    "seed."
)
FORMATS = ("mxfp4", "nvfp4", "mxfp6(packed=True)", "mxfp8", "fp8", "fp8_rowwise", "fp8_blockwise")
BUDGETS = (4.5, 5.0, 6.0)
Score = Callable[[nn.Module], float]
Part = tuple[nn.Module, list[Any], Score]
"""A model, its calibration inputs, and the score of a quantized copy."""
PARTS = ("gpt", "gpt-search", "minilm", "minilm-search")
NAMES = {"gpt": "Perplexity of the GPT", "minilm": "Mean cosine of MiniLM"}


def searched(budget: float) -> str:
    """Return the first column of a search's row."""
    return f"search, {budget} bits"


def cases() -> list[str]:
    """Return the first columns of all rows, in the order of the tables."""
    return [*FORMATS, *map(searched, BUDGETS)]


def docstrings(count: int) -> list[str]:
    """Return first paragraphs of docstrings in the standard library, each once, shuffled."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, None] = {}
    for path in sorted(root.glob("*.py")):
        for piece in path.read_text(errors="replace").split('"""')[1::2]:
            text = " ".join(inspect.cleandoc(piece).split("\n\n")[0].split())
            if 40 <= len(text) <= 300:
                found[text] = None
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    texts = list(found)
    return [texts[i] for i in order[:count].tolist()]


class Embedding(nn.Module):
    """Token ids to normalized sentence embeddings."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return (B, hidden) of tokens (B, T)."""
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * weight).sum(1) / weight.sum(1), dim=1)


def sentence_model(seen: int, unseen: int) -> Part:
    """Return the demo's model, calibration inputs, and the mean cosine on other sentences."""
    from qtensor.demo.model import load_model  # noqa: PLC0415 - needs the extra demo
    from qtensor.demo.sentences import SENTENCES  # noqa: PLC0415

    sentences = load_model()
    model = Embedding(sentences.bert)

    def batch(texts: Sequence[str]) -> dict[str, Tensor]:
        encoded = sentences.tokenizer.encode_batch(list(texts))
        return {
            "input_ids": torch.tensor([item.ids for item in encoded]),
            "attention_mask": torch.tensor([item.attention_mask for item in encoded]),
        }

    texts = docstrings(seen + unseen)
    calibration = [batch(texts[i : i + 32]) for i in range(0, seen, 32)]
    tests = [batch(SENTENCES), batch(texts[seen:])]
    with torch.no_grad():
        references = [model(**test) for test in tests]

    @torch.no_grad()
    def score(quantized: nn.Module) -> float:
        pairs = zip(references, tests, strict=True)
        return float(torch.cat([(r * quantized(**t)).sum(-1) for r, t in pairs]).mean())

    return model, calibration, score


def language_model(path: Path, quick: bool, windows: int, batches: int) -> Part:
    """Return the GPT, calibration inputs from its training text, and its held-out perplexity."""
    train, held_out = small_gpt.corpus()
    if not path.exists():
        config = small_gpt.Config(steps=30 if quick else small_gpt.Config.steps)
        small_gpt.save(small_gpt.train(train, config), config, path)
    model, config = small_gpt.load(path)
    calibration = list(small_gpt.windows(train, batches, config.context, seed=1 << 21).split(16))
    return (
        model,
        calibration,
        lambda quantized: small_gpt.perplexity(quantized, held_out, config.context, windows),
    )


def add(rows: Rows, name: str, case: str, part: Part, formats: Callable[[], Any]) -> None:
    """Measure the scores of all roundings of the formats, unless the file has them.

    Args:
        rows: where the row is added.
        name: what is measured.
        case: the row's first column.
        part: model, calibration inputs and score.
        formats: returns what ``quantize_`` takes.
    """
    row: Row = {"model": name, "case": case}
    if rows.has(row):
        return
    (model, calibration, score), chosen = part, formats()
    for rounding, options in ROUNDINGS.items():
        quantized = copy.deepcopy(model)
        inputs = calibration if options.needs_inputs else None
        qtensor.quantize_(quantized, chosen, rounding=rounding, calibration=inputs)
        row["bits"] = bits_of(quantized)
        row[rounding] = score(quantized)
    rows.add(row)


def measure(rows: Rows, name: str, part: Part, metric: Any, searches: bool) -> None:
    """Measure every format, or the formats of a search for every budget."""
    if not searches:
        for fmt in FORMATS:
            add(rows, name, fmt, part, partial(str, fmt))
        return
    model, calibration, _ = part
    with tempfile.TemporaryDirectory(prefix="qtensor-rounding-") as folder:
        # The budgets share their measurements.
        journal = str(Path(folder) / "search.jsonl")

        def found(budget: float) -> Any:
            inputs = calibration[:2]
            return qtensor.search(
                model, inputs, budget_bits=budget, metric=metric, resume=journal
            ).formats

        for budget in BUDGETS:
            add(rows, name, searched(budget), part, partial(found, budget))


def absent_cases(measured: Sequence[Row]) -> tuple[str, ...]:
    """Return a line for each model that lacks rows."""
    lines = []
    for name in NAMES.values():
        present = {row["case"] for row in measured if row["model"] == name}
        if missing := [f"`{case}`" for case in cases() if case not in present]:
            lines.append(f"{name}: {', '.join(missing)}: not measured in this run")
    return tuple(lines)


def bits_of(model: nn.Module) -> float:
    """Return the bits of a value, with factors and padding, over all linear layers."""
    weights: list[Any] = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    return 8 * sum(w.nbytes for w in weights) / sum(w.numel() for w in weights)


def cosine_distance(reference: Tensor, output: Tensor) -> float:
    """Return one minus the mean cosine of normalized embeddings."""
    return 1 - float((reference * output).sum(-1).mean())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the results."""
    options = parser("rounding", __doc__, PARTS).parse_args(arguments)
    settings = settings_of(options)
    windows, batches, seen, unseen = (64, 16, 32, 32) if options.quick else (256, 128, 128, 256)
    rows = Rows(options.rows)
    gpt = language_model(options.model, options.quick, windows, batches)
    plain = gpt[2](gpt[0])
    print(f"float32: {plain:.4f}", flush=True)
    for part in options.parts:
        searches = part.endswith("-search")
        if part.startswith("gpt"):
            measure(rows, NAMES["gpt"], gpt, "kl", searches)
        else:
            sentences = sentence_model(seen, unseen)
            measure(rows, NAMES["minilm"], sentences, cosine_distance, searches)
    size = sum(p.numel() for p in gpt[0].parameters()) / 1e6
    text = TEXT.format(
        size=size, windows=windows, batches=batches, plain=plain, unseen=unseen, seen=seen
    )
    columns = (
        Column("case", "weights"),
        Column("bits", "bits a value", 2),
        *(Column(rounding, f"`{rounding}`", 4) for rounding in ROUNDINGS),
    )
    here = machine.environment(settings.threads, {})
    order = [(name, case) for name in NAMES.values() for case in cases()]
    known = [row for row in rows.measured if (row["model"], row["case"]) in order]
    measured = sorted(known, key=lambda row: order.index((row["model"], row["case"])))
    absent = absent_cases(measured)
    report = Report("rounding", TITLE, text, here, columns, ("model",), tuple(measured), absent)
    return suite.finish(report, settings)


if __name__ == "__main__":
    sys.exit(main())
