"""Benchmark of quantization-aware training: what a model loses with and without it.

``python -m benchmarks.qat --model small_gpt.pt [--quick] [--output DIR]`` quantizes the language
model of ``examples/small_gpt.py`` (trained here if the file is missing) after training, and by
distillation (``examples/distill.py``).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import qtensor
from benchmarks import machine, suite
from benchmarks.quality import Rows, parser
from benchmarks.report import Column, Report, Row
from benchmarks.rounding import Part, language_model
from benchmarks.settings import settings as settings_of
from examples import distill, small_gpt
from qtensor.weights.calibrated import CalibratedInput

TITLE = "Quantization-aware training beside rounding after training"
TEXT = (
    "Perplexity of a byte for the model of `examples/small_gpt.py` ({size:.1f} million "
    "parameters), in {windows} windows of files that no training has seen; float32 gives "
    "{plain:.4f}. All linear layers are quantized; W4A4 quantizes their inputs in the same "
    "format, with factors from each input. `nearest` and `gptq_mse` are roundings of "
    "`qtensor.quantize_` after training ({batches} windows of the training files are the "
    "calibration). `qat`: `qtensor.prepare_qat_`, {steps} steps of distillation from the "
    "float32 model on training files (`examples/distill.py`), `qtensor.convert_qat_`; the "
    "logits before and after the conversion were equal in every bit in each row. The last "
    "column is the share of the loss of `nearest` that is left after `qat`. One seed."
)
FORMATS = ("mxfp4", "nvfp4")
STEPS = {True: 3, False: distill.STEPS}
NAME = "Perplexity of the GPT"


def with_inputs(model: nn.Module, format: str) -> None:
    """Let the quantized layers of a model quantize their inputs too."""
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    qtensor.Calibration(dict.fromkeys(names, CalibratedInput(format))).apply(model)


def case_of(format: str, activations: bool) -> str:
    """Return the first column of a row."""
    return f"{format}, {'W4A4' if activations else 'W4A16'}"


def measured(part: Part, format: str, activations: bool, c: small_gpt.Config, steps: int) -> Row:
    """Return the perplexities of one format.

    Raises:
        RuntimeError: the conversion changes the logits.
    """
    model, calibration, score = part
    train, held_out = small_gpt.corpus()
    plain = score(model)
    row: Row = {"model": NAME, "case": case_of(format, activations)}
    for rounding in ("nearest", "gptq_mse"):
        rounded = copy.deepcopy(model)
        inputs = calibration if rounding != "nearest" else None
        qtensor.quantize_(rounded, format, rounding=rounding, calibration=inputs)
        if activations:
            with_inputs(rounded, format)
        row[rounding] = score(rounded)
    student = copy.deepcopy(model)
    qtensor.prepare_qat_(student, format, activations=activations)
    distill.distill(student, model, train, c, steps)
    tokens = small_gpt.windows(held_out, 4, c.context, seed=0)
    with torch.no_grad():
        trained = student(tokens)
        qtensor.convert_qat_(student)
        if not torch.equal(student(tokens), trained):
            raise RuntimeError(f"{row['case']}: the conversion changed the logits")
    row["qat"] = score(student)
    row["left"] = (row["qat"] - plain) / (row["nearest"] - plain)
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the results."""
    options = parser("qat", __doc__).parse_args(arguments)
    settings = settings_of(options)
    windows, batches = (64, 16) if options.quick else (256, 128)
    part = language_model(options.model, options.quick, windows, batches)
    _, c = small_gpt.load(options.model)
    steps = STEPS[options.quick]
    rows = Rows(options.rows)
    for format in FORMATS:
        for activations in (False, True):
            if not rows.has({"model": NAME, "case": case_of(format, activations)}):
                rows.add(measured(part, format, activations, c, steps))
    size = sum(p.numel() for p in part[0].parameters()) / 1e6
    facts: dict[str, Any] = {"size": size, "windows": windows, "batches": batches, "steps": steps}
    text = TEXT.format(plain=part[2](part[0]), **facts)
    columns = (
        Column("case", "format"),
        Column("nearest", "`nearest`", 4),
        Column("gptq_mse", "`gptq_mse`", 4),
        Column("qat", "`qat`", 4),
        Column("left", "loss left", 2),
    )
    here = machine.environment(settings.threads, {})
    report = Report("qat", TITLE, text, here, columns, ("model",), tuple(rows.measured), ())
    return suite.finish(report, settings)


if __name__ == "__main__":
    sys.exit(main())
