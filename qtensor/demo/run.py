"""Run the demo: load, quantize, run the model, compile, report."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from qtensor.core.errors import QTensorError
from qtensor.demo import render
from qtensor.demo.compile_check import CompileResult, check_compile, pick_matrix
from qtensor.demo.report import DemoReport, environment
from qtensor.demo.sentences import SENTENCES, SentenceResult, compare_embeddings
from qtensor.demo.sweep import FormatResult, sweep
from qtensor.demo.weights import load_weights
from qtensor.kernels.cpu import native, prebuilt, sources

if TYPE_CHECKING:
    from qtensor.demo.model import SentenceModel


def run_demo(
    formats: Sequence[str],
    path: Path | None,
    backend: str | None,
    say: Callable[[str], object],
) -> DemoReport:
    """Run every part, and print the result of each as soon as it is known.

    Without a path, the model of the demo is used; without a backend, nothing is compiled.

    Raises:
        QTensorError: the user's file cannot be used, or a function does not compile.
    """
    model: SentenceModel | None = None
    if path is not None:
        source, matrices = load_weights(path)
    else:
        # Imported here because transformers takes seconds to import, and a file does not need it.
        from qtensor.demo import model as sentence_model  # noqa: PLC0415

        source, matrices = load_weights(sentence_model.weights_file(), sentence_model.NAME)
        model = sentence_model.load_model()
    here = environment()
    say(render.header(here, source))
    _build_kernels()

    swept, sentences = _quantize(matrices, formats, model)
    no_sentences = None if model else "--weights gives matrices, not a model to run them in"
    say(render.formats(swept, source))
    say(render.sentences(sentences, no_sentences))

    compiled: list[CompileResult] = []
    if backend is not None:
        name = pick_matrix(matrices)
        compiled = [check_compile(name, matrices[name], fmt, backend) for fmt in formats]
    no_compile = "--no-compile was given" if backend is None else None
    say(render.compiled(compiled, no_compile))
    return DemoReport(here, source, swept, sentences, no_sentences, compiled, no_compile)


def _build_kernels() -> None:
    """Compile the kernels first: the measured seconds of the parts must not include it."""
    if not native.is_off():
        # Without kernels the first call warns, and the reference is used.
        with contextlib.suppress(QTensorError):
            prebuilt.provide(sources.choose_isa())


def _quantize(
    matrices: Mapping[str, Tensor], formats: Sequence[str], model: "SentenceModel | None"
) -> tuple[list[FormatResult], list[SentenceResult]]:
    """Quantize every matrix in every format, and run the model with each."""
    swept: list[FormatResult] = []
    sentences: list[SentenceResult] = []
    exact = model.embed(SENTENCES) if model else None
    for fmt in formats:
        result, quantized = sweep(matrices, fmt)
        swept.append(result)
        if model is None or exact is None:
            continue
        with model.swapped(quantized):
            start = time.perf_counter()
            embeddings = model.embed(SENTENCES)
            seconds = time.perf_counter() - start
        sentences.append(compare_embeddings(fmt, exact, embeddings, seconds))
    return swept, sentences
