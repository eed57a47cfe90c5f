"""Run the demo: load, quantize, run the model, compile, report."""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import qtensor.kernels
from qtensor.demo.compile_check import check_backend, check_compile, pick_matrix
from qtensor.demo.render import View
from qtensor.demo.report import (
    CompileResult,
    DemoReport,
    FormatResult,
    SentenceResult,
    environment,
)
from qtensor.demo.sentences import SENTENCES, compare_embeddings
from qtensor.demo.sweep import choose_formats, sweep
from qtensor.demo.weights import Weights, load_weights
from qtensor.errors import BuildError, check
from qtensor.kernels.cpu import native

if TYPE_CHECKING:
    from qtensor.demo.model import SentenceModel

_OWN_WEIGHTS = "--weights gives matrices, not a model to run them in"
_NO_COMPILE = "--no-compile was given"


@dataclass(frozen=True)
class DemoOptions:
    """The options of ``qtensor demo``."""

    formats: str | None = None
    weights: Path | None = None
    json: Path | None = None
    backend: str = "aot_eager"
    compile: bool = True


def run_demo(options: DemoOptions, view: View) -> DemoReport:
    """Run every part, print each result, and write ``options.json`` if it is set.

    Raises:
        QTensorError: an option or the user's file cannot be used.
    """
    formats = choose_formats(options.formats)
    check_backend(options.backend)
    _check_json(options.json)
    with view.busy("Loading the weights"):
        weights, model = _load(options.weights)
    here = environment()
    view.header(here, weights.source)
    _have_kernels()

    swept, sentences = _quantize(weights, formats, model, view)
    view.formats(swept, weights.source)
    no_sentences = _OWN_WEIGHTS if model is None else None
    view.sentences(sentences, no_sentences)

    compiled = _compile(weights, formats, options.backend, view) if options.compile else ()
    no_compile = None if options.compile else _NO_COMPILE
    view.compiled(compiled, no_compile)

    report = DemoReport(here, weights.source, swept, sentences, no_sentences, compiled, no_compile)
    if options.json is not None:
        report.write_json(options.json)
    view.footer(report, options.json)
    return report


def _have_kernels() -> None:
    """Compile the kernels before the parts, so that the measured seconds do not include it."""
    # Without kernels the first call has warned already, and the reference is used.
    if not isinstance(native.library(), str):
        with contextlib.suppress(BuildError):
            qtensor.kernels.build()


def _check_json(path: Path | None) -> None:
    """Check before the work that the result can be written."""
    if path is None:
        return
    check(
        path.absolute().parent.is_dir() and not path.is_dir(),
        op="demo",
        rule="--json must be a file in a folder that exists",
        got=str(path),
        fix="Create the folder first, or pass another path",
    )


def _load(path: Path | None) -> tuple[Weights, "SentenceModel | None"]:
    """Load the user's matrices, or the demo's model with its own matrices."""
    if path is not None:
        return load_weights(path), None
    # Imported here because transformers takes seconds to import, and --weights does not need it.
    from qtensor.demo import model  # noqa: PLC0415

    return load_weights(model.weights_file(), model.NAME), model.load_model()


def _quantize(
    weights: Weights, formats: tuple[str, ...], model: "SentenceModel | None", view: View
) -> tuple[tuple[FormatResult, ...], tuple[SentenceResult, ...]]:
    """Quantize every matrix in every format, and run the model with each."""
    swept: list[FormatResult] = []
    sentences: list[SentenceResult] = []
    exact = model.embed(SENTENCES) if model else None
    steps = len(formats) * (len(weights.matrices) + (model is not None))
    with view.progress(steps) as tick:
        for fmt in formats:
            result, quantized = sweep(weights.matrices, fmt, tick)
            swept.append(result)
            if model is None or exact is None:
                continue
            with model.swapped(quantized):
                start = time.perf_counter()
                embeddings = model.embed(SENTENCES)
                seconds = time.perf_counter() - start
            sentences.append(compare_embeddings(fmt, exact, embeddings, seconds))
            tick(f"{fmt}  {len(SENTENCES)} sentences")
    return tuple(swept), tuple(sentences)


def _compile(
    weights: Weights, formats: tuple[str, ...], backend: str, view: View
) -> tuple[CompileResult, ...]:
    """Run the compile check of one matrix in every format."""
    name = pick_matrix(weights.matrices)
    results: list[CompileResult] = []
    with view.progress(len(formats)) as tick:
        for fmt in formats:
            results.append(check_compile(name, weights.matrices[name], fmt, backend))
            tick(f"{fmt}  torch.compile")
    return tuple(results)
