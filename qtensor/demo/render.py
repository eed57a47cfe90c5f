"""The texts that the demo prints. This module computes nothing."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.filesize import decimal

from qtensor.core.texts import aligned
from qtensor.demo.compile_check import CompileResult
from qtensor.demo.sentences import SentenceResult
from qtensor.demo.sweep import FormatResult
from qtensor.demo.weights import Source


def header(here: Mapping[str, Any], source: Source) -> str:
    """Return the environment and the weights."""
    others = f"; {source.skipped} others untouched" if source.skipped else ""
    return (
        f"qtensor {here['qtensor']}, torch {here['torch']}, Python {here['python']}, "
        f"{here['threads']} threads\n{here['platform']}\n"
        f"weights: {source.name}, {source.matrices} matrices, {source.values:,} values, "
        f"{decimal(source.nbytes)}{others}"
    )


def formats(results: Sequence[FormatResult], source: Source) -> str:
    """Return part 1: size and error of every format."""
    loaded = f"{8 * source.nbytes / source.values:.2f}"
    rows = [("(as loaded)", "", loaded, "", "", decimal(source.nbytes), "")]
    for result in results:
        layer = result.worst_layer.removesuffix(".weight")
        decibels = _decibel(result.sqnr_mean_db), _decibel(result.sqnr_worst_db)
        bits, seconds = f"{result.bits_per_value:.2f}", f"{result.seconds:.2f}"
        rows.append((result.format, layer, bits, *decibels, decimal(result.nbytes), seconds))
    notes = [
        "dB: signal to quantization noise (SQNR), higher is better; 6 dB are one bit.",
        "Bits per value and bytes count codes, scales and padding.",
    ]
    if any(result.format == "mxfp6" for result in results):
        notes.append("mxfp6 stores one code a byte by default; packed=True takes 6.25 bits.")
    if broken := sum(layer.not_finite for layer in results[0].layers):
        notes.append(f"{broken:,} values are NaN or infinite; no dB counts them.")
    titles = ("format", "worst layer", "bits", "mean dB", "worst dB", "bytes", "s")
    return _part("1  Every matrix in every format", titles, rows, notes)


def sentences(results: Sequence[SentenceResult], skipped: str | None) -> str:
    """Return part 2: the model's embeddings with quantized weights."""
    title = "2  The model with quantized weights"
    if skipped:
        return _skipped(title, skipped)
    titles = ("format", "sentence of the min", "cosine min", "cosine mean", "s")
    rows = []
    for r in results:
        cosines = f"{r.cosine_min:.5f}", f"{r.cosine_mean:.5f}"
        rows.append((r.format, r.worst_sentence, *cosines, f"{r.seconds:.2f}"))
    note = "Cosine similarity of each sentence's embedding to float32; 1 is the same."
    return _part(title, titles, rows, [note])


def compiled(results: Sequence[CompileResult], skipped: str | None) -> str:
    """Return part 3: the compile checks."""
    title = "3  In and out of torch.compile(fullgraph=True)"
    if skipped:
        return _skipped(title, skipped)
    rows = []
    for r in results:
        counts = str(r.graphs), str(r.graph_breaks), f"{r.bytes_equal:,} of {r.bytes_total:,}"
        rows.append((r.format, "ok" if r.ok else "FAILED", *counts, f"{r.seconds:.2f}"))
    first = results[0]
    notes = [
        f"In: {first.matrix}, quantized. Out: the same, and x @ weight.T quantized.",
        f"One compiled function for batches of {', '.join(map(str, first.batches))}; "
        f"backend {first.backend}.",
    ]
    if failed := [r.format for r in results if not r.ok]:
        notes.append(f"The compile check failed for {', '.join(failed)}.")
    titles = ("format", "", "graphs", "breaks", "bytes equal to eager", "s")
    return _part(title, titles, rows, notes)


def _part(
    title: str, titles: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str]
) -> str:
    return "\n".join(["", title, *aligned([titles, *rows], numbers_from=2), *notes])


def _skipped(title: str, reason: str) -> str:
    return f"\n{title}: skipped, {reason}."


def _decibel(value: float) -> str:
    return f"{value:.1f}".replace("inf", "exact")
