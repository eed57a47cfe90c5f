"""Benchmark of `rotate_` and `smooth_`, by what models of four and six bits lose.

``python -m benchmarks.outliers --model small_gpt.pt [--quick] [--rows FILE] [--output DIR]``
quantizes the models of ``benchmarks/rounding.py`` after each preparation, with inputs in high
precision and with inputs in the format of the weights.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

import qtensor
from benchmarks import machine, suite
from benchmarks.quality import Rows, parser
from benchmarks.report import Column, Report
from benchmarks.rounding import NAMES, Part, language_model, sentence_model
from benchmarks.settings import settings as settings_of
from qtensor.modules.input_hook import QUANTIZER, set_input_step
from qtensor.modules.input_quantizer import InputQuantizer

TITLE = "What rotations and folded scales save"
TEXT = (
    "The linear layers of a model are prepared, then quantized by `qtensor.quantize_` with each "
    "`rounding`. *rotate*: `rotate_`; *smooth*: `smooth_` for the formats of the row; *both*: in "
    "this order; *values=False*: of `rotate_`. *inputs*: the format to which each layer rounds its "
    "inputs, or float32. The models and their scores are those of [rounding](rounding_cpu.md), "
    "with {windows} windows and {batches} windows of calibration (GPT), {unseen} docstrings and "
    "{seen} for calibration "
    "(MiniLM). In float32, the GPT has a perplexity of {plain:.4f}, and MiniLM a cosine of 1. "
    "MiniLM has no rows for *both, values=False*: each of its layers then rotates its inputs at "
    "each call, and `smooth_` finds no place for scales. One seed."
)
FORMATS = ("mxfp4", "nvfp4", "mxfp6")
ROUNDINGS = ("nearest", "mse", "gptq_mse")
PREPARATIONS = ("none", "smooth", "rotate", "both", "rotate, values=False", "both, values=False")
PARTS = ("gpt", "minilm")
ABSENT = {("minilm", "both, values=False")}
"""Each layer of an encoder then rotates its inputs at each call, and `smooth_` finds no place."""


def prepared(part: Part, kind: str, fmt: str, inputs: str | None) -> nn.Module:
    """Return a copy of a model after a preparation."""
    model, calibration, _ = part
    model = copy.deepcopy(model)
    if kind.startswith(("rotate", "both")):
        qtensor.rotate_(model, calibration[:1], values="values=False" not in kind)
    if kind.startswith(("smooth", "both")):
        qtensor.smooth_(model, fmt, calibration, inputs=inputs)
    return model


def measure(part: Part, kind: str, fmt: str, inputs: str | None) -> dict[str, float]:
    """Return the score of each rounding."""
    _, calibration, score = part
    base, scores = prepared(part, kind, fmt, inputs), {}
    for rounding in ROUNDINGS:
        model = copy.deepcopy(base)
        needs = calibration if rounding == "gptq_mse" else None
        qtensor.quantize_(model, fmt, rounding=rounding, calibration=needs)
        for layer in [m for m in model.modules() if isinstance(m, nn.Linear)]:
            if inputs is not None:
                set_input_step(layer, QUANTIZER, InputQuantizer(inputs))
        scores[rounding] = score(model)
    return scores


def cases(part: str, formats: Sequence[str]) -> list[dict[str, Any]]:
    """Return what names each row of a part, in the order of the table."""
    return [
        {"model": NAMES[part], "weights": fmt, "inputs": inputs, "kind": kind}
        for fmt in formats
        for inputs in ("float32", fmt)
        for kind in PREPARATIONS
        if (part, kind) not in ABSENT
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the results."""
    options = parser("outliers", __doc__, PARTS).parse_args(arguments)
    settings = settings_of(options)
    sizes = (64, 16, 32, 32) if options.quick else (128, 64, 64, 64)
    windows, batches, seen, unseen = sizes
    rows = Rows(options.rows)
    gpt = language_model(options.model, options.quick, windows, batches)
    plain = gpt[2](gpt[0])
    makers: dict[str, Callable[[], Part]] = {
        "gpt": lambda: gpt,
        "minilm": lambda: sentence_model(seen, unseen),
    }
    formats = FORMATS[:1] if options.quick else FORMATS
    for name in options.parts:
        part = makers[name]()
        for row in cases(name, formats):
            if not rows.has(row):
                fmt, inputs = row["weights"], row["inputs"]
                given = None if inputs == "float32" else inputs
                rows.add(row | measure(part, row["kind"], fmt, given))
    every = [row for name in PARTS for row in cases(name, formats)]
    measured = tuple(own for row in every for own in rows.measured if row.items() <= own.items())
    present = {row["model"] for row in measured}
    absent = [f"{name}: not measured in this run" for name in NAMES.values() if name not in present]
    for name in present:
        left = [row for row in every if row["model"] == name and not rows.has(row)]
        cells = [f"{row['weights']}, inputs {row['inputs']}, {row['kind']}" for row in left]
        absent += [f"{name}: not measured in this run: {'; '.join(cells)}"] if left else []
    text = TEXT.format(windows=windows, batches=batches, plain=plain, unseen=unseen, seen=seen)
    columns = (
        Column("weights", "weights"),
        Column("inputs", "inputs"),
        Column("kind", "preparation"),
        *(Column(rounding, f"`{rounding}`", 4) for rounding in ROUNDINGS),
    )
    here = machine.environment(settings.threads, {})
    report = Report("outliers", TITLE, text, here, columns, ("model",), measured, tuple(absent))
    return suite.finish(report, settings)


if __name__ == "__main__":
    sys.exit(main())
